"""The learning-rate schedule's values, which parameters decay, what an optimizer computes, and what a load may change."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from rlpost.config.schema import OptimizerConfig
from rlpost.training.optimizer import learning_rate_factor, make_optimizer, settings_kept


def holding(*parameters: torch.nn.Parameter) -> torch.nn.Module:
    """A module with these parameters."""
    return torch.nn.ParameterList(parameters)


def factors(total: int, **settings: object) -> list[float]:
    config = OptimizerConfig(**settings)  # type: ignore[arg-type]
    return [learning_rate_factor(step, total=total, config=config) for step in range(total)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"decay": "linear", "final_ratio": 0.0}, [1, 0.8, 0.6, 0.4, 0.2, 0]),
        ({"decay": "linear", "final_ratio": 0.5}, [1, 0.9, 0.8, 0.7, 0.6, 0.5]),
        ({"decay": "linear", "final_ratio": 0.0, "warmup_steps": 2}, [0.5, 1, 1, 2 / 3, 1 / 3, 0]),
        ({"decay": "cosine", "final_ratio": 0.1}, [1, 0.914058, 0.689058, 0.410942, 0.185942, 0.1]),
        ({"decay": "linear", "warmup_steps": 9}, [1 / 9, 2 / 9, 3 / 9, 4 / 9, 5 / 9, 6 / 9]),
        ({"decay": "cosine", "final_ratio": 0.1, "warmup_steps": 5}, [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]),
    ],
    ids=str,
)
def test_values_of_the_schedule(settings: dict[str, object], expected: list[float]) -> None:
    assert factors(6, **settings) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_a_run_that_goes_on_beyond_its_planned_steps_keeps_the_final_rate(decay: str) -> None:
    config = OptimizerConfig(decay=decay, final_ratio=0.1)
    assert [learning_rate_factor(step, total=6, config=config) for step in (5, 6, 60)] == pytest.approx([0.1] * 3)


def test_the_optimizer_steps_with_the_schedules_rates_from_the_first_step_on() -> None:
    """A warm-up whose first step had rate 0 would waste it; an off-by-one would shift all."""
    config = OptimizerConfig(lr=1e-3, warmup_steps=2, decay="linear", final_ratio=0.0)
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer, schedule = make_optimizer(holding(parameter), config, total=5)
    seen = []
    for _ in range(5):
        parameter.grad = torch.ones_like(parameter)
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx([1e-3 * factor for factor in factors(5, warmup_steps=2, decay="linear", final_ratio=0.0)])
    assert seen[0] > 0


def test_weight_decay_on_matrices_only_and_nothing_for_frozen_parameters() -> None:
    matrix, vector, frozen = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, 2))
    frozen.requires_grad_(False)
    optimizer, _ = make_optimizer(holding(matrix, vector, frozen), OptimizerConfig(lr=0.1, weight_decay=0.5), total=3)
    for parameter in (matrix, vector):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 1 - 0.1 * 0.5))
    assert vector.tolist() == [1.0, 1.0]
    assert frozen.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_moments_and_epsilon_are_the_configured_ones() -> None:
    optimizer, _ = make_optimizer(holding(torch.nn.Parameter(torch.ones(1))), OptimizerConfig(beta1=0.8, beta2=0.99, eps=1e-6), total=1)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    assert optimizer.param_groups[0]["eps"] == 1e-6


TOTAL, DONE = 8, 3
FIRST = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, warmup_steps=5, decay="linear", final_ratio=0.1)
CHANGED = OptimizerConfig(
    lr=3e-3, beta1=0.8, beta2=0.99, eps=1e-4, weight_decay=0.3, warmup_steps=2, decay="cosine", final_ratio=0.2
)  # fmt: skip


class Small:
    """A matrix and a vector with their optimizer; step ``n`` has the same gradients whoever takes it."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.parameters = [torch.nn.Parameter(torch.full((2, 2), 0.7)), torch.nn.Parameter(torch.full((3,), -0.4))]
        self.optimizer, self.schedule = make_optimizer(holding(*self.parameters), config, total=TOTAL)

    def step(self, number: int) -> float:
        """One update; the learning rate that it had."""
        for parameter in self.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        rate = float(self.schedule.get_last_lr()[0])
        assert [group["lr"] for group in self.optimizer.param_groups] == [rate, rate]
        self.optimizer.step()
        self.schedule.step()
        return rate

    def load(self, other: Small) -> None:
        """Parameters, optimizer and schedule of another one, as a checkpoint brings them."""
        for mine, theirs in zip(self.parameters, other.parameters, strict=True):
            mine.data.copy_(theirs.data)
        with settings_kept(self.optimizer, self.schedule):
            self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
            self.schedule.load_state_dict(copy.deepcopy(other.schedule.state_dict()))


@pytest.fixture
def trained() -> Small:
    """After some updates, in the middle of the warm-up."""
    small = Small(FIRST)
    for number in range(DONE):
        small.step(number)
    return small


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_load_with_the_same_configuration_goes_on_bit_by_bit(trained: Small, used: bool) -> None:
    resumed = Small(FIRST)
    if used:
        resumed.step(77)
    resumed.load(trained)
    assert resumed.optimizer.param_groups[0]["initial_lr"] == FIRST.lr
    for number in range(DONE, TOTAL):
        assert resumed.step(number) == trained.step(number)
        for mine, theirs in zip(resumed.parameters, trained.parameters, strict=True):
            assert torch.equal(mine, theirs)


def test_load_with_another_configuration_takes_the_state_and_keeps_the_settings(trained: Small) -> None:
    """The next updates are those of an optimizer made with the changed settings, whose moments are put in by hand."""
    resumed, expected = Small(CHANGED), Small(CHANGED)
    resumed.load(trained)
    for mine, theirs in zip(expected.parameters, trained.parameters, strict=True):
        mine.data.copy_(theirs.data)
        expected.optimizer.state[mine] = copy.deepcopy(trained.optimizer.state[theirs])
    for number in range(DONE, TOTAL):
        rate = CHANGED.lr * learning_rate_factor(number, total=TOTAL, config=CHANGED)
        for group in expected.optimizer.param_groups:
            group["lr"] = rate
        for parameter in expected.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        expected.optimizer.step()
        assert resumed.step(number) == rate
        for mine, theirs in zip(resumed.parameters, expected.parameters, strict=True):
            assert torch.equal(mine, theirs)


# ---- the other optimizers ----------------------------------------------------------------------------------------------


class Decoder(torch.nn.Module):
    """What a language model has: an embedding, two layers (a wide and a tall matrix, a norm), an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 128)
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {"up": torch.nn.Linear(128, 192), "down": torch.nn.Linear(192, 128, bias=False), "norm": torch.nn.LayerNorm(128)}
            )
            for _ in range(2)
        )
        self.lm_head = torch.nn.Linear(128, 50, bias=False)


MATRICES = {f"layers.{layer}.{name}.weight" for layer in range(2) for name in ("up", "down")}


def decoder() -> Decoder:
    torch.manual_seed(5)
    return Decoder()


def give_gradients(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 0.01


def changes(name: str, config: OptimizerConfig, steps: int = 4) -> dict[str, torch.Tensor]:
    """How far each parameter has moved after some steps."""
    model = decoder()
    start = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    optimizer, schedule = make_optimizer(model, replace(config, name=name), total=steps)
    for seed in range(steps):
        give_gradients(model, seed)
        optimizer.step()
        schedule.step()
    return {key: parameter.detach() - start[key] for key, parameter in model.named_parameters()}


def test_muon_takes_the_layers_matrices_and_adamw_everything_else() -> None:
    """Against torch's two optimizers side by side; an orthogonalised embedding would move every token at every step."""
    config = OptimizerConfig(lr=1e-2, beta1=0.8, weight_decay=0.1)
    plain = decoder()
    start = {key: parameter.detach().clone() for key, parameter in plain.named_parameters()}
    named = dict(plain.named_parameters())
    muon = torch.optim.Muon(
        [named[key] for key in sorted(MATRICES)], lr=1e-2, momentum=0.8, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    others = [parameter for key, parameter in named.items() if key not in MATRICES]
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in others if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2, betas=(0.8, 0.95),
    )  # fmt: skip
    for seed in range(4):
        give_gradients(plain, seed)
        muon.step()
        adamw.step()
    for key, moved in changes("muon", config).items():
        expected = named[key].detach() - start[key]
        assert float((moved - expected).abs().max()) <= 1e-5 * float(expected.abs().max()), key


def test_one_learning_rate_fits_muons_matrices_and_adamws_rest() -> None:
    """The root mean square of a first step is that of AdamW, 0.2 to 1 of the learning rate, whatever a matrix's shape."""
    sizes = {key: float(moved.square().mean().sqrt()) / 1e-2 for key, moved in changes("muon", OptimizerConfig(lr=1e-2), steps=1).items()}
    assert all(0.15 < sizes[key] < 0.25 for key in MATRICES), sizes
    assert all(0.9 < size < 1.1 for key, size in sizes.items() if key not in MATRICES), sizes


@pytest.mark.parametrize(("name", "gap"), [("adamw_bf16", 0.01), ("adamw_8bit", 0.05)])
def test_coarser_moments_give_nearly_the_steps_of_adamw(name: str, gap: float) -> None:
    config = OptimizerConfig(lr=1e-2, eps=1e-6, weight_decay=0.1)
    exact = changes("adamw", config, steps=20)
    for key, moved in changes(name, config, steps=20).items():
        assert float((moved - exact[key]).norm()) < gap * float(exact[key].norm()), key
    assert any(not torch.equal(moved, exact[key]) for key, moved in changes(name, config, steps=20).items())


def test_a_second_moment_in_bfloat16_still_falls_when_gradients_vanish() -> None:
    """Its last bit is up to 0.8 %: a decay of 0.996 and more would be rounded away, and the moment stay at its highest for ever."""
    model = decoder()
    optimizer, _ = make_optimizer(model, OptimizerConfig(name="adamw_bf16", beta2=0.99), total=300)
    give_gradients(model, 0)
    optimizer.step()
    matrix = model.layers[0]["up"].weight  # type: ignore[index]
    first = optimizer.state[matrix]["exp_avg_sq"].float()
    for _ in range(299):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    left = optimizer.state[matrix]["exp_avg_sq"].float() / first
    assert float(left.max()) < 2 * 0.99**299
