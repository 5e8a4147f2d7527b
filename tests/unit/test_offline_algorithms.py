"""Offline algorithms: what their batches make of the loss, against plain formulas; any order, packing and rank count gives the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlpost.algorithms.catalogue import find_terms, make_offline_algorithm
from rlpost.algorithms.losses import Targets, total_loss
from rlpost.algorithms.protocol import OfflineAlgorithm, OfflineBatch, OfflineRow, TokenSequence
from rlpost.config.algorithms import OFFLINE, WITH_REFERENCE, is_offline, with_defaults
from rlpost.config.derive import resolve_reference
from rlpost.config.schema import AlgorithmConfig, PreferenceConfig, RunConfig
from rlpost.training.packing import MicroBatch, pack
from rlpost.types import MAIN_WEIGHT, ConfigError, LossTerms

TOLERANCE = 1e-6
"""Relative; weights are float32."""
BASELINE = 0.3


def make(name: str, aggregation: str = "auto", **preference: Any) -> OfflineAlgorithm:
    config = AlgorithmConfig(name=name, loss_aggregation=aggregation, preference=PreferenceConfig(**preference))
    return make_offline_algorithm(with_defaults(config))


def sequence(prompt: Sequence[int], answer: Sequence[int], gap: bool = False) -> TokenSequence:
    """``gap``: the second token of the answer is a tool's."""
    trainable = np.array([False] * len(prompt) + [True] * len(answer))
    if gap:
        trainable[len(prompt) + 1] = False
    return TokenSequence(tokens=np.array([*prompt, *answer], np.int32), trainable=trainable, prompt_length=len(prompt))


def rows_of(kind: str) -> list[OfflineRow]:
    """Five rows of uneven lengths; one has a gap in its answer."""
    random = np.random.default_rng(5)
    rows = []
    for index, (prompt, first, second) in enumerate([(3, 4, 2), (2, 1, 5), (4, 3, 3), (1, 6, 1), (2, 2, 4)]):
        start, *answers = (random.integers(3, 50, size).tolist() for size in (prompt, first, second))
        found = [sequence(start, answer, gap=index == 2) for answer in answers]
        names = ("chosen", "rejected") if kind == "pair" else ("answer",)
        margin = 0.5 * index if index % 2 else None
        rows.append(OfflineRow(row_id=f"r{index}", sequences=dict(zip(names, found, strict=False)), wanted=index in (0, 3), margin=margin))
    return rows


def fake(term: LossTerms, what: int) -> np.ndarray:
    """Logprobs (values, reference logprobs) of a sequence ``[tokens]``, decided by its tokens alone."""
    random = np.random.default_rng([what, *term.tokens.tolist()])
    return random.normal(size=len(term.tokens)) if what == 2 else -random.exponential(size=len(term.tokens))


def loss_of(algorithm: OfflineAlgorithm, batch: OfflineBatch, ranks: int = 1, micro_batch_tokens: int = 1000) -> float:
    """The loss as the trainer adds it up: over ranks and micro-batches."""
    terms = tuple(replace(term, reference_logprobs=fake(term, 1) if algorithm.needs_reference else None) for term in batch.terms)
    components = algorithm.components(baseline=BASELINE)
    packed = pack(terms, ranks=ranks, micro_batch_tokens=micro_batch_tokens, together=algorithm.together)
    total = 0.0
    for micro in (micro for micros in packed for micro in micros):
        weight = torch.tensor(micro.weight, dtype=torch.float64)
        value, _ = total_loss(components, targets_of(micro, terms), weight, batch.denominators, find_terms(components))
        total += float(value)
    return total


def targets_of(micro: MicroBatch, terms: Sequence[LossTerms]) -> Targets:
    def gathered(what: int) -> torch.Tensor:
        parts = [fake(terms[member], what)[terms[member].trainable] for member in micro.members]
        return torch.tensor(np.concatenate([np.zeros(0), *parts]))

    return Targets(
        logprobs=gathered(0),
        entropy=torch.zeros(len(micro.target), dtype=torch.float64),
        sequence=torch.tensor(micro.sequence),
        sequences=len(micro.lengths),
        values=gathered(2),
        reference_logprobs=None if micro.reference_logprobs is None else gathered(1),
        columns={name: torch.tensor(values, dtype=torch.float64) for name, values in micro.columns.items()},
        scalars={name: torch.tensor(values, dtype=torch.float64) for name, values in micro.scalars.items()},
    )


# ---- plain formulas, row by row ------------------------------------------------------------------------------------


def known(row: OfflineRow, name: str, what: int) -> np.ndarray:
    """What the fake model says of the trained tokens of an answer."""
    own = row.sequences[name]
    term = LossTerms(
        trajectory_id="", group_id="", prompt_length=0, tokens=own.tokens, trainable=own.trainable, weight=np.zeros(len(own.tokens))
    )
    return fake(term, what)[own.trainable]


def gap(row: OfflineRow, reduce: Any) -> float:
    """Log ratio to the reference of the chosen answer minus that of the rejected."""
    chosen, rejected = (reduce(known(row, name, 0) - known(row, name, 1)) for name in ("chosen", "rejected"))
    return float(chosen - rejected)


def sigmoid(value: float) -> float:
    return 1.0 / (1.0 + np.exp(-value))


def mean(row: OfflineRow, name: str) -> float:
    return float(known(row, name, 0).mean())


def likelihood(rows: Sequence[OfflineRow], name: str, aggregation: str = "token_mean") -> float:
    logprobs = [known(row, name, 0) for row in rows]
    return -float(np.concatenate(logprobs).mean()) if aggregation == "token_mean" else -float(np.mean([one.mean() for one in logprobs]))


def odds(row: OfflineRow, name: str) -> float:
    probability = np.exp(mean(row, name))
    return float(np.log(probability / (1.0 - probability)))


def kto_loss(row: OfflineRow, beta: float, desirable: float, undesirable: float) -> float:
    ratio = float((known(row, "answer", 0) - known(row, "answer", 1)).sum())
    if row.wanted:
        return desirable * (1.0 - sigmoid(beta * (ratio - BASELINE)))
    return undesirable * (1.0 - sigmoid(beta * (BASELINE - ratio)))


def score_loss(row: OfflineRow, default: float, centering: float) -> float:
    chosen, rejected = (float(known(row, name, 2)[-1]) for name in ("chosen", "rejected"))
    margin = default if row.margin is None else row.margin
    return -np.log(sigmoid(chosen - rejected - margin)) + centering * (chosen + rejected) ** 2


def over(rows: Sequence[OfflineRow], loss: Any) -> float:
    return float(np.mean([loss(row) for row in rows]))


CASES: list[tuple[str, OfflineAlgorithm, Any]] = [
    ("sft, token mean", make("sft"), lambda rows: likelihood(rows, "answer")),
    ("sft, sequence mean", make("sft", "sequence_mean"), lambda rows: likelihood(rows, "answer", "sequence_mean")),
    ("dpo", make("dpo", beta=0.2), lambda rows: over(rows, lambda row: -np.log(sigmoid(0.2 * gap(row, np.sum))))),
    (
        "cdpo",
        make("dpo", beta=0.2, label_smoothing=0.1),
        lambda rows: over(
            rows, lambda row: -0.9 * np.log(sigmoid(0.2 * gap(row, np.sum))) - 0.1 * np.log(sigmoid(-0.2 * gap(row, np.sum)))
        ),
    ),
    (
        "robust dpo",
        make("dpo", loss="robust", beta=0.2, label_smoothing=0.1),
        lambda rows: over(
            rows, lambda row: (-0.9 * np.log(sigmoid(0.2 * gap(row, np.sum))) + 0.1 * np.log(sigmoid(-0.2 * gap(row, np.sum)))) / 0.8
        ),
    ),
    ("ipo", make("dpo", loss="ipo", beta=0.2), lambda rows: over(rows, lambda row: (gap(row, np.mean) - 2.5) ** 2)),
    ("hinge", make("dpo", loss="hinge", beta=0.2), lambda rows: over(rows, lambda row: max(0.0, 1.0 - 0.2 * gap(row, np.sum)))),
    (
        "dpo with likelihood",
        make("dpo", beta=0.2, likelihood=0.7),
        lambda rows: over(rows, lambda row: -np.log(sigmoid(0.2 * gap(row, np.sum)))) + 0.7 * likelihood(rows, "chosen"),
    ),
    (
        "simpo",
        make("simpo", beta=2.0, margin=0.4),
        lambda rows: over(rows, lambda row: -np.log(sigmoid(2.0 * (mean(row, "chosen") - mean(row, "rejected")) - 0.4))),
    ),
    (
        "orpo",
        make("orpo", beta=0.25),
        lambda rows: (
            likelihood(rows, "chosen") + 0.25 * over(rows, lambda row: -np.log(sigmoid(odds(row, "chosen") - odds(row, "rejected"))))
        ),
    ),
    (
        "orpo, sequence mean",
        make("orpo", "sequence_mean", beta=0.25),
        lambda rows: (
            likelihood(rows, "chosen", "sequence_mean")
            + 0.25 * over(rows, lambda row: -np.log(sigmoid(odds(row, "chosen") - odds(row, "rejected"))))
        ),
    ),
    (
        "kto",
        make("kto", beta=0.5, desirable=1.2, undesirable=0.7),
        lambda rows: over(rows, lambda row: kto_loss(row, 0.5, 1.2, 0.7)),
    ),
    (
        "reward model",
        make("reward_model", margin=0.2, centering=0.01),
        lambda rows: over(rows, lambda row: score_loss(row, 0.2, 0.01)),
    ),
]
EACH = pytest.mark.parametrize(("algorithm", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])


@EACH
def test_the_loss_of_a_batch_is_the_formulas(algorithm: OfflineAlgorithm, expected: Any) -> None:
    rows = rows_of(algorithm.data_kind)
    assert loss_of(algorithm, algorithm.terms(rows)) == pytest.approx(expected(rows), rel=TOLERANCE)


@EACH
def test_any_order_of_rows_packing_and_rank_count_gives_the_same_loss(algorithm: OfflineAlgorithm, expected: Any) -> None:
    rows = rows_of(algorithm.data_kind)
    mixed = [rows[index] for index in (3, 0, 4, 2, 1)]
    for order in (rows, mixed):
        batch = algorithm.terms(order)
        for ranks, micro_batch_tokens in ((1, 1000), (1, 12), (2, 12), (3, 1000), (7, 1000)):
            assert loss_of(algorithm, batch, ranks, micro_batch_tokens) == pytest.approx(expected(rows), rel=TOLERANCE)


@EACH
def test_a_row_that_a_batch_has_twice_counts_twice(algorithm: OfflineAlgorithm, expected: Any) -> None:
    """A batch that crosses an epoch's end: each copy is a pair of its own, and fits where one fits."""
    rows = [*rows_of(algorithm.data_kind), rows_of(algorithm.data_kind)[3]]
    batch = algorithm.terms(rows)
    assert len({term.group_id for term in batch.terms}) == len(rows)
    assert loss_of(algorithm, batch, micro_batch_tokens=12) == pytest.approx(expected(rows), rel=TOLERANCE)


@EACH
def test_every_component_has_weights_and_a_denominator_in_every_term(algorithm: OfflineAlgorithm, expected: Any) -> None:
    """Packing takes the names of the first term for all, and total_loss looks both up by name."""
    batch = algorithm.terms(rows_of(algorithm.data_kind))
    for component in algorithm.components():
        assert batch.denominators[component.weight] > 0
        for term in batch.terms:
            assert component.weight == MAIN_WEIGHT or component.weight in {**term.columns, **term.scalars}
    assert len({(tuple(sorted(term.columns)), tuple(sorted(term.scalars))) for term in batch.terms}) == 1


@pytest.mark.parametrize("name", ["dpo", "simpo", "orpo", "reward_model"])
def test_the_sequences_of_a_pair_stand_together_and_share_their_prompt(name: str) -> None:
    rows = rows_of("pair")
    terms = make(name).terms(rows).terms
    assert [term.trajectory_id for term in terms] == [f"{row.row_id}/{answer}" for row in rows for answer in ("chosen", "rejected")]
    for row, chosen, rejected in zip(rows, terms[::2], terms[1::2], strict=True):
        assert chosen.group_id == rejected.group_id == row.row_id
        assert chosen.prompt_length == rejected.prompt_length == row.sequences["chosen"].prompt_length
        assert chosen.scalars["pair"] == rejected.scalars["pair"]
        assert (chosen.scalars["side"], rejected.scalars["side"]) == (1.0, -1.0)


def test_a_reward_model_scores_the_last_token_alone() -> None:
    for term in make("reward_model").terms(rows_of("pair")).terms:
        assert term.scored and np.flatnonzero(term.trainable).tolist() == [len(term.tokens) - 1]


def test_the_likelihood_of_pairs_is_on_chosen_answers_only() -> None:
    """Its denominator too: a token of a rejected answer in it would make the loss depend on the length of what is not learnt."""
    rows = rows_of("pair")
    batch = make("orpo").terms(rows)
    for chosen, rejected in zip(batch.terms[::2], batch.terms[1::2], strict=True):
        assert np.array_equal(chosen.columns["likelihood_weight"] > 0, chosen.trainable)
        assert not rejected.columns["likelihood_weight"].any()
    assert batch.denominators["likelihood_weight"] == sum(row.sequences["chosen"].trainable.sum() for row in rows)


def test_ktos_estimate_pairs_each_prompt_with_the_answer_of_another_row_in_any_order() -> None:
    rows = rows_of("labelled")
    found = make("kto").terms(rows).estimate
    assert len(found) == len(rows)
    answers = {tuple(own.tokens[own.prompt_length :]): row.row_id for row in rows for own in row.sequences.values()}
    longest = max(len(row.sequences["answer"].tokens) for row in rows)
    for term, row in zip(found, rows, strict=True):
        own = row.sequences["answer"]
        assert term.prompt_length == own.prompt_length and term.group_id == row.row_id
        assert np.array_equal(term.tokens[: own.prompt_length], own.tokens[: own.prompt_length])
        assert not term.trainable[: own.prompt_length].any() and term.trainable.any()
        tail = tuple(term.tokens[own.prompt_length :])
        assert [other for answer, other in answers.items() if answer[: len(tail)] == tail] == [f"r{(rows.index(row) + 1) % len(rows)}"]
        assert len(term.tokens) <= longest
    mixed = make("kto").terms([rows[index] for index in (3, 0, 4, 2, 1)]).estimate
    assert [term.tokens.tolist() for term in mixed] == [term.tokens.tolist() for term in found]


def test_ktos_estimate_needs_no_more_memory_than_the_longest_row() -> None:
    """A long prompt with the answer of another row would be longer than anything that the trainer was given room for."""
    long_prompt = OfflineRow(row_id="a", sequences={"answer": sequence(range(3, 20), [3])}, wanted=True)
    long_answer = OfflineRow(row_id="b", sequences={"answer": sequence([3], range(3, 20))}, wanted=False)
    first, second = make("kto").terms([long_prompt, long_answer]).estimate
    assert (len(first.tokens), int(first.trainable.sum())) == (18, 1)
    assert second.tokens.tolist() == [3, 3]


def test_kto_with_a_single_row_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.prompts_per_step .* must be 2 or more"):
        make("kto").terms(rows_of("labelled")[:1])


@pytest.mark.parametrize("name", ["sft", "dpo", "orpo"])
@pytest.mark.parametrize("aggregation", ["constant", "prompt_mean"])
def test_an_aggregation_of_sampled_groups_is_refused(name: str, aggregation: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.loss_aggregation={aggregation} .*token_mean .*sequence_mean"):
        make(name, aggregation)


def test_every_offline_name_says_what_it_needs() -> None:
    """The loop asks for exactly this: the kind of rows, whether a row's sequences stay together, the head and the reference."""
    found = {name: make(name) for name in OFFLINE}
    assert {name: algorithm.data_kind for name, algorithm in found.items()} == {
        "sft": "conversation", "dpo": "pair", "simpo": "pair", "orpo": "pair", "kto": "labelled", "reward_model": "pair",
    }  # fmt: skip
    assert [name for name, algorithm in found.items() if algorithm.together] == ["dpo", "simpo", "orpo", "reward_model"]
    assert [name for name, algorithm in found.items() if algorithm.score_head] == ["reward_model"]
    assert tuple(name for name, algorithm in found.items() if algorithm.needs_reference) == WITH_REFERENCE


OWN = """
from rlpost.algorithms.offline import DirectPreference

class Own(DirectPreference):
    pass
"""


def test_an_offline_class_of_the_users_own_is_one_by_its_kind(tmp_path: Path) -> None:
    """Its name says nothing; taken for an online one, it would be asked for groups and get engines."""
    (tmp_path / "own.py").write_text(OWN)
    config = AlgorithmConfig(name=f"{tmp_path / 'own.py'}:Own", kind="offline")
    assert is_offline(config)
    assert not is_offline(replace(config, kind="auto"))
    assert resolve_reference(RunConfig(algorithm=config)) == "initial", "its loss may read reference logprobs"
    own, built_in = make_offline_algorithm(config), make("dpo")
    assert type(own).__name__ == "Own"
    rows = rows_of("pair")
    terms = own.terms(rows)
    assert [term.trajectory_id for term in terms.terms] == [f"{row.row_id}/{name}" for row in rows for name in ("chosen", "rejected")]
    assert loss_of(own, terms) == pytest.approx(loss_of(built_in, built_in.terms(rows)), rel=TOLERANCE)
