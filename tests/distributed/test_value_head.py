"""Critics and reward models: the values of plain transformers, one gradient for every partition, and a directory that others load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import FIRST_ID, LAST_ID, RankProcesses, Trainers, make_groups, worker_settings
from plain_models import gradients_of, untied_model

from rlpost.checkpoint.__main__ import main as checkpoint_command
from rlpost.checkpoint.directory import begin, complete
from rlpost.config.schema import LoraConfig, OptimizerConfig, TrainingConfig
from rlpost.driver.reward_models import reward_terms
from rlpost.models.embedded import build
from rlpost.training.packing import pack, unpack
from rlpost.training.protocol import UpdateRequest, WorkerSettings
from rlpost.types import ConfigError, LossComponent, LossTerms

PARTITIONS = (60, 110, 4096)
"""Values of micro_batch_tokens: from one long sequence a micro-batch to everything in one."""

FROZEN_LR = OptimizerConfig(lr=0.0)
"""Gradients are compared at the same weights, so the optimizer's step must not move them."""

MOVING = OptimizerConfig(lr=1e-2)
END = 2
CLIP, CENTERING = 0.2, 0.05
VALUE_LOSS = LossComponent(term="value", parameters={"clip": CLIP})
PAIR_LOSS = LossComponent(term="score_pairs", parameters={"centering": CENTERING}, weight="pairs")


def settings_of(model: str | Path = "tiny-sort5", **changes: Any) -> WorkerSettings:
    return replace(worker_settings(model, **changes), head="value")


def plain_classifier(path: Path) -> Any:
    """What transformers makes of the directory, in float32 with its own attention."""
    from transformers import AutoModelForSequenceClassification

    model, found = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"] and not found["mismatched_keys"], found
    return model.eval()


def reward_model(directory: Path, labels: int = 1) -> Path:
    """A directory as transformers writes it: the embedded model with a head of noise."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(build("tiny-sort5"), num_labels=labels, dtype=torch.float32)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with one label."""
    return reward_model(tmp_path_factory.mktemp("reward_model") / "rm")


def token_values(model: Any, tokens: np.ndarray) -> torch.Tensor:
    """The head on the hidden state of each token ``[tokens]``, of a row of its own."""
    hidden = model.model(input_ids=torch.tensor(np.asarray(tokens, np.int64))[None], use_cache=False).last_hidden_state
    values: torch.Tensor = model.score(hidden)[0, :, 0]
    return values


def critic_terms(*, only: int | None = None) -> list[LossTerms]:
    """Uneven trajectories with tool gaps and shared prompts; returns and old values are noise around what the model may say."""
    random = np.random.default_rng(3)
    terms = []
    for trajectory in [t for group in make_groups() for t in group.trajectories]:
        returns, old = (random.normal(0, 0.5, len(trajectory.tokens)).astype(np.float32) for _ in range(2))
        terms.append(
            LossTerms(
                trajectory_id=trajectory.trajectory_id,
                group_id=trajectory.group_id,
                prompt_length=trajectory.prompt_length,
                tokens=trajectory.tokens,
                trainable=trajectory.trainable,
                weight=trajectory.trainable.astype(np.float32),
                columns={"returns": returns, "old_values": old},
            )
        )
    return terms if only is None else [terms[only]]


def sequences_of(count: int, *, seed: int = 5) -> list[np.ndarray]:
    """Random tokens of very different lengths; each ends with the end token."""
    random = np.random.default_rng(seed)
    return [np.append(random.integers(FIRST_ID, LAST_ID, length), END).astype(np.int32) for length in random.integers(0, 50, count)]


def pair_terms(pairs: int) -> list[LossTerms]:
    """Pairs of answers to a prompt each, with margins; scored at the last token."""
    random = np.random.default_rng(7)
    terms = []
    for pair in range(pairs):
        prompt = random.integers(FIRST_ID, LAST_ID, pair % 5 + 1)
        sequences = [np.concatenate([prompt, answer]).astype(np.int32) for answer in sequences_of(2, seed=pair)]
        for side, term in zip((1.0, -1.0), reward_terms(sequences), strict=True):
            scalars = {"pair": float(pair), "side": side, "margin": 0.1 * pair, "pairs": float(side > 0)}
            name = f"pair {pair}"
            terms.append(replace(term, trajectory_id=f"{name} {side}", group_id=name, prompt_length=len(prompt), scalars=scalars))
    return terms


def values(trainers: Trainers, terms: Sequence[LossTerms], micro_batch_tokens: int = 4096) -> list[np.ndarray]:
    """``[tokens]`` of each sequence, NaN where nothing is asked for."""
    packed = pack(terms, ranks=trainers.ranks, micro_batch_tokens=micro_batch_tokens)
    return unpack(packed, trainers.call_each("values", [(micros,) for micros in packed]), terms)


def scores(trainers: Trainers, sequences: Sequence[np.ndarray]) -> np.ndarray:
    """One of each sequence, at its last token."""
    return np.array([found[-1] for found in values(trainers, reward_terms(sequences))])


@torch.no_grad()
def plain_scores(model: Any, sequences: Sequence[np.ndarray]) -> np.ndarray:
    """transformers' own forward, row by row."""
    return np.array([float(model(input_ids=torch.tensor(tokens.astype(np.int64))[None]).logits[0, 0]) for tokens in sequences])


def requests(
    trainers: Trainers, terms: Sequence[LossTerms], loss: LossComponent, denominator: float, tokens: int
) -> list[tuple[UpdateRequest]]:
    """One optimizer step, as the driver asks each rank for it."""
    packed = pack(terms, ranks=trainers.ranks, micro_batch_tokens=tokens, together=loss is PAIR_LOSS)
    return [
        (UpdateRequest(micro_batches=micros, denominators={loss.weight: denominator}, components=[loss], temperature=1.0),)
        for micros in packed
    ]


def captured_update(worker: Any, request: UpdateRequest) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """In a rank: the metrics of an update, and its whole gradients by parameter name."""
    captured: dict[str, torch.Tensor] = {}
    clip = worker._clip

    def capture() -> float:
        captured.update({name: p.grad.full_tensor().clone() for name, p in worker.model.named_parameters() if p.grad is not None})
        return float(clip())

    worker._clip = capture
    try:
        return worker.update(request), captured
    finally:
        worker._clip = clip


def assert_close(actual: np.ndarray, expected: np.ndarray, what: str, tolerance: float = 1e-5) -> None:
    error = float(np.abs(actual - expected).max() / np.abs(expected).max())
    assert error < tolerance, f"{what}: off by {error:.1e} of the largest"


def assert_same_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    assert sorted(actual) == sorted(expected), what
    for name, gradient in expected.items():
        assert_close(actual[name].numpy(), gradient.numpy(), f"{what}: {name}")


# ---- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_values_and_scores_are_those_of_unpacked_rows(processes: RankProcesses, directory: Path, ranks: int) -> None:
    """A critic's value is of the state before a token, a score of the state at the last one; shared prompts and packing change neither."""
    plain, terms, sequences = plain_classifier(directory), critic_terms(), sequences_of(11)
    with torch.no_grad():
        before = [token_values(plain, term.tokens).numpy()[:-1] for term in terms]
    expected = plain_scores(plain, sequences)
    with processes.trainers(settings_of(directory, total_updates=None), ranks=ranks) as trainers:
        for tokens in PARTITIONS:
            for term, found, wanted in zip(terms, values(trainers, terms, tokens), before, strict=True):
                mask = term.trainable[1:]
                assert_close(found[1:][mask], wanted[mask], f"{term.trajectory_id}, {tokens} tokens")
                assert np.isnan(found[~term.trainable]).all()
            last = [found[-1] for found in values(trainers, reward_terms(sequences), tokens)]
            assert_close(np.array(last), expected, f"scores, {tokens} tokens")
        pairs = pair_terms(4)
        last = [found[-1] for found in values(trainers, pairs)]
        assert_close(np.array(last), plain_scores(plain, [term.tokens for term in pairs]), "shared prompts")


def test_values_of_a_bfloat16_forward_are_float32_and_near(processes: RankProcesses, directory: Path) -> None:
    """The head itself is computed in float32: scores that differ by less than a bfloat16's step stay apart."""
    sequences = sequences_of(40)
    with processes.trainers(replace(settings_of(directory, total_updates=None), dtype="bfloat16"), ranks=1) as trainers:
        found = scores(trainers, sequences)
    assert_close(found, plain_scores(plain_classifier(directory), sequences), "bfloat16", tolerance=0.05)
    assert any(float(torch.tensor(score).bfloat16()) != score for score in found)


def test_head_of_a_language_model_starts_at_exactly_0_and_alone_gets_a_gradient(processes: RankProcesses) -> None:
    """Noise of a new head would be a reward; and a frozen head of zeros would never learn anything."""
    training = TrainingConfig(trainable=r"layers\.1\.")
    terms = critic_terms()
    count = float(sum(term.trainable.sum() for term in terms))
    with processes.trainers(settings_of(training=training, optimizer=MOVING), ranks=2) as trainers:
        assert all((found[term.trainable] == 0.0).all() for found, term in zip(values(trainers, terms), terms, strict=True))
        by_rank = trainers.apply_each(captured_update, requests(trainers, terms, VALUE_LOSS, count, 110))
        moved = values(trainers, terms)
    gradients = by_rank[0][1]
    assert {name for name, gradient in gradients.items() if gradient.abs().max() > 0} == {"score.weight"}
    assert set(gradients) > {"score.weight"} and all("layers.1." in name for name in gradients if name != "score.weight")
    assert max(np.nanmax(np.abs(found)) for found in moved) > 1e-3


# ---- gradients -----------------------------------------------------------------------------------------------------------


def plain_value_loss(model: Any, terms: Sequence[LossTerms]) -> torch.Tensor:
    """Written out: half the larger squared error of the value and of the value held near the old one, mean over tokens."""
    losses = []
    for term in terms:
        mask = torch.tensor(term.trainable[1:])
        value = token_values(model, term.tokens)[:-1][mask]
        returns, old = (torch.tensor(term.columns[name][1:])[mask] for name in ("returns", "old_values"))
        held = old + (value - old).clamp(-CLIP, CLIP)
        losses.append(0.5 * torch.maximum((value - returns) ** 2, (held - returns) ** 2))
    return torch.cat(losses).mean()


def plain_pair_loss(model: Any, terms: Sequence[LossTerms]) -> torch.Tensor:
    """Written out: Bradley-Terry with margins and centring, mean over pairs."""
    losses = []
    for chosen, rejected in zip(terms[::2], terms[1::2], strict=True):
        high, low = token_values(model, chosen.tokens)[-1], token_values(model, rejected.tokens)[-1]
        losses.append(torch.nn.functional.softplus(low - high + chosen.scalars["margin"]) + CENTERING * (high + low) ** 2)
    return torch.stack(losses).mean()


def expected_gradients(directory: Path, loss: Any, terms: Sequence[LossTerms]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of plain autograd."""
    model = plain_classifier(directory)
    value = loss(model, terms)
    value.backward()
    return float(value.detach()), gradients_of(model)


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_gradient_for_every_partition_and_rank_count(processes: RankProcesses, directory: Path, ranks: int) -> None:
    """Of a critic's loss and a reward model's, from the head down to the embeddings; with one sequence a rank has nothing to train."""
    tokens = critic_terms()
    lonely = critic_terms(only=4)
    cases = [
        ("critic", tokens, VALUE_LOSS, float(sum(term.trainable.sum() for term in tokens)), plain_value_loss),
        ("one sequence", lonely, VALUE_LOSS, float(lonely[0].trainable.sum()), plain_value_loss),
        ("pairs", pair_terms(6), PAIR_LOSS, 6.0, plain_pair_loss),
        ("one pair", pair_terms(1), PAIR_LOSS, 1.0, plain_pair_loss),
    ]
    with processes.trainers(settings_of(directory, optimizer=FROZEN_LR, total_updates=99), ranks=ranks) as trainers:
        for what, terms, loss, denominator, plain in cases:
            value, gradients = expected_gradients(directory, plain, terms)
            for size in PARTITIONS if len(terms) > 2 else PARTITIONS[-1:]:
                asked = requests(trainers, terms, loss, denominator, 120 if what == "pairs" and size == PARTITIONS[0] else size)
                metrics, found = trainers.apply_each(captured_update, asked)[0]
                assert_same_gradients(found, gradients, f"{what}, {size} tokens, {ranks} ranks")
                assert metrics["train/loss"] == pytest.approx(value, rel=1e-5)


def test_gradient_checkpointing_and_zero2_change_nothing(processes: RankProcesses, directory: Path) -> None:
    training = TrainingConfig(gradient_checkpointing=True, reshard_after_forward=False)
    terms = critic_terms()
    _, gradients = expected_gradients(directory, plain_value_loss, terms)
    with processes.trainers(settings_of(directory, optimizer=FROZEN_LR, training=training), ranks=2) as trainers:
        asked = requests(trainers, terms, VALUE_LOSS, float(sum(term.trainable.sum() for term in terms)), 110)
        assert_same_gradients(trainers.apply_each(captured_update, asked)[0][1], gradients, "other memory settings")


# ---- directories ---------------------------------------------------------------------------------------------------------


def set_in_config(directory: Path, **entries: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def trained_names(worker: Any) -> list[str]:
    """In a rank: the parameters that are trained."""
    return [name for name, parameter in worker.model.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize("kind", ["tied", "padding ends", "lora", "reward model"])
def test_exported_reward_model_gives_equal_scores_to_transformers_and_to_us(
    processes: RankProcesses, tmp_path: Path, directory: Path, kind: str
) -> None:
    """Trained and saved by two ranks, exported in one process. Where the padding token is also the end token, transformers would score
    the token before the end."""
    source = {"tied": build("tiny-sort5"), "lora": build("tiny-sort5"), "reward model": directory}.get(kind) or untied_model(tmp_path / "u")
    if kind == "padding ends":
        set_in_config(source, pad_token_id=END, eos_token_id=END)
    lora = LoraConfig(rank=4 if kind == "lora" else 0)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(f"model: {{path: {source}}}\ntraining: {{lora: {{rank: {lora.rank}, alpha: {lora.alpha}}}}}\n")
    sequences = sequences_of(9)
    settings = settings_of(source, training=TrainingConfig(lora=lora), optimizer=MOVING)
    with processes.trainers(settings, ranks=2) as trainers:
        start = scores(trainers, sequences)
        for _ in range(3):
            trainers.call_each("update", requests(trainers, pair_terms(6), PAIR_LOSS, 6.0, 200))
        expected = scores(trainers, sequences)
        trained = trainers.apply(trained_names)[0]
        partial = begin(run_dir, 3)
        trainers.call("save", str(partial))
    complete(partial, {"step": 3})
    assert np.abs(expected - start).max() > 1e-2
    if kind == "lora":
        assert {name.rpartition(".")[2] for name in trained if name != "score.weight"} == {"lora_A", "lora_B"}
    assert "score.weight" in trained
    out = tmp_path / "out"
    assert checkpoint_command(["export", str(run_dir), "--to", str(out), "--dtype", "float32"]) == 0
    assert_close(plain_scores(plain_classifier(out), sequences), expected, "transformers")
    with processes.trainers(settings_of(out, total_updates=None), ranks=2) as trainers:
        assert_close(scores(trainers, sequences), expected, "ours")


def refusal(processes: RankProcesses, settings: WorkerSettings) -> str:
    with pytest.raises(ConfigError) as caught, processes.trainers(settings, ranks=1):
        pass
    return str(caught.value)


def test_head_that_would_be_wrong_or_noise_is_refused(processes: RankProcesses, tmp_path: Path, directory: Path) -> None:
    two = reward_model(tmp_path / "two", labels=2)
    message = refusal(processes, settings_of(two))
    assert str(two) in message and "2 labels" in message and "exactly one" in message
    headless = untied_model(tmp_path / "headless")
    set_in_config(headless, architectures=["Qwen2ForSequenceClassification"], id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
    message = refusal(processes, settings_of(headless))
    assert "lacks weights" in message and "score.weight" in message
    everything = TrainingConfig(lora=LoraConfig(rank=2, targets="."))
    message = refusal(processes, settings_of(directory, training=everything))
    assert "training.lora.targets" in message and "score" in message
    assert f"has no model directory {tmp_path}/nowhere" in refusal(processes, settings_of(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    assert "cannot be loaded as a model with a value head" in refusal(processes, settings_of(tmp_path / "empty"))
