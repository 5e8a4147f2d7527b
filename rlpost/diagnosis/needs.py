"""What a run's configuration asks of the machines that it will run on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlpost.config.derive import Bundle, Device, derive, needs_critic, resolve_device, resolve_reference
from rlpost.config.inputs import other_models
from rlpost.config.schema import RunConfig
from rlpost.models.embedded import EMBEDDED_PREFIX, model_path
from rlpost.planner.memory import adapter_parameters, checkpoint_line, find_recipe, load_line, total_bytes
from rlpost.planner.shapes import load_shape
from rlpost.types import ConfigError

DEFAULT_OUTPUT = "runs"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What checks go by. The defaults are those of a machine that is looked at without a configuration."""

    device: Device | None = None
    """None: no configuration says."""
    engines: bool = True
    directory: str = DEFAULT_OUTPUT
    """Where the run's directory is made, absolute."""
    disk_bytes: int | None = None
    """Room that checkpoints take there; None: not known."""
    disk_formula: str = "no configuration is given"
    """How it was computed, or why it is not known."""
    threads: int = 0
    """CPU threads that compute at once: trainers and engines take turns, unless rollouts run ahead."""
    ray_address: str | None = None
    bundles: tuple[Bundle, ...] = ()
    models: tuple[str, ...] = ()
    """Directories of models that this machine has: every node reads them at the same place."""


def needs_of(config: RunConfig | None) -> Needs:
    """The needs of a checked configuration, or of none."""
    if config is None:
        return Needs(directory=str(Path(DEFAULT_OUTPUT).absolute()))
    device = resolve_device(config)
    derived = derive(config, device=device)
    training, engine = config.training, config.engine
    by_phase = (derived.ranks * training.threads, derived.critic_ranks * training.threads, derived.engines * engine.threads)
    size, formula = checkpoint_room(config)
    return Needs(
        device=device,
        engines=derived.engines > 0,
        # Not in the run's own directory: a new run must find it empty.
        directory=str(Path(config.run_dir).absolute().parent if config.run_dir else Path(config.output_dir).absolute()),
        disk_bytes=size,
        disk_formula=formula,
        threads=sum(by_phase) if config.schedule.max_staleness else max(by_phase),
        ray_address=config.placement.ray_address,
        bundles=derived.bundles,
        models=_model_directories(config),
    )


def _model_directories(config: RunConfig) -> tuple[str, ...]:
    """Those of the configuration that are here; an embedded model is not before it is built, one of the hub has no directory."""
    places = (Path(_local(path)).expanduser().absolute() for path in (config.model.path, *other_models(config).values()))
    return tuple(dict.fromkeys(str(place) for place in places if place.is_dir()))


def checkpoint_room(config: RunConfig) -> tuple[int | None, str]:
    """Bytes of all checkpoints that are on disk at once (one more than are kept, while it is written), and the formula.

    None where the model's shape cannot be read here; the text says why.
    """
    try:
        each, formula = _checkpoint_bytes(config)
    except ConfigError as error:
        return None, str(error).partition("; expected")[0]
    count = config.checkpoint.keep + 1
    return count * each, f"(checkpoint.keep + 1 = {count}) x ({formula})"


def _checkpoint_bytes(config: RunConfig) -> tuple[int, str]:
    """One checkpoint of all parts. With adapters the model's weights are in it too, without optimizer states."""
    recipe, lora = find_recipe(config.training.optimizer.name), config.training.lora
    policy = load_shape(_local(config.model.path))
    if lora.rank:
        adapters = adapter_parameters(policy.linears, lora.rank)
        lines = [load_line(policy.parameters, recipe.weights), checkpoint_line(adapters, recipe)]
    else:
        lines = [checkpoint_line(policy.parameters, recipe)]
    if resolve_reference(config) == "moving_average":
        lines.append(load_line(policy.parameters, recipe.weights))
    if needs_critic(config):
        lines.append(checkpoint_line(load_shape(_local(config.algorithm.critic.path or config.model.path)).parameters, recipe))
    return total_bytes(lines), " + ".join(line.formula for line in lines)


def _local(path: str) -> str:
    return str(model_path(path.removeprefix(EMBEDDED_PREFIX))) if path.startswith(EMBEDDED_PREFIX) else path
