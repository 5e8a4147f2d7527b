"""Memory of logprobs and entropy: ours, a chunk of tokens at a time, against a whole float32 ``[tokens, vocabulary]``.

    python -m benchmarks.logprobs

One step: logprob and entropy of every token, and their gradients to hidden states and output weight. Each way runs in a process of its
own; its memory is the peak of resident memory less what was resident before the step. The last line printed is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from rlpost.config.schema import TrainingConfig
from rlpost.training.logprob import target_logprob

WAYS = ("ours", "naive")
TEMPERATURE = 0.8
OUTPUTS = ("logprob", "entropy", "hidden gradient", "weight gradient")


def naive(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob and entropy ``[tokens]`` from all logits at once."""
    log_p = torch.log_softmax(hidden @ weight.t() / TEMPERATURE, -1)
    return log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def run_way(way: str, options: argparse.Namespace, output: Path) -> None:
    """In a process of its own: the step, what it needed, and its results in ``output``."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, generator=generator).requires_grad_()
    weight = torch.empty(options.vocabulary, options.hidden).normal_(std=0.05, generator=generator).requires_grad_()
    target = torch.randint(0, options.vocabulary, (options.tokens,), generator=generator)
    upstream = [torch.randn(options.tokens, generator=generator) for _ in range(2)]
    (hidden[:8].detach() @ weight[:8].detach().t()).sum()  # the matrix library's own buffers are no part of it
    before, start = resident_bytes(), time.perf_counter()
    results = naive(hidden, weight, target) if way == "naive" else target_logprob(hidden, weight, target, TEMPERATURE, options.chunk)
    torch.autograd.backward(results, upstream)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert hidden.grad is not None and weight.grad is not None
    tensors = [*(result.detach() for result in results), hidden.grad, weight.grad]
    torch.save({"seconds": seconds, "bytes": peak, **dict(zip(OUTPUTS, tensors, strict=True))}, output)


def compare(ours: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest difference of each output over its largest element."""
    return {name: float((ours[name] - other[name]).abs().max() / other[name].abs().max()) for name in OUTPUTS}


def main() -> int:
    """Command line; exit code 1 when the two ways differ or ours needs more than a quarter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--chunk", type=int, default=TrainingConfig().logprob_chunk_tokens, help="training.logprob_chunk_tokens")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        run_way(options.way, options, options.output)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        files = {way: Path(directory) / way for way in WAYS}
        for way, file in files.items():
            command = [sys.executable, "-m", "benchmarks.logprobs", *sys.argv[1:], "--way", way, "--output", str(file)]
            subprocess.run(command, check=True)
        ours, other = (torch.load(files[way]) for way in WAYS)
    differences = compare(ours, other)
    gib = {way: result["bytes"] / 2**30 for way, result in zip(WAYS, (ours, other), strict=True)}
    print(f"{options.tokens} tokens, vocabulary {options.vocabulary}, hidden {options.hidden}, float32, {torch.get_num_threads()} threads")
    for way, result in zip(WAYS, (ours, other), strict=True):
        print(f"{way:6} {gib[way]:7.2f} GiB above the inputs, {result['seconds']:7.1f} s")
    for name, difference in differences.items():
        print(f"{name}: largest difference {difference:.1e} of the largest element")
    figures = {
        "memory_ratio": round(gib["ours"] / gib["naive"], 4),
        "seconds_ratio": round(float(ours["seconds"]) / float(other["seconds"]), 3),
        "ours_gib": round(gib["ours"], 3),
        "naive_gib": round(gib["naive"], 3),
        "chunk": options.chunk,
        "largest_difference": max(differences.values()),
    }
    print(json.dumps(figures))
    return int(figures["memory_ratio"] > 0.25 or figures["largest_difference"] > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
