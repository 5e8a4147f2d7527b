"""What the trainer's patched forward takes for granted of a model: logits are one matrix product, and nothing in it is random."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from rlpost.config.schema import TrainingConfig
from rlpost.training.model import check_output_layer, load_policy, no_dropout
from rlpost.training.packing import build
from rlpost.types import ConfigError, LossTerms

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tiny(architecture: str, **values: Any) -> Any:
    """A random model whose logits are about as large as those of trained ones; a bias of its output layer is not 0."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **SHAPE, **values))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "lm_head.bias":
                parameter.normal_()
            elif parameter.ndim > 1:
                parameter.mul_(10)
    return model


def load(path: Path, mesh: DeviceMesh) -> Any:
    return load_policy(
        str(path),
        config=TrainingConfig(),
        dtype=torch.float32,
        mesh=mesh,
        device=torch.device("cpu"),
        attention_name="padded",
        trust_remote_code=False,
    )


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


# ---- the output layer ----------------------------------------------------------------------------------------------

MORE_THAN_A_PRODUCT = [
    ("granite", {"logits_scaling": 8.0}),
    ("cohere", {"logit_scale": 0.0625}),
    ("phi", {}),
    ("gemma2", {"head_dim": 8, "final_logit_softcapping": 3.0}),
]


@pytest.mark.parametrize(("architecture", "values"), MORE_THAN_A_PRODUCT, ids=["scaled", "scaled by a factor", "bias", "cut"])
def test_logits_that_are_more_than_a_product_are_refused(architecture: str, values: dict[str, Any]) -> None:
    """Their logprobs would be wrong without any error: those of another temperature, or of another distribution."""
    model = tiny(architecture, **values)
    with pytest.raises(ConfigError, match=rf"some/model: {type(model).__name__} makes its logits by more than one .*another architecture"):
        check_output_layer(model, "some/model")


def test_a_body_of_another_name_is_refused_and_is_no_attribute_error() -> None:
    with pytest.raises(ConfigError, match=r"some/model: GPT2LMHeadModel .* body `model` and output layer `lm_head`"):
        check_output_layer(AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=4)), "some/model")


@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 8}),
        ("llama", {}),
        ("granite", {"logits_scaling": 1.0}),
        ("cohere", {"logit_scale": 1.0}),
    ],
)
def test_logits_that_are_a_product_pass_also_with_dropout(architecture: str, values: dict[str, Any]) -> None:
    """Asked without dropout, whose noise would refuse every model that has it; the name of the architecture does not count."""
    check_output_layer(tiny(architecture, **values, attention_dropout=0.5).train(), "some/model")


def test_loading_a_policy_asks(tmp_path: Path, mesh: DeviceMesh) -> None:
    tiny("granite", logits_scaling=8.0).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="GraniteForCausalLM makes its logits"):
        load(tmp_path, mesh)


# ---- dropout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("llama", {"attention_dropout"}),
        ("phi", {"attention_dropout", "resid_pdrop", "embd_pdrop"}),
        ("gpt2", {"attn_pdrop", "resid_pdrop", "embd_pdrop", "summary_first_dropout"}),
    ],
)
def test_every_kind_of_dropout_is_switched_off_and_nothing_else(architecture: str, names: set[str]) -> None:
    config = AutoConfig.for_model(architecture, **dict.fromkeys(names, 0.3))
    before = config.to_dict()
    no_dropout(config)
    after = config.to_dict()
    assert {name: after[name] for name in names} == dict.fromkeys(names, 0.0)
    assert {name for name, value in before.items() if after[name] != value} == names


def test_two_forwards_of_a_policy_with_dropout_are_equal(tmp_path: Path, mesh: DeviceMesh) -> None:
    """In training mode, as an update runs it: the importance ratio of a fresh sample is 1."""
    model = tiny("phi", resid_pdrop=0.5, embd_pdrop=0.5)
    torch.nn.init.zeros_(model.lm_head.bias)
    model.save_pretrained(tmp_path)
    policy = load(tmp_path, mesh)
    assert policy.training
    tokens, mask = np.arange(3, 15, dtype=np.int32), np.arange(12) >= 4
    terms = LossTerms(trajectory_id="t", group_id="g", prompt_length=4, tokens=tokens, trainable=mask, weight=np.ones(12, np.float32))
    first, second = (policy(build([terms], [0]), 1.0).logprobs.detach() for _ in range(2))
    assert torch.equal(first, second)
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(tokens).long()[None]).logits[0].log_softmax(-1)
    expected = logits[torch.arange(3, 11), torch.from_numpy(tokens[4:]).long()]
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-4)
