"""TRL's side of ``benchmarks.offline_vs_trl`` (optional dependency): SFTTrainer or DPOTrainer in one process, as fast as it goes on a CPU.

That is: no gradient checkpointing (its default is on), micro-batches of rows of similar length, torch's scaled-dot-product attention,
fused AdamW, reference logprobs precomputed. ``--peer-rows`` and ``--peer-packing`` are other ways to try.
"""

from __future__ import annotations

import os
import tempfile
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.offline_vs_trl import LEARNING_RATE, MICRO_BATCH_TOKENS, ROWS_A_STEP, Turns, Work


def trl(work: Work, pipe: Connection) -> None:
    """Train on the rows in their order, in turns."""
    os.environ.update({"CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled", "TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"})
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.trainer_callback import PrinterCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    torch.set_num_threads(work.threads)
    turns = Turns(work, pipe)

    class AfterStep(TrainerCallback):
        """Its log comes after every optimizer step, with the tokens so far."""

        def __init__(self) -> None:
            self.tokens = 0

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                turns.after_step(int(logs["num_tokens"]) - self.tokens, logs["loss"])
                self.tokens = int(logs["num_tokens"])

    with tempfile.TemporaryDirectory() as output:
        micro_batch = 1 if work.peer_packing else work.peer_rows
        common: dict[str, Any] = {
            "output_dir": output, "per_device_train_batch_size": micro_batch, "max_steps": work.total_steps,
            "gradient_accumulation_steps": 1 if work.peer_packing else ROWS_A_STEP[work.task] // micro_batch,
            "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0,
            "train_sampling_strategy": "sequential", "dataloader_num_workers": 0, "dataloader_pin_memory": False,
            "gradient_checkpointing": False, "use_cpu": True, "bf16": False, "fp16": False,
            "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "max_length": 1024,
        }  # fmt: skip
        arguments = {
            "model": AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32),
            "processing_class": AutoTokenizer.from_pretrained(work.model),
            "train_dataset": load_dataset("json", data_files=work.rows, split="train", cache_dir=output),
            "callbacks": [AfterStep()],
        }
        if work.task == "sft":
            packing = {"packing": True, "max_length": MICRO_BATCH_TOKENS} if work.peer_packing else {}
            trainer: Any = SFTTrainer(args=SFTConfig(**{**common, **packing}), **arguments)
        else:
            trainer = DPOTrainer(args=DPOConfig(**common, precompute_ref_log_probs=True, beta=0.1), **arguments)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
