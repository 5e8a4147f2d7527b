"""The same work in TRL (optional dependency), its cheapest mode on CPU: GRPOTrainer with Hugging Face generate, one process.

``python -m benchmarks.peer_trl MODEL MAX_NEW_TOKENS STEPS [STOP_ID ...]`` prints one JSON object: CPU and wall seconds a step after
the first two.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

FIRST = 2
PROMPTS, SAMPLES = 8, 8


def run(model_path: str, max_new_tokens: int, steps: int, stops: list[int]) -> dict[str, Any]:
    """Train ``steps`` steps and measure those after FIRST."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rlpost.models.embedded import embedded_rows

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    tokenizer.model_max_length = 1024
    if stops:
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, *stops]
    marks: list[tuple[float, float]] = []
    lengths: list[int] = []

    class Marks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append((time.process_time(), time.perf_counter()))

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [-len(ids) / max_new_tokens for ids in completion_ids]

    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output, per_device_train_batch_size=PROMPTS * SAMPLES, num_generations=SAMPLES, max_completion_length=max_new_tokens,
            max_steps=steps, learning_rate=1e-9, beta=0.0, temperature=1.0, bf16=False, fp16=False, use_cpu=True,
            gradient_checkpointing=False, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, loss_type="dapo",
            mask_truncated_completions=False,
            dataloader_num_workers=0, generation_kwargs={"eos_token_id": [tokenizer.eos_token_id, *stops]},
        )  # fmt: skip
        rows = [{"prompt": row["prompt"]} for row in embedded_rows("sort5")[:64]]
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Marks()],
        )
        trainer.train()
    measured = len(marks) - FIRST
    done = lengths[FIRST * PROMPTS * SAMPLES :]
    return {
        "cpu_s": (marks[-1][0] - marks[FIRST - 1][0]) / measured,
        "wall_s": (marks[-1][1] - marks[FIRST - 1][1]) / measured,
        "tokens": sum(done) / measured,
        "steps": measured,
    }


if __name__ == "__main__":
    os.environ.update({"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"})
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), [int(word) for word in sys.argv[4:]])))
