"""Our terms against the functions that TRL and OpenRLHF publish: same numbers in, same loss and gradient out.

Both are optional, so these tests are skipped where they are not installed. Without touching an environment:

    pip install --target PEERS --no-deps trl==1.16.0 accelerate==1.15.0 openrlhf==0.11.2
    PYTHONPATH=PEERS:tests/unit python -m pytest benchmarks/test_against_peers.py

Their methods run on small namespaces instead of trainers; a fake model gives the logprobs. Where the two differ from us, or from each
other, a test says so:

    what                              they                                ours, and why
    mean over micro-batches           TRL's losses of pairs and rows are  sums over global denominators: a gradient that does not depend
                                      means of means                      on the micro-batch size
    ORPO's likelihood                 TRL trains the prompt too           the answer only: log P(y | x), Hong et al. 2024
    IPO                               OpenRLHF sums over tokens           means, like TRL, whose authors asked IPO's
    KTO's z                           TRL: of a micro-batch               of the whole step
    GAE over tokens of tools          OpenRLHF discounts by them          sampled tokens only: what a tool said is no step of the policy
    a sequence-level mask             OpenRLHF keeps token weights        geometric mean as mask and weight; the weight is a choice
    eps of a group's deviation        TRL 1e-4, OpenRLHF 1e-9             1e-6: only a group of equal rewards notices
    CISPO's upper bound               TRL: the ratio itself               1 + clip_high
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch
from loss_targets import close, targets

from rlpost.algorithms import advantages
from rlpost.algorithms.aggregation import token_weights
from rlpost.algorithms.catalogue import find_terms
from rlpost.algorithms.losses import Targets, total_loss
from rlpost.types import MAIN_WEIGHT, LossComponent, OffPolicyCorrection

HOW = "not installed; the docstring of this file says how to run it"
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason=f"trl is {HOW}")
needs_openrlhf = pytest.mark.skipif(importlib.util.find_spec("openrlhf") is None, reason=f"openrlhf is {HOW}")

LENGTHS = [3, 1, 4, 2, 5, 2]
"""Answers; of pairs the first three are chosen, the last three rejected."""
TOKENS, WIDTH = sum(LENGTHS), max(LENGTHS)
PAIR = {"pair": [0, 1, 2, 0, 1, 2], "side": [1, 1, 1, -1, -1, -1], "pair_weight": [1, 1, 1, 0, 0, 0]}
ADVANTAGE = [0.7, -1.2, 0.3, -0.4, 1.5, -0.9]


def numbers(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logprobs of the policy, of an older policy and of a reference ``[targets]``, far enough apart that every clip is hit."""
    random = np.random.default_rng(seed)
    policy = -random.exponential(size=TOKENS) - 0.05
    return policy, policy + 0.8 * random.normal(size=TOKENS), policy + 0.5 * random.normal(size=TOKENS)


def padded(values: Any, fill: float = 0.0) -> torch.Tensor:
    """``[targets]`` as ``[sequences, longest]``, connected to its gradient."""
    flat = torch.as_tensor(values, dtype=torch.float64)
    rows = [torch.cat([row, row.new_full((WIDTH - len(row),), fill)]) for row in flat.split(LENGTHS)]
    return torch.stack(rows)


MASK = padded(torch.ones(TOKENS))


def spread(values: Sequence[float]) -> np.ndarray:
    """A value a sequence as one a target."""
    return np.repeat(np.asarray(values, np.float64), LENGTHS)


def ours(
    one: Targets,
    component: LossComponent,
    *,
    aggregation: str = "token_mean",
    denominators: Mapping[str, float] | None = None,
    constant: int = 7,
) -> torch.Tensor:
    """The loss as a trainer rank computes it."""
    weights, denominator = token_weights([np.ones(length, bool) for length in LENGTHS], aggregation, constant)
    weight = torch.as_tensor(np.concatenate(weights), dtype=torch.float64)
    # float32 weights of thirds would be all the difference there is
    weight = 1.0 / torch.as_tensor(spread(LENGTHS)) if aggregation == "sequence_mean" else weight
    total, _ = total_loss([component], one, weight, {MAIN_WEIGHT: denominator, **(denominators or {})}, find_terms([component]))
    return total


def same(our_loss: torch.Tensor, our_input: torch.Tensor, their_loss: torch.Tensor, their_input: torch.Tensor) -> None:
    """Value and gradient are equal to 1e-6 of the largest element."""
    close(our_loss.detach().numpy(), their_loss.detach().numpy())
    [gradient] = torch.autograd.grad(our_loss, our_input)
    close(gradient.numpy(), torch.autograd.grad(their_loss, their_input)[0].numpy())
    assert float(gradient.abs().max()) > 0


def leaf(values: np.ndarray) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


# ---- TRL -------------------------------------------------------------------------------------------------------------------


def trainer(**fields: Any) -> Any:
    """What TRL's loss methods read of a trainer: one process, no metrics kept."""
    accelerator = SimpleNamespace(
        device="cpu", num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x
    )
    return SimpleNamespace(
        accelerator=accelerator, model=SimpleNamespace(training=True), aux_loss_enabled=False, _metrics={"train": defaultdict(list)},
        _total_train_tokens=0, _tp_size=1, **fields,
    )  # fmt: skip


def fused_model(logprobs: torch.Tensor) -> Callable[..., Any]:
    """A model that says ``logprobs`` ``[sequences, longest]`` of what follows the first token."""
    nothing = torch.zeros(logprobs.shape)
    return lambda **_: SimpleNamespace(log_probs=logprobs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())


def batch_of_answers() -> dict[str, torch.Tensor]:
    """Sequences of one prompt token and the answer."""
    mask = torch.cat([torch.zeros(len(LENGTHS), 1), MASK.float()], 1).long()
    return {"input_ids": torch.ones_like(mask), "completion_mask": mask, "attention_mask": torch.ones_like(mask)}


def sequence_sums(values: np.ndarray) -> torch.Tensor:
    return padded(values).sum(1)


PREFERENCES: list[tuple[str, float]] = [("sigmoid", 0.0), ("robust", 0.1), ("hinge", 0.0), ("ipo", 0.0)]


@needs_trl
@pytest.mark.parametrize(("loss", "smoothing"), PREFERENCES)
def test_preference_losses_are_those_of_trl(loss: str, smoothing: float) -> None:
    from trl import DPOTrainer

    policy, _, reference = numbers()
    one = targets(policy, lengths=LENGTHS, reference=reference, scalars=PAIR)
    parameters: dict[str, float | str] = {"loss": loss, "beta": 0.3, "label_smoothing": smoothing}
    own = ours(one, LossComponent(term="preference", parameters=parameters, weight="pair_weight"), denominators={"pair_weight": 3.0})
    theirs = leaf(policy)
    expected = sequence_sums(reference)
    inputs = {**batch_of_answers(), "ref_chosen_logps": expected[:3], "ref_rejected_logps": expected[3:]}
    self = trainer(
        ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[loss], loss_weights=[1.0], beta=0.3,
        label_smoothing=smoothing, use_weighting=False,
    )  # fmt: skip
    same(own, one.logprobs, DPOTrainer._compute_loss(self, fused_model(padded(theirs)), inputs, False), theirs)


@needs_trl
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_simpo_is_that_of_trl(smoothing: float) -> None:
    from trl.experimental.cpo import CPOTrainer

    policy, _, _ = numbers()
    one, theirs = targets(policy, lengths=LENGTHS, scalars=PAIR), leaf(policy)
    parameters: dict[str, float | str] = {"beta": 2.0, "margin": 0.5, "label_smoothing": smoothing}
    own = ours(one, LossComponent(term="simple_preference", parameters=parameters, weight="pair_weight"), denominators={"pair_weight": 3.0})
    means = padded(theirs).sum(1) / torch.tensor(LENGTHS)
    self = trainer(alpha=0.0, loss_type="simpo", simpo_gamma=0.5, beta=2.0, label_smoothing=smoothing)
    same(own, one.logprobs, CPOTrainer.cpo_loss(self, means[:3], means[3:])[0].mean(), theirs)


@needs_trl
def test_orpos_odds_ratio_is_that_of_trl() -> None:
    from trl.experimental.orpo import ORPOTrainer

    policy, _, _ = numbers()
    one, theirs = targets(policy, lengths=LENGTHS, scalars=PAIR), leaf(policy)
    own = ours(one, LossComponent(term="odds_ratio", coefficient=0.1, weight="pair_weight"), denominators={"pair_weight": 3.0})
    means = padded(theirs).sum(1) / torch.tensor(LENGTHS)
    gain = ORPOTrainer.odds_ratio_loss(trainer(beta=0.1), means[:3], means[3:])[0]  # subtracted, in float32
    same(own, one.logprobs, -gain.mean().double(), theirs)


@needs_trl
def test_kto_is_that_of_trl() -> None:
    from trl import KTOTrainer

    policy, _, reference = numbers()
    wanted, other, other_reference = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0], *numbers(1)[:2]
    baseline = max(0.0, float((sequence_sums(other) - sequence_sums(other_reference)).mean()))
    assert baseline > 0  # else the estimate would not be tested
    scalars = {"wanted": wanted, "row_weight": np.where(np.array(wanted) > 0, 1.0, 1.4)}
    one = targets(policy, lengths=LENGTHS, reference=reference, scalars=scalars)
    component = LossComponent(term="kto", parameters={"beta": 0.3, "baseline": baseline}, weight="row_weight")
    own, theirs = ours(one, component, denominators={"row_weight": 6.0}), leaf(policy)
    inputs = {
        **batch_of_answers(), "label": torch.tensor(wanted).bool(), "ref_logps": sequence_sums(reference),
        "ref_KL_logps": sequence_sums(other_reference),
    }  # fmt: skip
    self = trainer(
        calculate_KL=True, precompute_ref_logps=True, loss_type="kto", beta=0.3, desirable_weight=1.0, undesirable_weight=1.4,
        _compute_kl_logps=lambda *_: sequence_sums(other),
    )  # fmt: skip
    same(own, one.logprobs, KTOTrainer._compute_loss(self, fused_model(padded(theirs)), inputs, False), theirs)


@needs_trl
@pytest.mark.parametrize("centering", [0.0, 0.2])
def test_reward_model_loss_is_that_of_trl(centering: float) -> None:
    from trl import RewardTrainer

    scores, margin = np.array([0.3, 1.2, -0.8, 0.9, -0.2, 0.1]), [0.5, 0.0, 1.0]
    one = targets(np.zeros(6), lengths=[1] * 6, values=scores, scalars={**PAIR, "margin": [*margin, *margin]})
    component = LossComponent(term="score_pairs", parameters={"centering": centering}, weight="pair_weight")
    own, _ = total_loss([component], one, torch.ones(6, dtype=torch.float64), {"pair_weight": 3.0}, find_terms([component]))
    theirs = leaf(scores)
    self = trainer(args=SimpleNamespace(center_rewards_coefficient=centering or None))
    inputs = {"margin": torch.tensor(margin, dtype=torch.float64), "attention_mask": torch.ones(6, 1)}
    loss = RewardTrainer.compute_loss(self, lambda **_: SimpleNamespace(logits=theirs[:, None]), inputs)
    assert one.values is not None
    same(own, one.values, loss, theirs)


Policy = tuple[dict[str, float | str], str, dict[str, Any]]
"""Our parameters and aggregation; what TRL's configuration says instead."""

CLIPS: dict[str, float | str] = {"clip_low": 0.2, "clip_high": 0.28}
POLICY_LOSSES: dict[str, tuple[str, dict[str, float | str], str, dict[str, Any]]] = {
    "GRPO": ("policy_clip", CLIPS, "sequence_mean", {"loss_type": "grpo"}),
    "Dr.GRPO": ("policy_clip", CLIPS, "constant", {"loss_type": "dr_grpo"}),
    "DAPO": ("policy_clip", CLIPS, "token_mean", {"loss_type": "dapo"}),
    "dual clip": ("policy_clip", {**CLIPS, "dual_clip": 1.5}, "token_mean", {"loss_type": "dapo", "delta": 1.5}),
    "GSPO": ("gspo", CLIPS, "sequence_mean", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "CISPO": ("cispo", {"clip_low": 1.0, "clip_high": 0.28}, "token_mean", {"loss_type": "cispo", "epsilon_high": 1.28}),
    "SAPO": ("sapo", CLIPS, "sequence_mean", {"loss_type": "sapo"}),
}


def grpo_trainer(**changes: Any) -> Any:
    """What GRPO's loss reads; ``changes`` are of the trainer, but delta and the like of its arguments."""
    named = {"delta": None, "use_bias_correction_kl": False, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    arguments = {name: changes.pop(name, value) for name, value in named.items()}
    fields = {
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "importance_sampling_level": "token", "beta": 0.0,
        "epsilon_low": 0.2, "epsilon_high": 0.28, "loss_type": "grpo", "use_vllm": False, "current_gradient_accumulation_steps": 1,
        "max_completion_length": 7, "_entropy_bonus_enabled": False,
    }  # fmt: skip
    return trainer(args=SimpleNamespace(steps_per_generation=1, **arguments), **{**fields, **changes})


def grpo_loss(method: Any, self: Any, theirs: torch.Tensor, old: np.ndarray, **inputs: Any) -> torch.Tensor:
    """TRL's loss of ``theirs`` ``[targets]``."""
    rows = padded(theirs)
    self._get_per_token_logps_and_entropies = lambda *_, **__: (rows, torch.zeros(rows.shape), None)
    ids = torch.ones(len(LENGTHS), WIDTH, dtype=torch.long)
    given = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": MASK,
        "advantages": torch.tensor(ADVANTAGE, dtype=torch.float64), "old_per_token_logps": padded(old),
        "num_items_in_batch": torch.tensor(float(TOKENS)),
    }  # fmt: skip
    loss: torch.Tensor = method(self, None, {**given, **inputs})
    return loss


@needs_trl
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_losses_are_those_of_trl(name: str) -> None:
    from trl import GRPOTrainer

    term, parameters, aggregation, config = POLICY_LOSSES[name]
    policy, old, _ = numbers()
    one, theirs = targets(policy, lengths=LENGTHS, old=old, advantage=spread(ADVANTAGE)), leaf(policy)
    own = ours(one, LossComponent(term=term, parameters=parameters), aggregation=aggregation)
    same(own, one.logprobs, grpo_loss(GRPOTrainer._compute_loss, grpo_trainer(**config), theirs, old), theirs)


@needs_trl
def test_gmpo_is_that_of_trl() -> None:
    from trl.experimental.gmpo import GMPOTrainer

    policy, old, _ = numbers()
    one, theirs = targets(policy, lengths=LENGTHS, old=old, advantage=spread(ADVANTAGE)), leaf(policy)
    parameters: dict[str, float | str] = {"clip_low": 0.3, "clip_high": 0.4}
    own = ours(one, LossComponent(term="gmpo", parameters=parameters), aggregation="sequence_mean")
    same(own, one.logprobs, grpo_loss(GMPOTrainer._compute_loss, grpo_trainer(epsilon_low=0.3, epsilon_high=0.4), theirs, old), theirs)


@needs_trl
@pytest.mark.parametrize("estimator", ["k3", "k3_unbiased"])
def test_kl_in_the_loss_is_that_of_trl(estimator: str) -> None:
    from trl import GRPOTrainer

    policy, old, reference = numbers()
    one, theirs = targets(policy, lengths=LENGTHS, old=old, reference=reference), leaf(policy)
    own = ours(one, LossComponent(term="kl", coefficient=0.05, parameters={"estimator": estimator}), aggregation="token_mean")
    self = grpo_trainer(loss_type="dapo", beta=0.05, use_bias_correction_kl=estimator == "k3_unbiased")
    nothing = torch.zeros(len(LENGTHS), dtype=torch.float64)
    loss = grpo_loss(GRPOTrainer._compute_loss, self, theirs, old, advantages=nothing, ref_per_token_logps=padded(reference))
    same(own, one.logprobs, loss, theirs)


@needs_trl
def test_rloo_on_the_policy_that_sampled_has_the_direction_of_trls_gradient() -> None:
    """TRL clips the ratio of whole sequences, ours takes none: with ratio 1 both are REINFORCE on the sum of an answer's logprobs.

    A sum over a constant is the same direction; a mean over an answer's tokens would not be.
    """
    from trl import RLOOTrainer

    policy, _, _ = numbers()
    one, theirs = targets(policy, lengths=LENGTHS, advantage=spread(ADVANTAGE)), leaf(policy)
    own = ours(one, LossComponent(term="reinforce", parameters=CLIPS), aggregation="constant", constant=1)
    self = grpo_trainer()
    loss = grpo_loss(RLOOTrainer._compute_loss, self, theirs, policy, old_logps=sequence_sums(policy))
    [own_gradient], [gradient] = torch.autograd.grad(own, one.logprobs), torch.autograd.grad(loss, theirs)
    close(own_gradient.numpy(), gradient.numpy())


# ---- OpenRLHF --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def openrlhf() -> Callable[[str], Any]:
    """Imports one of its modules without its packages' own imports (deepspeed, ray, vllm), of which the losses use nothing."""

    def load(name: str) -> Any:
        [root] = importlib.util.find_spec("openrlhf").submodule_search_locations  # type: ignore[union-attr, misc]
        stubs: dict[str, Any] = {}
        for package in ("openrlhf", "openrlhf.models", "openrlhf.utils", "openrlhf.trainer", "openrlhf.trainer.ppo_utils"):
            stubs[package] = ModuleType(package)
            stubs[package].__path__ = [root + package.removeprefix("openrlhf").replace(".", "/")]
        for absent in ("deepspeed", "ray", "openrlhf.trainer.ray", "openrlhf.trainer.ray.launcher", "openrlhf.utils.utils"):
            stubs[absent] = MagicMock()
        with patch.dict(sys.modules, stubs):
            return importlib.import_module(name)

    return load


@needs_openrlhf
@pytest.mark.parametrize("dual_clip", [0.0, 1.5])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_ppo_is_that_of_openrlhf(openrlhf: Callable[[str], Any], dual_clip: float, aggregation: str) -> None:
    policy, old, _ = numbers()
    one, theirs = targets(policy, lengths=LENGTHS, old=old, advantage=spread(ADVANTAGE)), leaf(policy)
    own = ours(one, LossComponent(term="policy_clip", parameters={**CLIPS, "dual_clip": dual_clip}), aggregation=aggregation)
    loss = openrlhf("openrlhf.models.loss").PolicyLoss(0.2, 0.28, dual_clip or None, token_level_loss=aggregation == "token_mean")
    same(own, one.logprobs, loss(padded(theirs), padded(old), padded(spread(ADVANTAGE)), MASK)[0], theirs)


@needs_openrlhf
def test_gspo_is_that_of_openrlhf(openrlhf: Callable[[str], Any]) -> None:
    policy, old, _ = numbers()
    one, theirs = targets(policy, lengths=LENGTHS, old=old, advantage=spread(ADVANTAGE)), leaf(policy)
    own = ours(one, LossComponent(term="gspo", parameters=CLIPS), aggregation="sequence_mean")
    loss = openrlhf("openrlhf.models.loss").PolicyLoss(0.2, 0.28, policy_loss_type="gspo")
    same(own, one.logprobs, loss(padded(theirs), padded(old), padded(spread(ADVANTAGE)), MASK)[0], theirs)


@needs_openrlhf
@pytest.mark.parametrize("action", ["mask", "clip"])
def test_token_correction_is_that_of_openrlhf(openrlhf: Callable[[str], Any], action: Any) -> None:
    policy, old, engine = numbers()
    one = targets(policy, lengths=LENGTHS, old=old, advantage=spread(ADVANTAGE), columns={"rollout_logprobs": engine})
    correction = OffPolicyCorrection(level="token", action=action, low=0.7, high=1.5)
    own, theirs = ours(one, LossComponent(term="policy_clip", parameters=CLIPS, correction=correction)), leaf(policy)
    loss = openrlhf("openrlhf.models.loss").PolicyLoss(
        0.2, 0.28, is_correction_level="token", is_correction_mode=action, is_correction_threshold=(0.7, 1.5)
    )
    same(own, one.logprobs, loss(padded(theirs), padded(old), padded(spread(ADVANTAGE)), MASK, padded(engine))[0], theirs)


@needs_openrlhf
def test_a_masked_sequence_is_the_same_as_openrlhfs_but_kept_ones_weigh_by_their_geometric_mean(openrlhf: Callable[[str], Any]) -> None:
    policy, old, engine = numbers()
    one = targets(policy, lengths=LENGTHS, old=old, advantage=spread(ADVANTAGE), columns={"rollout_logprobs": engine})
    correction = OffPolicyCorrection(level="geometric", action="mask", low=0.8, high=1.25)
    own, theirs = ours(one, LossComponent(term="policy_clip", parameters=CLIPS, correction=correction)), leaf(policy)
    loss = openrlhf("openrlhf.models.loss").PolicyLoss(0.2, 0.28, is_correction_level="seq", is_correction_threshold=(0.8, 1.25))
    other = loss(padded(theirs), padded(old), padded(spread(ADVANTAGE)), MASK, padded(engine))[0]
    [gradient], [expected] = torch.autograd.grad(own, one.logprobs), torch.autograd.grad(other, theirs)
    tokens = torch.exp(torch.tensor(old - engine))
    means = torch.cat([row.log().mean().exp().expand(len(row)) for row in tokens.split(LENGTHS)])
    assert 0 < int((gradient == 0).sum()) < TOKENS
    close(gradient.numpy(), (expected * means / tokens).numpy())


@needs_openrlhf
@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_value_loss_is_that_of_openrlhf(openrlhf: Callable[[str], Any], clip: float) -> None:
    policy, old, returns = numbers()
    one, theirs = targets(np.zeros(TOKENS), lengths=LENGTHS, values=policy, columns={"returns": returns, "old_values": old}), leaf(policy)
    own = ours(one, LossComponent(term="value", parameters={"clip": clip}))
    loss = openrlhf("openrlhf.models.loss").ValueLoss(clip or None)
    assert one.values is not None
    same(own, one.values, loss(padded(theirs), padded(old), padded(returns), MASK), theirs)


@needs_openrlhf
@pytest.mark.parametrize(("loss", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("ipo", 0.0)])
def test_preference_losses_are_those_of_openrlhf(openrlhf: Callable[[str], Any], loss: str, smoothing: float) -> None:
    """Its IPO takes the logprobs that it is given, which its trainer has summed; ours are means, so it gets means here."""
    policy, _, reference = numbers()
    one, theirs = targets(policy, lengths=LENGTHS, reference=reference, scalars=PAIR), leaf(policy)
    parameters: dict[str, float | str] = {"loss": loss, "beta": 0.3, "label_smoothing": smoothing}
    own = ours(one, LossComponent(term="preference", parameters=parameters, weight="pair_weight"), denominators={"pair_weight": 3.0})
    over = torch.tensor(LENGTHS if loss == "ipo" else [1] * 6)
    mine, its = padded(theirs).sum(1) / over, sequence_sums(reference) / over
    other = openrlhf("openrlhf.models.loss").DPOLoss(0.3, smoothing, ipo=loss == "ipo")(mine[:3], mine[3:], its[:3], its[3:])[0]
    same(own, one.logprobs, other, theirs)


@needs_openrlhf
def test_likelihood_is_that_of_openrlhf(openrlhf: Callable[[str], Any]) -> None:
    logits = leaf(np.random.default_rng(0).normal(size=(1, TOKENS + 1, 11)))
    labels = torch.arange(TOKENS + 1)[None] % 11
    logprobs = torch.log_softmax(logits[0, :-1], -1).gather(1, labels[0, 1:, None])[:, 0]
    one = targets(logprobs.detach().numpy(), lengths=LENGTHS)
    own, other = ours(one, LossComponent(term="likelihood")), openrlhf("openrlhf.models.loss").GPTLMLoss()(logits, labels)
    close(own.detach().numpy(), other.detach().numpy())
    [gradient] = torch.autograd.grad(own, one.logprobs)
    close(torch.autograd.grad(logprobs, logits, gradient)[0].numpy(), torch.autograd.grad(other, logits)[0].numpy())


@needs_openrlhf
def test_reward_model_loss_is_that_of_openrlhf(openrlhf: Callable[[str], Any]) -> None:
    scores, margin = np.array([0.3, 1.2, -0.8, 0.9, -0.2, 0.1]), [0.5, 0.0, 1.0]
    one = targets(np.zeros(6), lengths=[1] * 6, values=scores, scalars={**PAIR, "margin": [*margin, *margin]})
    component = LossComponent(term="score_pairs", parameters={"centering": 0.0}, weight="pair_weight")
    own, _ = total_loss([component], one, torch.ones(6, dtype=torch.float64), {"pair_weight": 3.0}, find_terms([component]))
    theirs = leaf(scores)
    assert one.values is not None
    same(own, one.values, openrlhf("openrlhf.models.loss").PairWiseLoss()(theirs[:3], theirs[3:], torch.tensor(margin)), theirs)


@needs_openrlhf
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_are_those_of_openrlhf(openrlhf: Callable[[str], Any], estimator: str) -> None:
    policy, _, reference = numbers()
    one, theirs = targets(policy, lengths=LENGTHS, reference=reference), leaf(policy)
    own = ours(one, LossComponent(term="kl", parameters={"estimator": estimator}))
    kl = openrlhf("openrlhf.models.utils").compute_approx_kl(theirs, torch.tensor(reference), kl_estimator=estimator)
    close(own.detach().numpy(), kl.mean().detach().numpy())


REWARDS = np.array([[1.0, 0.0, 0.5, 1.0], [0.2, 0.9, 0.9, 0.1]])


@needs_openrlhf
@pytest.mark.parametrize(("estimator", "name"), [("rloo", "leave_one_out"), ("group_norm", "group_std"), ("dr_grpo", "group_mean")])
def test_group_advantages_are_those_of_openrlhf(openrlhf: Callable[[str], Any], estimator: str, name: str) -> None:
    """Up to the epsilon of the deviation, 1e-9 there and 1e-6 here."""
    maker = openrlhf("openrlhf.trainer.ppo_utils.experience_maker")
    mask = torch.ones(8, 3)
    experience = SimpleNamespace(
        rewards=torch.tensor(REWARDS.reshape(-1)),
        index=list(range(8)),
        kl=torch.zeros(8, 3, dtype=torch.float64),
        action_mask=mask,
        info={},
    )
    found = _make_advantages(maker, estimator, experience)
    expected = np.concatenate([advantages.ADVANTAGES[name](list(row)) for row in REWARDS])
    close(found.advantages[:, 0].numpy(), expected, 1e-5)
    close(found.advantages[:, 2].numpy(), expected, 1e-5)


def _make_advantages(maker: Any, estimator: str, experience: Any) -> Any:
    algo = SimpleNamespace(advantage=SimpleNamespace(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=False))
    args = SimpleNamespace(algo=algo, rollout=SimpleNamespace(n_samples_per_prompt=4), reward=SimpleNamespace(clip_range=None))
    cls = maker.RemoteExperienceMaker
    self = SimpleNamespace(
        strategy=SimpleNamespace(args=args), kl_ctl=SimpleNamespace(value=0.0), advantage_estimator=estimator,
        get_cumulative_returns=lambda *values: cls.get_cumulative_returns(None, *values),
    )  # fmt: skip
    with patch.object(maker, "apply_length_penalties"):
        [found] = cls.compute_advantages_and_returns(self, [experience])
    return found


def _their_gae(openrlhf: Callable[[str], Any], rewards: np.ndarray, values: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    cls = openrlhf("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker
    arrays = [torch.tensor(one, dtype=torch.float64)[None] for one in (values, rewards, mask)]
    return [one[0].numpy() for one in cls.get_advantages_and_returns(None, *arrays, 0.97, 0.9)]


@needs_openrlhf
def test_gae_is_that_of_openrlhf_without_a_gap_and_does_not_leak_through_one(openrlhf: Callable[[str], Any]) -> None:
    """With a gap theirs discounts once for each token of the tool, and bootstraps from 0 before it; ours sees sampled tokens only."""
    random = np.random.default_rng(0)
    rewards, values, sampled = random.normal(size=7), random.normal(size=7), np.array([1, 1, 0, 0, 0, 1, 1], bool)
    for found, expected in zip(advantages.gae(rewards, values, 0.97, 0.9), _their_gae(openrlhf, rewards, values, np.ones(7)), strict=True):
        close(found, expected)
    own, _ = advantages.gae(rewards[sampled], values[sampled], 0.97, 0.9)
    close(own, _their_gae(openrlhf, rewards[sampled], values[sampled], np.ones(4))[0])
    theirs = _their_gae(openrlhf, rewards, values, sampled)[0][sampled]
    close(own[2:], theirs[2:])
    assert np.abs(own[:2] - theirs[:2]).min() > 0.01
