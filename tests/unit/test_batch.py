"""From groups to one optimizer step: who is trained, with which advantage, over which denominator, and one gradient for all layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from trajectories import group, trajectory

from rlpost.algorithms.catalogue import find_terms
from rlpost.algorithms.losses import Targets, total_loss
from rlpost.algorithms.online import PolicyGradient
from rlpost.algorithms.protocol import RunFacts
from rlpost.config.schema import AlgorithmConfig, FilterConfig
from rlpost.driver.batch import (
    Minibatch,
    bare_terms,
    build_minibatch,
    make_minibatch,
    split,
    trained,
    with_forward,
    with_reference_logprobs,
)
from rlpost.training.logprob import target_logprob
from rlpost.training.packing import MicroBatch, build, pack
from rlpost.types import Failure, Group, LossComponent, LossTerms, Prompt

VOCABULARY, WIDTH = 23, 6


def there(array: np.ndarray | None) -> np.ndarray:
    assert array is not None
    return array


def worth(term: LossTerms) -> np.ndarray:
    return there(term.advantage)


def make_algorithm(**settings: object) -> PolicyGradient:
    return PolicyGradient(AlgorithmConfig(**settings), RunFacts(max_new_tokens=16))  # type: ignore[arg-type]


def minibatch(
    groups: Sequence[Group], *, version: int = 0, aggregation: str = "token_mean", old: str = "current", **settings: object
) -> Minibatch:
    algorithm = make_algorithm(**settings)
    return build_minibatch(groups, algorithm, version=version, aggregation=aggregation, constant=16, old=old)


# ---- who is trained, with which advantage ----------------------------------------------------------------------------


def test_groups_are_told_by_their_id_and_not_by_a_stride() -> None:
    """Groups of 4, 3 and 1: a stride of 4 would mix the second with the third, and explode at the end."""
    groups = [group(0, [1.0, 0.0, 0.0, 1.0]), group(1, [5.0, 5.0, 8.0]), group(2, [9.0])]
    terms = minibatch(groups, advantage="group_mean").terms
    got = {term.trajectory_id: float(worth(term)[term.trainable][0]) for term in terms}
    assert got == {"g0.0": 0.5, "g0.1": -0.5, "g0.2": -0.5, "g0.3": 0.5, "g1.0": -1.0, "g1.1": -1.0, "g1.2": 2.0, "g2.0": 0.0}


def test_a_trajectory_without_a_reward_has_no_gradient_and_is_in_no_denominator() -> None:
    failed = Failure(kind="raised", where="reward", message="boom")
    with_none = minibatch([group(0, [1.0, None, 0.0, 1.0], failures=[None, failed, None, None])], advantage="group_mean")
    assert [term.trajectory_id for term in with_none.terms] == ["g0.0", "g0.2", "g0.3"]
    assert with_none.denominator == 9.0
    np.testing.assert_allclose([worth(term)[-1] for term in with_none.terms], [1 / 3, -2 / 3, 1 / 3], rtol=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant", "prompt_mean"])
def test_zero_variance_groups_count_in_the_denominator_unless_they_are_skipped(aggregation: str) -> None:
    groups = [group(0, [1.0, 0.0]), group(1, [0.4, 0.4])]
    alone = minibatch(groups[:1], aggregation=aggregation)
    assert minibatch(groups, aggregation=aggregation, filter=FilterConfig(zero_variance="drop")).denominator == alone.denominator
    assert minibatch(groups, aggregation=aggregation).denominator == 2 * alone.denominator


def test_a_trajectory_that_sampled_nothing_is_not_trained_but_is_in_the_baseline() -> None:
    """A prompt as long as the context: no token of it may be trained, and a mean over sequences must not count it."""
    members = (trajectory("g0.0", reward=1.0), trajectory("g0.1", reward=0.0, spans=((False, 5),)))
    batch = minibatch([Group(group_id="g0", index=0, prompt=Prompt(prompt_id="p"), trajectories=members)], advantage="group_mean")
    assert [term.trajectory_id for term in batch.terms] == ["g0.0"]
    assert worth(batch.terms[0])[-1] == 0.5


THREE_TURNS = ((False, 4), (True, 3), (False, 5), (True, 1), (False, 2), (True, 6))


def test_three_turns_of_different_length_all_get_the_advantage_and_tool_tokens_none() -> None:
    """Not only the last turn; the tool's tokens have no weight, no advantage and are not counted."""
    members = (trajectory("g0.0", reward=1.0, spans=THREE_TURNS), trajectory("g0.1", reward=0.0))
    batch = minibatch([Group(group_id="g0", index=0, prompt=Prompt(prompt_id="p"), trajectories=members)], advantage="group_mean")
    sampled = np.concatenate([np.full(length, is_sampled) for is_sampled, length in THREE_TURNS])
    np.testing.assert_array_equal(worth(batch.terms[0]), np.where(sampled, 0.5, 0.0).astype(np.float32))
    np.testing.assert_array_equal(batch.terms[0].weight, sampled.astype(np.float32))
    assert batch.denominator == 10 + 3
    row = build(batch.terms, [0])
    assert len(row.target) == 10
    assert set(row.target.tolist()).isdisjoint(batch.terms[0].tokens[~sampled].tolist())


@pytest.mark.parametrize("end", [0, 9])
def test_a_sampled_end_token_is_trained_also_when_it_is_the_padding_token(end: int) -> None:
    """Every token has the same id: only ``trainable`` says which were sampled."""
    members = (trajectory("g0.0", reward=1.0, token=end), trajectory("g0.1", reward=0.0, token=end))
    batch = minibatch([Group(group_id="g0", index=0, prompt=Prompt(prompt_id="p"), trajectories=members)])
    assert batch.denominator == 6
    assert [len(build(batch.terms, [i]).target) for i in range(2)] == [3, 3]


def test_truncation_is_not_inferred_from_a_padded_width() -> None:
    """More context after the last sampled token changes neither weights nor denominator of the sampled ones."""
    plain = minibatch([group(0, [1.0, 0.0])])
    wide_members = tuple(
        trajectory(t.trajectory_id, reward=t.reward, spans=((False, 2), (True, 3), (False, 40))) for t in group(0, [1.0, 0.0]).trajectories
    )
    wide = minibatch([Group(group_id="g0", index=0, prompt=Prompt(prompt_id="p"), trajectories=wide_members)])
    assert wide.denominator == plain.denominator
    for a, b in zip(plain.terms, wide.terms, strict=True):
        np.testing.assert_array_equal(worth(a), worth(b)[:5])
        assert not b.weight[5:].any()


def test_every_trained_token_has_an_engine_logprob_in_the_ratio_of_old_engine() -> None:
    batch = minibatch([group(0, [1.0, 0.0])], old="engine")
    for term in batch.terms:
        assert np.isfinite(term.old_logprobs[term.trainable]).all()  # type: ignore[index]
        assert np.isnan(term.old_logprobs[~term.trainable]).all()  # type: ignore[index]
    assert all(term.old_logprobs is None for term in minibatch([group(0, [1.0, 0.0])], old="recompute").terms)


def test_parity_is_measured_on_tokens_of_the_present_version_only() -> None:
    """An older version's logprobs differ for a good reason, and would hide an engine that computes wrongly."""
    t = trajectory("g0.0", spans=((False, 2), (True, 4)))
    mixed = replace(t, versions=np.array([-1, -1, 3, 3, 4, 4], np.int32))
    batch = minibatch([Group(group_id="g0", index=0, prompt=Prompt(prompt_id="p"), trajectories=(mixed,))], version=4, old="engine")
    assert np.isfinite(there(batch.terms[0].parity_logprobs)).tolist() == [False] * 4 + [True] * 2
    assert np.isfinite(batch.terms[0].old_logprobs).tolist() == [False] * 2 + [True] * 4  # type: ignore[arg-type]


def test_minibatches_are_whole_groups_in_order_each_with_a_denominator_of_its_own() -> None:
    """A denominator of the whole generation batch would scale the loss of each of two windows by one half."""
    groups = [group(index, [1.0, 0.0]) for index in range(4)]
    parts = split(groups, 2)
    assert [[g.index for g in part] for part in parts] == [[0, 1], [2, 3]]
    assert [minibatch(part).denominator for part in parts] == [12, 12]
    assert minibatch(groups).denominator == 24


def test_recomputed_logprobs_go_to_their_own_trajectories() -> None:
    """One is not trained on (it was cut), so no forward has anything to say of it."""
    algorithm = make_algorithm(filter=FilterConfig(truncated="drop"))
    whole = group(0, [1.0, 0.0, 0.5])
    cut = replace(whole, trajectories=(replace(whole.trajectories[0], truncated=True), *whole.trajectories[1:]))
    chosen = algorithm.choose([cut])
    assert [term.trajectory_id for term in bare_terms(trained(chosen))] == ["g0.1", "g0.2"]
    values = [np.full(5, 1.0, np.float32), np.full(5, 2.0, np.float32)]
    both = with_forward(with_forward(chosen, "old_logprobs", values), "reference_logprobs", values[::-1])
    masks = {sample.trajectory.trajectory_id: sample.trajectory.trainable for sample in trained(both)}
    terms = make_minibatch(both, algorithm.advantages(both), masks, version=0, aggregation="token_mean", constant=16, old="recompute").terms
    assert [(t.trajectory_id, t.old_logprobs[0], t.reference_logprobs[0]) for t in terms] == [("g0.1", 1.0, 2.0), ("g0.2", 2.0, 1.0)]  # type: ignore[index]
    np.testing.assert_allclose([worth(t)[-1] for t in terms], [-1.0, 0.0], atol=1e-5)  # the cut one is in the baseline


# ---- one gradient --------------------------------------------------------------------------------------------------


def uneven_groups() -> list[Group]:
    """Trajectories of very different length, a tool gap, one unscored, one logprob unknown."""
    random = np.random.default_rng(3)
    groups = []
    for index, lengths in enumerate([(10, 6, 1, 17), (3, 3, 8), (2,)]):
        members = []
        for sample, length in enumerate(lengths):
            spans = ((False, 2), (True, length), (False, 3), (True, 2)) if sample == 1 else ((False, 2), (True, length))
            t = trajectory(f"g{index}.{sample}", spans=spans, reward=None if (index, sample) == (0, 2) else float(random.normal()))
            logprobs = np.where(t.trainable, -random.random(len(t.tokens)) * 4, np.nan).astype(np.float32)
            if (index, sample) == (1, 0):
                logprobs[-1] = np.nan
            tokens = random.integers(0, VOCABULARY, len(t.tokens)).astype(np.int32)
            tokens[: t.prompt_length] = [index, index + 1]  # samples of a group have one prompt
            members.append(replace(t, tokens=tokens, logprobs=logprobs))
        groups.append(Group(group_id=f"g{index}", index=index, prompt=Prompt(prompt_id="p"), trajectories=tuple(members)))
    return groups


def micro_gradient(micro: MicroBatch, components: Sequence[LossComponent], denominator: float) -> np.ndarray:
    """Gradient of one micro-batch's loss for a bigram model (embedding -> output layer), as a rank computes it."""
    generator = torch.Generator().manual_seed(5)
    embedding = torch.randn(VOCABULARY, WIDTH, generator=generator).requires_grad_()
    output = torch.randn(VOCABULARY, WIDTH, generator=generator).requires_grad_()
    hidden = embedding[torch.from_numpy(micro.tokens)][torch.from_numpy(micro.predictor)]
    logprobs, entropy = target_logprob(hidden, output, torch.from_numpy(micro.target), 0.7, 4)

    def optional(array: np.ndarray | None) -> torch.Tensor | None:
        return None if array is None else torch.from_numpy(array)

    targets = Targets(
        logprobs=logprobs,
        entropy=entropy,
        sequence=torch.from_numpy(micro.sequence),
        sequences=len(micro.lengths),
        advantage=optional(micro.advantage),
        old_logprobs=optional(micro.old_logprobs),
        reference_logprobs=optional(micro.reference_logprobs),
    )
    loss, _ = total_loss(components, targets, torch.from_numpy(micro.weight), {"weight": denominator}, find_terms(components))
    loss.backward()
    assert embedding.grad is not None and output.grad is not None
    return np.concatenate([embedding.grad.numpy().ravel(), output.grad.numpy().ravel()])


ALGORITHM = make_algorithm(entropy_coefficient=0.01)
KL = LossComponent(term="kl", coefficient=0.1, parameters={"estimator": "k3"})


def ready(aggregation: str) -> Minibatch:
    batch = build_minibatch(uneven_groups(), ALGORITHM, version=0, aggregation=aggregation, constant=16, old="engine")
    reference = [np.where(term.trainable, -1.5, np.nan).astype(np.float32) for term in batch.terms]
    return replace(batch, terms=with_reference_logprobs(batch.terms, reference))


def whole_gradient(batch: Minibatch, layout: Callable[[Minibatch], list[list[MicroBatch]]]) -> np.ndarray:
    """Ranks are simulated by summing their gradients, which is what the collective does."""
    components = [*ALGORITHM.components(), KL]
    return sum(micro_gradient(micro, components, batch.denominator) for micros in layout(batch) for micro in micros if len(micro.target))  # type: ignore[return-value]


LAYOUTS: dict[str, Callable[[Minibatch], list[list[MicroBatch]]]] = {
    "one row": lambda batch: pack(batch.terms, ranks=1, micro_batch_tokens=10_000),
    "one rank, small rows": lambda batch: pack(batch.terms, ranks=1, micro_batch_tokens=25),
    "two ranks": lambda batch: pack(batch.terms, ranks=2, micro_batch_tokens=10_000),
    "two ranks, small rows": lambda batch: pack(batch.terms, ranks=2, micro_batch_tokens=22),
    "more ranks than sequences": lambda batch: pack(batch.terms, ranks=9, micro_batch_tokens=64),
    "one sequence a row": lambda batch: [[build(batch.terms, [i]) for i in range(len(batch.terms))]],
    "reversed, 3 + rest": lambda batch: [
        [build(batch.terms, [6, 5, 4])],
        [build(batch.terms, [3, 2, 1, 0])],
    ],
}


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant", "prompt_mean"])
def test_the_same_batch_gives_one_gradient_for_every_partition_and_rank_count(aggregation: str) -> None:
    batch = ready(aggregation)
    gradients = {name: whole_gradient(batch, layout) for name, layout in LAYOUTS.items()}
    reference = gradients.pop("one row")
    assert np.isfinite(reference).all()
    assert np.abs(reference).max() > 1e-3
    for name, gradient in gradients.items():
        # Sums of large terms that nearly cancel are only as exact as the terms: how exact depends on the processor.
        np.testing.assert_allclose(gradient, reference, rtol=1e-4, atol=1e-6 * np.abs(reference).max(), err_msg=name)


def test_a_mean_of_means_would_have_been_noticed() -> None:
    """The test above can fail: the mean over micro-batches of each one's own mean is another gradient here."""
    batch = ready("token_mean")
    micros = [micro for rank in LAYOUTS["two ranks, small rows"](batch) for micro in rank if len(micro.target)]
    components = [*ALGORITHM.components(), KL]
    wrong = np.mean([micro_gradient(micro, components, float(len(micro.target))) for micro in micros], axis=0)
    assert not np.allclose(wrong, whole_gradient(batch, LAYOUTS["one row"]), rtol=1e-2, atol=1e-4)


def test_an_unknown_engine_logprob_leaves_the_rest_of_the_gradient_alone() -> None:
    """Ratio 1 for that token: the gradient is the one with the trainer's own logprob in its place."""
    batch = ready("token_mean")
    assert any(np.isnan(term.old_logprobs[term.trainable]).any() for term in batch.terms)  # type: ignore[index]
    known = []
    for term in batch.terms:
        row = build([term], [0])
        generator = torch.Generator().manual_seed(5)
        embedding, output = (torch.randn(VOCABULARY, WIDTH, generator=generator) for _ in range(2))
        own, _ = target_logprob(embedding[torch.from_numpy(row.tokens[row.predictor])], output, torch.from_numpy(row.target), 0.7, 4)
        filled = np.array(term.old_logprobs)
        filled[term.trainable] = np.where(np.isnan(filled[term.trainable]), own.numpy(), filled[term.trainable])
        known.append(filled)
    layout = LAYOUTS["two ranks"]
    filled_in = replace(batch, terms=tuple(replace(term, old_logprobs=value) for term, value in zip(batch.terms, known, strict=True)))
    np.testing.assert_allclose(whole_gradient(batch, layout), whole_gradient(filled_in, layout), rtol=1e-5, atol=1e-8)
