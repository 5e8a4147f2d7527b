"""Build an embedded model: ``python -m rlpost.models.warm_start NAME``. The only file of this package that needs torch."""

from __future__ import annotations

import math
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from rlpost.models.embedded import RECIPES, TEACHERS, Recipe, embedded_rows, model_path

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
VOCABULARY_MULTIPLE = 32
POSITIONS = 1024
BATCH, PEAK_LR, WARMUP, FINAL_RATIO = 64, 4e-3, 20, 0.1
"""The warm start: 64 samples a step, AdamW, 20 steps of warm-up, cosine to 10 %."""
IGNORE = -100


def make_tokenizer(directory: Path) -> int:
    """Write a character tokenizer (printable ASCII and newline); returns the padded vocabulary size."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = ["\n", *(chr(code) for code in range(32, 127))]
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, UNKNOWN, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    ).save_pretrained(str(directory))
    return -(-len(vocabulary) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def make_model(recipe: Recipe, vocabulary: int) -> Any:
    """A Qwen3 model of the recipe's architecture with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        vocab_size=vocabulary, max_position_embeddings=POSITIONS, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        **recipe.architecture,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def batch_of(task: str, rows: list[dict[str, Any]], tokenizer: Any, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels ``[BATCH, longest]``, right-padded; only the teacher's own tokens have labels."""
    samples = []
    for _ in range(BATCH):
        tokens: list[int] = []
        labels: list[int] = []
        for text, learnt in TEACHERS[task](rng.choice(rows), rng):
            piece = tokenizer.encode(text, add_special_tokens=False) + ([tokenizer.eos_token_id] if learnt else [])
            tokens += piece
            labels += piece if learnt else [IGNORE] * len(piece)
        samples.append((tokens, labels))
    longest = max(len(tokens) for tokens, _ in samples)
    inputs = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in samples])
    targets = torch.tensor([labels + [IGNORE] * (longest - len(labels)) for _, labels in samples])
    return inputs, targets


def supervise(model: Any, tokenizer: Any, recipe: Recipe) -> float:
    """Train on the sloppy teacher; returns the last loss."""
    assert recipe.task is not None
    rng = random.Random(recipe.seed)
    rows = embedded_rows(recipe.task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.0)
    value = math.nan
    for step in range(recipe.steps):
        progress = max(0.0, (step - WARMUP) / max(1, recipe.steps - WARMUP))
        shape = FINAL_RATIO + (1 - FINAL_RATIO) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1.0, (step + 1) / WARMUP) * shape
        inputs, targets = batch_of(recipe.task, rows, tokenizer, rng)
        logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = loss.item()
        if (step + 1) % 100 == 0:
            print(f"  warm start {step + 1}/{recipe.steps}  loss {value:.3f}", flush=True)
    return value


def build_here(name: str) -> Path:
    """Build the model into the cache; the directory appears at once or not at all."""
    recipe, final = RECIPES[name], model_path(name)
    torch.set_num_threads(1)
    started = time.perf_counter()
    partial = final.with_name(f"{final.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    vocabulary = make_tokenizer(partial)
    from transformers import AutoTokenizer

    model = make_model(recipe, vocabulary)
    if recipe.task is not None:
        supervise(model, AutoTokenizer.from_pretrained(str(partial)), recipe)
    model.save_pretrained(str(partial))
    if final.exists():  # another process was faster
        shutil.rmtree(partial)
    else:
        partial.rename(final)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"built {name} ({size:.2f} M parameters) in {time.perf_counter() - started:.0f} s", flush=True)
    return final


if __name__ == "__main__":
    build_here(sys.argv[1])
