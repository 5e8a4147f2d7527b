"""The gradient of a batch does not depend on how it is cut: every loss term, in float64, packed in many ways, against no packing at all.

What is trained is a table of logits ``[sequences, positions, vocabulary]`` and one of values ``[sequences, positions]``; a micro-batch
looks its targets up by what packing says of them (sequence, predictor, position), as a model does by its hidden states. The shares of all
ranks are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from loss_targets import close

from rlpost.algorithms.aggregation import token_weights
from rlpost.algorithms.catalogue import LOSS_TERMS, find_terms
from rlpost.algorithms.losses import Targets, total_loss
from rlpost.training.logprob import target_logprob
from rlpost.training.packing import MicroBatch, pack, row_length
from rlpost.types import MAIN_WEIGHT, LossComponent, LossTerms, OffPolicyCorrection

VOCABULARY = 7
LONGEST = 14
AGGREGATIONS = ["token_mean", "sequence_mean", "constant", "prompt_mean"]
SEEDS = range(4)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The sequences of one optimizer step and what is counted over them."""

    terms: Sequence[LossTerms]
    denominators: Mapping[str, float]
    together: bool = False
    rows: Mapping[str, int] = field(default_factory=dict)
    """Row of each sequence in the tables, whatever order it is packed in."""


def spans(random: np.random.Generator, prompt: int) -> np.ndarray:
    """A prompt, a sampled turn, and perhaps a tool's tokens and another turn: which tokens are trained."""
    first, tool, second = random.integers(1, 5), random.integers(0, 3), random.integers(0, 4)
    return np.r_[np.zeros(prompt, bool), np.ones(first, bool), np.zeros(tool, bool), np.ones(second, bool)]


def logprobs_of(random: np.random.Generator, mask: np.ndarray, unknown: float = 0.2) -> np.ndarray:
    """Logprobs of another policy, NaN where nothing was sampled and for a share of the tokens."""
    values = -random.exponential(size=len(mask)) - 0.5
    return np.where(mask & (random.random(len(mask)) >= unknown), values, np.nan).astype(np.float32)


def sequence(random: np.random.Generator, name: str, group: str, prompt: np.ndarray, mask: np.ndarray) -> LossTerms:
    """One sequence with everything that a term of an online algorithm may read."""
    tokens = np.r_[prompt, random.integers(0, VOCABULARY, len(mask) - len(prompt))].astype(np.int64)
    return LossTerms(
        trajectory_id=name,
        group_id=group,
        prompt_length=len(prompt),
        tokens=tokens,
        trainable=mask,
        weight=np.zeros(len(mask), np.float32),
        advantage=np.where(mask, random.normal(), 0.0).astype(np.float32),
        old_logprobs=logprobs_of(random, mask),
        reference_logprobs=logprobs_of(random, mask),
        columns={
            "rollout_logprobs": logprobs_of(random, mask),
            "returns": random.normal(size=len(mask)).astype(np.float32),
            "old_values": random.normal(size=len(mask)).astype(np.float32),
        },
    )


def finished(terms: Sequence[LossTerms], denominators: Mapping[str, float], together: bool = False) -> Batch:
    rows = {term.trajectory_id: row for row, term in enumerate(terms)}
    return Batch(terms=terms, denominators=denominators, together=together, rows=rows)


def online(seed: int) -> Batch:
    """Groups of 4, 3 and 1 samples with a prompt in common; one sample has nothing to train."""
    random = np.random.default_rng(seed)
    terms = []
    for group, size in enumerate((4, 3, 1)):
        prompt = random.integers(0, VOCABULARY, random.integers(2, 5))
        for sample in range(size):
            mask = spans(random, len(prompt)) if (group, sample) != (1, 1) else np.zeros(len(prompt) + 2, bool)
            terms.append(sequence(random, f"{group}.{sample}", f"g{group}", prompt, mask))
    aggregation = AGGREGATIONS[seed % len(AGGREGATIONS)]
    weights, denominator = token_weights([term.trainable for term in terms], aggregation, 9, [term.group_id for term in terms])
    weighted = [replace(term, weight=weight) for term, weight in zip(terms, weights, strict=True)]
    return finished(weighted, {MAIN_WEIGHT: denominator})


def pairs(seed: int, scored: bool = False) -> Batch:
    """Five pairs (one with an answer of which nothing is left to train), each with its prompt in common, chosen first or second."""
    random = np.random.default_rng(100 + seed)
    terms = []
    for pair in range(5):
        prompt = random.integers(0, VOCABULARY, random.integers(2, 5))
        for place, side in enumerate(random.permutation([1.0, -1.0])):
            mask = spans(random, len(prompt))
            if scored:
                mask = np.arange(len(mask)) == len(mask) - 1
            elif (pair, place) == (2, 1):
                mask[:] = False
            one = sequence(random, f"{pair}.{place}", f"p{pair}", prompt, mask)
            scalars = {
                "pair": float(pair),
                "side": side,
                "margin": 0.3,
                "pair_weight": float(side > 0),
                "wanted": float(random.integers(2)),
            }
            terms.append(replace(one, weight=mask.astype(np.float32), scored=scored, scalars=scalars))
    tokens = float(sum(term.trainable.sum() for term in terms))
    return finished(terms, {MAIN_WEIGHT: tokens, "pair_weight": 5.0}, together=True)


def scores(seed: int) -> Batch:
    """Pairs of which a reward model gives one value each, at the last token."""
    return pairs(seed, scored=True)


# ---- a model of tables ---------------------------------------------------------------------------------------------


def tables(seed: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(batch.terms), LONGEST)
    logits = torch.randn(*shape, VOCABULARY, generator=generator, dtype=torch.float64, requires_grad=True)
    return logits, torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)


def look_up(
    logits: torch.Tensor, values: torch.Tensor, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray, **arrays: Any
) -> Targets:
    """Targets of the given tokens, at the given places of the tables."""
    places = torch.as_tensor(rows, dtype=torch.int64), torch.as_tensor(positions, dtype=torch.int64)
    distribution = torch.log_softmax(logits[places], -1)

    def tensor(array: np.ndarray | None) -> Any:
        return None if array is None else torch.tensor(np.asarray(array, np.float64))

    return Targets(
        logprobs=distribution.gather(1, torch.as_tensor(tokens, dtype=torch.int64)[:, None])[:, 0],
        entropy=-(distribution.exp() * distribution).sum(-1),
        values=values[places],
        sequence=torch.as_tensor(arrays.pop("sequence"), dtype=torch.int64),
        sequences=arrays.pop("sequences"),
        columns={name: tensor(array) for name, array in arrays.pop("columns").items()},
        scalars={name: tensor(array) for name, array in arrays.pop("scalars").items()},
        **{name: tensor(array) for name, array in arrays.items()},
    )


def loss_of(components: Sequence[LossComponent], targets: Targets, weight: np.ndarray, batch: Batch) -> torch.Tensor:
    own = torch.tensor(np.asarray(weight, np.float64))
    return total_loss(components, targets, own, batch.denominators, find_terms(components))[0]


def unpacked(components: Sequence[LossComponent], batch: Batch, at: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The loss of all sequences at once, laid out here by hand: packing has no part in it."""
    terms = batch.terms
    places = [(row, position) for row, term in enumerate(terms) for position in range(len(term.tokens)) if term.trainable[position]]
    rows, positions = (np.array([place[axis] for place in places], np.int64) for axis in (0, 1))

    def gather(array: Callable[[LossTerms], Any]) -> np.ndarray:
        return np.array([array(terms[row])[position] for row, position in places])

    targets = look_up(
        *at,
        rows,
        positions,
        gather(lambda term: term.tokens).astype(np.int64),
        sequence=rows,
        sequences=len(terms),
        advantage=gather(lambda term: term.advantage),
        old_logprobs=None if terms[0].old_logprobs is None else gather(lambda term: term.old_logprobs),
        reference_logprobs=gather(lambda term: term.reference_logprobs),
        columns={name: gather(lambda term, name=name: term.columns[name]) for name in terms[0].columns},  # type: ignore[misc]
        scalars={name: np.array([term.scalars[name] for term in terms], np.float32) for name in terms[0].scalars},
    )
    return loss_of(components, targets, gather(lambda term: term.weight), batch)


def packed_loss(
    components: Sequence[LossComponent], micro: MicroBatch, batch: Batch, at: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """The share of one micro-batch."""
    members = np.array([batch.rows[batch.terms[member].trajectory_id] for member in micro.members], np.int64)
    step = 0 if batch.terms[0].scored else 1
    targets = look_up(
        *at,
        members[micro.sequence],
        micro.positions[micro.predictor] + step,
        micro.target,
        sequence=micro.sequence,
        sequences=len(micro.lengths),
        advantage=micro.advantage,
        old_logprobs=micro.old_logprobs,
        reference_logprobs=micro.reference_logprobs,
        columns=micro.columns,
        scalars=micro.scalars,
    )
    return loss_of(components, targets, micro.weight, batch)


def gradients(loss: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    found = torch.autograd.grad(loss, at, allow_unused=True)
    logits, values = (torch.zeros_like(table) if one is None else one for one, table in zip(found, at, strict=True))
    return logits.numpy(), values.numpy()


def geometries(batch: Batch) -> list[tuple[str, Batch, dict[str, Any]]]:
    """Orders, rank counts, sizes of micro-batches, shared prompts or not."""
    units: dict[str, list[int]] = {}
    for item, term in enumerate(batch.terms):
        units.setdefault(term.group_id if batch.together else term.trajectory_id, []).append(item)
    smallest = max(row_length(batch.terms, members, False) for members in units.values())
    turned = replace(batch, terms=[batch.terms[i] for i in np.random.default_rng(7).permutation(len(batch.terms))])
    return [
        ("one row", batch, {"ranks": 1, "micro_batch_tokens": 10**6, "share": True}),
        ("one row, own prompts, other order", turned, {"ranks": 1, "micro_batch_tokens": 10**6, "share": False}),
        ("smallest rows", batch, {"ranks": 1, "micro_batch_tokens": smallest, "share": True}),
        ("two ranks", turned, {"ranks": 2, "micro_batch_tokens": 2 * smallest, "share": True}),
        ("two ranks, smallest rows, own prompts", batch, {"ranks": 2, "micro_batch_tokens": smallest, "share": False}),
        ("more ranks than sequences", turned, {"ranks": 13, "micro_batch_tokens": smallest, "share": True}),
    ]


def check(components: Sequence[LossComponent], batch: Batch, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Every geometry has the loss and gradient of no packing; returns that gradient."""
    at = tables(seed, batch)
    whole = unpacked(components, batch, at)
    expected = gradients(whole, at)
    assert all(np.isfinite(one).all() for one in (*expected, whole.detach().numpy()))
    for name, turned, settings in geometries(batch):
        packed = pack(turned.terms, together=batch.together, **settings)
        shares = [packed_loss(components, micro, turned, at) for micros in packed for micro in micros]
        total = torch.stack(shares).sum()
        assert total.item() == pytest.approx(whole.item(), rel=1e-9, abs=1e-12), name
        for found, wanted in zip(gradients(total, at), expected, strict=True):
            close(found, wanted, 1e-9)
    return expected


# ---- every loss ----------------------------------------------------------------------------------------------------

BOUNDS = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}
POLICY_LOSSES = ["policy_clip", "reinforce", "gspo", "gmpo", "cispo", "sapo"]
CORRECTIONS = {
    "plain": None,
    "token": OffPolicyCorrection(level="token", action="truncate"),
    "sequence": OffPolicyCorrection(level="sequence", action="clip", low=0.1, high=10.0),
    "geometric": OffPolicyCorrection(level="geometric", action="mask", low=0.5, high=1.5),
}
PAIR: dict[str, Any] = {"weight": "pair_weight"}
CASES: dict[str, tuple[Callable[[int], Batch], LossComponent]] = {
    **{
        f"{term} {name}": (online, LossComponent(term=term, parameters=BOUNDS, correction=correction))
        for term in POLICY_LOSSES
        for name, correction in CORRECTIONS.items()
    },
    **{f"kl {one}": (online, LossComponent(term="kl", parameters={"estimator": one})) for one in ("k1", "k2", "k3", "k3_unbiased")},
    "entropy": (online, LossComponent(term="entropy")),
    "value": (online, LossComponent(term="value", parameters={"clip": 0.0})),
    "value clipped": (online, LossComponent(term="value", parameters={"clip": 0.2})),
    "likelihood": (online, LossComponent(term="likelihood")),
    **{
        f"preference {one}": (
            pairs,
            LossComponent(term="preference", parameters={"loss": one, "beta": 0.5, "label_smoothing": 0.1}, **PAIR),
        )
        for one in ("sigmoid", "robust", "hinge", "ipo")
    },
    "simple_preference": (pairs, LossComponent(term="simple_preference", parameters={"beta": 2.0, "margin": 0.5}, **PAIR)),
    "odds_ratio": (pairs, LossComponent(term="odds_ratio", **PAIR)),
    "kto": (pairs, LossComponent(term="kto", parameters={"beta": 0.5, "baseline": 0.2}, **PAIR)),
    "score_pairs": (scores, LossComponent(term="score_pairs", parameters={"centering": 0.1}, **PAIR)),
}


def test_every_loss_of_the_catalogue_is_checked_here() -> None:
    assert {component.term for _, component in CASES.values()} == set(LOSS_TERMS)


@pytest.mark.parametrize("case", sorted(CASES))
def test_gradient_is_the_same_for_every_micro_batch_size_packing_rank_count_and_order(case: str) -> None:
    """With uneven groups, a group of one, a fully masked sequence and unknown (NaN) logprobs of engine, old policy and reference."""
    make, component = CASES[case]
    sizes = [max(np.abs(one).max() for one in check([component], make(seed), seed)) for seed in SEEDS]
    assert np.median(sizes) > 0, "a gradient of zero would be the same everywhere"


def test_components_with_weights_of_their_own_keep_their_own_denominators_in_every_geometry() -> None:
    """ORPO: likelihood over tokens, odds over pairs."""
    for seed in SEEDS:
        both = [LossComponent(term="likelihood"), LossComponent(term="odds_ratio", coefficient=0.3, weight="pair_weight")]
        check(both, pairs(seed), seed)


@pytest.mark.parametrize("term", POLICY_LOSSES)
def test_advantages_of_zero_and_unknown_old_logprobs_give_finite_equal_results(term: str) -> None:
    component = LossComponent(term=term, parameters=BOUNDS, correction=CORRECTIONS["sequence"])
    batch = online(1)
    zero = [replace(one, advantage=np.zeros(len(one.tokens), np.float32)) for one in batch.terms]
    assert not any(one.any() for one in check([component], replace(batch, terms=zero), 1))
    unknown = [replace(one, old_logprobs=np.full(len(one.tokens), np.nan, np.float32)) for one in batch.terms]
    none = [replace(one, old_logprobs=None) for one in batch.terms]
    for one, other in zip(*(check([component], replace(batch, terms=terms), 1) for terms in (unknown, none)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("case", sorted(set(CASES) - {"score_pairs"}))
def test_a_fully_masked_batch_has_no_gradient_and_no_nan(case: str) -> None:
    make, component = CASES[case]
    batch = make(0)
    masked = [replace(one, trainable=np.zeros(len(one.tokens), bool), weight=np.zeros(len(one.tokens), np.float32)) for one in batch.terms]
    denominators = {**batch.denominators, MAIN_WEIGHT: 0.0}
    assert not any(one.any() for one in check([component], replace(batch, terms=masked, denominators=denominators), 0))


# ---- temperatures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("term", POLICY_LOSSES)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_an_unchanged_policy_has_ratio_one_and_reinforces_gradient_at_every_temperature(term: str, temperature: float) -> None:
    """Old logprobs of a forward before the update with the same weights; scaled by the temperature that was sampled at, not raw ones."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(rows, 16, generator=generator) for rows in (9, 31))
    target = torch.randint(0, 31, (9,), generator=generator)
    owners = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 2])
    advantage = torch.tensor([1.5, -0.5, 0.8])[owners]
    with torch.no_grad():
        before, _ = target_logprob(hidden, weight, target, temperature, 4)

    def slope(name: str, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = weight.clone().requires_grad_()
        logprobs, entropy = target_logprob(hidden, wanted, target, temperature, 4)
        given = Targets(logprobs=logprobs, entropy=entropy, sequence=owners, sequences=3, advantage=advantage, old_logprobs=old)
        [component] = [LossComponent(term=name, parameters={"clip_low": 0.2, "clip_high": 0.2})]
        share = 1.0 / torch.bincount(owners)[owners]
        loss, [part] = total_loss([component], given, share, {MAIN_WEIGHT: 3.0}, find_terms([component]))
        return torch.autograd.grad(loss, wanted)[0], part.term.maxima["ratio_max"]

    found, ratio = slope(term, before)
    assert (ratio == 1.0).all()
    close(found.numpy(), slope("reinforce", before)[0].numpy(), 1e-6)
    sampled_from = torch.log_softmax(hidden.double() @ weight.double().t() / temperature, -1).gather(1, target[:, None])[:, 0].float()
    assert (slope(term, sampled_from)[1] - 1.0).abs().max() < 1e-5
    raw = torch.log_softmax(hidden @ weight.t(), -1).gather(1, target[:, None])[:, 0]
    assert temperature == 1.0 or (slope(term, raw)[1] - 1.0).abs().max() > 0.1
