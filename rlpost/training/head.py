"""The value head: one number a token instead of a distribution over the vocabulary, for critics and reward models.

In a directory it is what transformers calls a sequence classifier with one label: the model's body, and ``score``, a linear layer from
the hidden state to one number.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional

from rlpost.types import ConfigError

SCORE = "score.weight"
CLASSIFIER = "ForSequenceClassification"
"""How transformers ends the names of models with such a head."""


def one_label(config: Any, path: str) -> None:
    """Give a model's configuration one label. Raises ConfigError when the directory's own head has another number."""
    if _is_classifier(config) and config.num_labels != 1:
        raise ConfigError(
            f"{path} is a classifier with {config.num_labels} labels; a reward model or critic needs exactly one (num_labels=1): "
            "give a reward model, or a language model, which gets a new head"
        )
    config.num_labels = 1


def load_with_head(path: str, trust_remote_code: bool) -> Any:
    """The model at ``path`` in float32 with its value head, or with a new one that says exactly 0 of every token.

    Raises ConfigError when anything else is missing in the directory: transformers would fill it with noise.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # a missing head is no fault here, and what else is missing is refused below
    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=1, dtype=torch.float32, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    finally:
        logging.set_verbosity(verbosity)
    missing = set(found["missing_keys"])
    allowed = set() if _is_classifier(model.config) else {SCORE}
    if missing - allowed:
        raise ConfigError(f"{path} lacks weights that its config.json promises: {sorted(missing - allowed)[:5]}; give a complete directory")
    if missing:
        torch.nn.init.zeros_(model.score.weight)
    return model


def _is_classifier(config: Any) -> bool:
    return any(name.endswith(CLASSIFIER) for name in config.architectures or ())


def train_head(model: Any) -> None:
    """Train the head, whatever else is frozen: a new one is 0, and nothing below it would ever learn.

    Raises ConfigError for an architecture whose head is another, and when the head has an adapter.
    """
    score = getattr(model, "score", None)
    if not isinstance(score, torch.nn.Linear) or score.bias is not None or not hasattr(model, "model"):
        raise ConfigError(
            f"{type(model).__name__} cannot be a critic or reward model: expected a body `model` and a linear layer `score` without bias, "
            f"found {[name for name, _ in model.named_children()]}; use another architecture"
        )
    if type(score) is not torch.nn.Linear:
        raise ConfigError("training.lora.targets matches score, the value head, which is trained itself; give a pattern that leaves it out")
    score.requires_grad_(True)


def values_of(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The head's word on hidden states ``[targets, hidden]``: ``[targets]``, computed in float32 (a score has no 8 bits to lose)."""
    return functional.linear(hidden.float(), model.score.weight.float())[:, 0]
