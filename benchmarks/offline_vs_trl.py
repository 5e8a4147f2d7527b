"""Offline training against TRL: SFT and DPO on the same model, rows, optimizer and threads, in turns.

    python -m benchmarks.offline_vs_trl [--tasks sft,dpo] [--steps 2] [--turns 3]

Each side is one process that holds a trainer and nothing else, float32, without padding where it can. Both train on the same rows in the
same order, as many in an optimizer step; while one has its turn the other waits. A turn counts everything from the tokenised rows to the
new weights: batches, forward, backward, clipping, optimizer, metrics. Start-up, tokenising and DPO's reference logprobs, which both
compute beforehand, do not count. A token is a real one of a sequence; padding is none, and the prompt of a pair is two. The losses of all
steps show that both do the same work. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import random
import signal
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlpost.models.embedded import build

MODEL = "random-25m"
ROWS_A_STEP = {"sft": 8, "dpo": 4}
"""8 sequences a step of both."""
LEARNING_RATE = 1e-4
WARM_UP = 1
"""Steps before the first turn."""
MICRO_BATCH_TOKENS = 4096
"""Of ours."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What both sides do. ``rows`` is a JSONL file with as many rows as all steps need, in their order."""

    task: str
    model: str
    rows: str
    steps: int
    """Of a turn."""
    turns: int
    threads: int
    peer_rows: int
    """Rows of TRL's micro-batch."""
    peer_packing: bool
    """TRL packs (sft only), in rows of MICRO_BATCH_TOKENS."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of a side."""
        return WARM_UP + self.steps * self.turns


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a side did in a turn."""

    seconds: float
    cpu_seconds: float
    """Of all threads; holds better than wall time when others use the machine."""
    tokens: int
    losses: list[float]


class Turns:
    """A side's end of the pipe: it reports the warm-up and each turn, and waits until the next one is its own."""

    def __init__(self, work: Work, pipe: Connection) -> None:
        self.work, self.pipe = work, pipe
        self._remaining = work.turns
        self._begin(WARM_UP)

    def _begin(self, steps: int) -> None:
        self._left, self._tokens = steps, 0
        self._losses: list[float] = []
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def after_step(self, tokens: int, loss: float) -> None:
        """To be called after each optimizer step, with the real tokens of its sequences."""
        self._tokens += tokens
        self._losses.append(loss)
        self._left -= 1
        if self._left:
            return
        seconds, cpu_seconds = time.perf_counter() - self._start, time.process_time() - self._cpu_start
        self.pipe.send(Turn(seconds=seconds, cpu_seconds=cpu_seconds, tokens=self._tokens, losses=self._losses))
        if self._remaining:
            self.pipe.recv()
            self._remaining -= 1
            self._begin(self.work.steps)


# ---- ours --------------------------------------------------------------------------------------------------------------


def ours(work: Work, pipe: Connection) -> None:
    """A trainer rank, driven as the offline loop drives it, without Ray."""
    from rlpost.algorithms.catalogue import make_offline_algorithm
    from rlpost.config.algorithms import with_defaults
    from rlpost.config.schema import AlgorithmConfig, DataConfig, OptimizerConfig, TrainingConfig
    from rlpost.data.offline import load_rows, tokenize_rows
    from rlpost.data.tokenizer import PromptTokenizer
    from rlpost.driver.batch import with_reference_logprobs
    from rlpost.driver.reference_cache import ReferenceCache
    from rlpost.training.packing import MicroBatch, pack, unpack
    from rlpost.training.protocol import UpdateRequest, WorkerSettings
    from rlpost.training.worker import TrainerRank

    algorithm = make_offline_algorithm(with_defaults(AlgorithmConfig(name=work.task, reference="precomputed")))
    data = DataConfig(train=work.rows)
    rows, _ = tokenize_rows(load_rows(work.rows, algorithm.data_kind, data), PromptTokenizer(work.model), algorithm.data_kind, data)
    optimizer = OptimizerConfig(lr=LEARNING_RATE, beta2=0.999)
    training = TrainingConfig(threads=work.threads, micro_batch_tokens=MICRO_BATCH_TOKENS, optimizer=optimizer)
    rank = TrainerRank(
        0,
        1,
        WorkerSettings(
            model_path=work.model,
            training=training,
            dtype="float32",
            device="cpu",
            attention="padded",
            total_updates=work.total_steps,
            seed=0,
            timeout_s=60.0,
        ),
    )
    rank.setup(*rank.address())

    def packed(terms: Sequence[Any]) -> list[list[MicroBatch]]:
        return pack(terms, ranks=1, micro_batch_tokens=MICRO_BATCH_TOKENS, together=algorithm.together)

    cache = ReferenceCache(Path(work.rows).parent)
    if algorithm.needs_reference:
        everything = algorithm.terms(rows).terms
        micros = packed(everything)
        cache.add(everything, unpack(micros, [rank.logprobs(micros[0], 1.0)], everything))
    size, turns = ROWS_A_STEP[work.task], Turns(work, pipe)
    for start in range(0, len(rows), size):
        batch = algorithm.terms(rows[start : start + size])
        terms = with_reference_logprobs(batch.terms, cache.read(batch.terms)) if algorithm.needs_reference else batch.terms
        metrics = rank.update(
            UpdateRequest(
                micro_batches=packed(terms)[0],
                denominators=batch.denominators,
                components=algorithm.components(),
                temperature=1.0,
                measure_parity=False,
            )
        )
        turns.after_step(sum(len(term.tokens) for term in terms), metrics["train/loss"])


# ---- both --------------------------------------------------------------------------------------------------------------


def write_rows(path: Path, task: str, count: int) -> None:
    """Random prompts and answers of long-tailed lengths: prompts around 60 tokens, answers around 100, the longest 5 to 8 times that.

    A character is a token of the embedded models. Rows of one optimizer step stand longest first, so that TRL, which takes its
    micro-batches from the data set's order, pads little; ours packs, whatever the order.
    """
    rng = random.Random(0)

    def text(median: float, spread: float, most: int) -> str:
        length = min(most, max(4, round(median * rng.lognormvariate(0.0, spread))))
        return "".join(rng.choices(string.ascii_lowercase + string.digits, k=length))

    def answer() -> str:
        return text(100, 0.9, 512)

    answers: tuple[str, ...] = ("completion",) if task == "sft" else ("chosen", "rejected")
    rows = [{"prompt": text(60, 0.8, 384), **{name: answer() for name in answers}} for _ in range(count)]
    size = ROWS_A_STEP[task]
    with path.open("w") as file:
        for start in range(0, count, size):
            for row in sorted(rows[start : start + size], key=lambda row: -max(len(row["prompt"] + row[name]) for name in answers)):
                print(json.dumps(row), file=file)


@contextmanager
def side(target: Callable[[Work, Connection], None], work: Work) -> Iterator[Connection]:
    """A process that runs ``target``; its first word comes after the warm-up."""
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=target, args=(work, other), daemon=True)
    process.start()
    other.close()
    try:
        yield own
        process.join()
    finally:
        process.kill()


def measure(work: Work) -> dict[str, Any]:
    """Turns of both, one after the other, and what comes of them."""
    from benchmarks.peer_trl_offline import trl

    done: dict[str, list[Turn]] = {"ours": [], "trl": []}
    with side(ours, work) as our_pipe, side(trl, work) as their_pipe:
        our_pipe.recv(), their_pipe.recv()
        for _ in range(work.turns):
            for name, pipe in (("ours", our_pipe), ("trl", their_pipe)):
                pipe.send("yours")
                done[name].append(pipe.recv())
    speeds = {name: [turn.tokens / turn.seconds for turn in turns] for name, turns in done.items()}
    cpu_speeds = {name: [turn.tokens / turn.cpu_seconds for turn in turns] for name, turns in done.items()}
    losses = {name: [loss for turn in turns for loss in turn.losses] for name, turns in done.items()}
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    cpu_medians = {name: statistics.median(values) for name, values in cpu_speeds.items()}
    return {
        "task": work.task,
        "tokens_a_step": sum(turn.tokens for turn in done["ours"]) / work.steps / work.turns,
        "trl_tokens_a_step": sum(turn.tokens for turn in done["trl"]) / work.steps / work.turns,
        "tokens_per_s": speeds,
        "median_tokens_per_s": medians,
        "ratio": medians["ours"] / medians["trl"],
        "tokens_per_cpu_s": cpu_speeds,
        "median_tokens_per_cpu_s": cpu_medians,
        "cpu_ratio": cpu_medians["ours"] / cpu_medians["trl"],
        # Packing puts other rows into a step.
        "largest_loss_difference": None
        if work.peer_packing
        else max(abs(a - b) / max(abs(a), abs(b)) for a, b in zip(losses["ours"], losses["trl"], strict=True)),
        "losses": losses,
    }


def show(result: dict[str, Any]) -> None:
    """One task as lines."""
    print(f"\n{result['task']}: {result['tokens_a_step']:.0f} tokens a step (TRL counts {result['trl_tokens_a_step']:.0f})")
    for name, speeds in result["tokens_per_s"].items():
        print(
            f"  {name:5} {result['median_tokens_per_s'][name]:6.0f} tokens/s (turns: {', '.join(f'{one:.0f}' for one in speeds)}), "
            f"{result['median_tokens_per_cpu_s'][name]:.0f} tokens a CPU second"
        )
    difference = result["largest_loss_difference"]
    told = "" if difference is None else f"; losses of all steps differ by {difference:.0e} of their size at most"
    print(f"  ours / TRL {result['ratio']:.2f}, of tokens a CPU second {result['cpu_ratio']:.2f}{told}")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offline_vs_trl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default="sft,dpo", help="comma-separated, of sft, dpo (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps of a turn (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="turns of each side (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each side (default: %(default)s)")
    parser.add_argument("--peer-rows", type=int, default=2, help="rows of TRL's micro-batch, a divisor of 4 (default: %(default)s)")
    parser.add_argument("--peer-packing", action="store_true", help="TRL packs too, where it can (sft)")
    options = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        print("TRL is not installed: .venv/bin/pip install 'trl==1.16.0'")
        return 1
    from rlpost.cluster.session import KEEP_FREED_MEMORY

    # The environment of our trainer ranks, given to both.
    os.environ.update({**KEEP_FREED_MEMORY, "OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false"})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that both sides are ended too
    results = []
    for task in options.tasks.split(","):
        with tempfile.TemporaryDirectory(prefix="rlpost-bench-") as scratch:
            work = Work(
                task=task,
                model=str(build(MODEL)),
                rows=str(Path(scratch) / "rows.jsonl"),
                steps=options.steps,
                turns=options.turns,
                threads=options.threads,
                peer_rows=options.peer_rows,
                peer_packing=options.peer_packing and task == "sft",
            )
            write_rows(Path(work.rows), task, ROWS_A_STEP[task] * work.total_steps)
            results.append(measure(work))
        show(results[-1])
    print(json.dumps({f"{result['task']}_ratio": result["ratio"] for result in results} | {"tasks": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
