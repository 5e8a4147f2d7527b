"""The limit: bare vLLM in one process, and a bare PyTorch forward and backward, on the very sequences of a run of ours.

``python -m benchmarks.bare generate|update MODEL ROLLOUTS...`` prints one JSON object: tokens, wall and CPU seconds of the
files after the first (that one warms up). One thread, float32, nothing else in the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

THREADS = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}


def sequences(path: str) -> list[dict[str, Any]]:
    """The trajectories of one step."""
    from rlpost.observe import read_rollouts

    return read_rollouts(Path(path))


def timed(name: str, work: Any, files: list[str]) -> None:
    """Run ``work`` on each file; count all but the first."""
    tokens, wall, cpu = 0, 0.0, 0.0
    for index, file in enumerate(files):
        rows = sequences(file)
        before, began = time.process_time(), time.perf_counter()
        count = work(rows, index)
        if index:
            tokens += count
            wall += time.perf_counter() - began
            cpu += time.process_time() - before
    print(json.dumps({"what": name, "tokens": tokens, "wall_s": wall, "cpu_s": cpu, "steps": len(files) - 1}))


def generate(model: str, files: list[str], max_model_len: int, seeded: bool) -> None:
    """Sample as many tokens for each prompt as the run did."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model, dtype="float32", max_model_len=max_model_len, max_num_seqs=256, block_size=32, enforce_eager=True,
            kv_cache_memory_bytes=256 << 20, enable_chunked_prefill=False, max_num_batched_tokens=8192, skip_tokenizer_init=True,
            logprobs_mode="processed_logprobs", disable_log_stats=True,
        )
    )  # fmt: skip

    def work(rows: list[dict[str, Any]], index: int) -> int:
        total = 0
        for position, row in enumerate(rows):
            sampled = sum(row["trainable"])
            total += sampled
            parameters = SamplingParams(
                max_tokens=sampled, ignore_eos=True, seed=position if seeded else None, logprobs=0, detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            prompt = row["tokens"][: len(row["tokens"]) - sampled]
            engine.add_request(f"{index}-{position}", {"prompt_token_ids": prompt}, parameters)
        while engine.has_unfinished_requests():
            engine.step()
        return total

    timed("generate", work, files)


def update(model_path: str, files: list[str]) -> None:
    """Forward and backward over all tokens of a step in one packed row, full logits, no optimizer."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from rlpost.training import attention

    torch.set_num_threads(1)
    attention.register()
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation=attention.PADDED)
    model.train()

    def work(rows: list[dict[str, Any]], index: int) -> int:
        lengths = np.array([len(row["tokens"]) for row in rows])
        tokens = torch.tensor(np.concatenate([row["tokens"] for row in rows]))
        trained = torch.tensor(np.flatnonzero(np.concatenate([row["trainable"] for row in rows])))
        positions = torch.tensor(np.concatenate([np.arange(n) for n in lengths]))
        hidden = model.model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False,
            packed_layout=attention.PackedLayout.of(lengths, np.arange(lengths.sum()), torch.device("cpu")),
        ).last_hidden_state[0]  # fmt: skip
        logits = model.lm_head(hidden.index_select(0, trained - 1))
        logprobs = torch.log_softmax(logits, -1).gather(1, tokens[trained][:, None])
        (-logprobs.mean()).backward()
        model.zero_grad(set_to_none=True)
        return len(tokens)

    timed("update", work, files)


if __name__ == "__main__":
    os.environ.update(THREADS | QUIET)
    if sys.argv[1] == "generate":
        generate(sys.argv[2], sys.argv[5:], int(sys.argv[3]), sys.argv[4] == "seeded")
    else:
        update(sys.argv[2], sys.argv[3:])
