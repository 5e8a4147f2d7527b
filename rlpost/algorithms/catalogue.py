"""Name -> algorithm and loss term. A new one is one file and one line here, or `package.module:name` in the user's config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from rlpost.algorithms.protocol import Algorithm, OfflineAlgorithm, RunFacts
from rlpost.config.algorithms import with_defaults
from rlpost.config.schema import AlgorithmConfig
from rlpost.plugins import entry_points, resolve
from rlpost.types import ConfigError, LossComponent

if TYPE_CHECKING:
    from rlpost.algorithms.losses import TermFunction

ONLINE = "rlpost.algorithms.online:"
OFFLINE = "rlpost.algorithms.offline:"
TERM_GROUP = "rlpost.loss_terms"

ALGORITHMS = {
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "gspo", "gmpo", "cispo", "sapo", "maxrl"), ONLINE + "PolicyGradient"),
    **dict.fromkeys(("rloo", "remax", "reinforce_pp", "reinforce_pp_baseline", "ppo", "distillation"), ONLINE + "PolicyGradient"),
    "sft": OFFLINE + "SupervisedFineTuning",
    "dpo": OFFLINE + "DirectPreference",
    "simpo": OFFLINE + "SimplePreference",
    "orpo": OFFLINE + "OddsRatioPreference",
    "kto": OFFLINE + "UnpairedPreference",
    "reward_model": OFFLINE + "RewardModelling",
}

LOSS_TERMS = {
    "policy_clip": "rlpost.algorithms.policy:policy_clip",
    "reinforce": "rlpost.algorithms.policy:reinforce",
    "gspo": "rlpost.algorithms.policy:gspo",
    "gmpo": "rlpost.algorithms.policy:gmpo",
    "cispo": "rlpost.algorithms.policy:cispo",
    "sapo": "rlpost.algorithms.policy:sapo",
    "entropy": "rlpost.algorithms.policy:entropy_bonus",
    "kl": "rlpost.algorithms.kl:kl_to_reference",
    "value": "rlpost.algorithms.value:value_loss",
    "likelihood": "rlpost.algorithms.preference:likelihood",
    "preference": "rlpost.algorithms.preference:preference",
    "simple_preference": "rlpost.algorithms.preference:simple_preference",
    "odds_ratio": "rlpost.algorithms.preference:odds_ratio",
    "kto": "rlpost.algorithms.preference:kto",
    "score_pairs": "rlpost.algorithms.preference:score_pairs",
}


def make_algorithm(config: AlgorithmConfig, facts: RunFacts) -> Algorithm:
    """The online algorithm that ``config.name`` names. Raises ConfigError when there is none, or no such loss."""
    check_policy_loss(with_defaults(config).policy_loss)
    return cast(Algorithm, _class(config)(config, facts))


def make_offline_algorithm(config: AlgorithmConfig) -> OfflineAlgorithm:
    """The offline algorithm that ``config.name`` names."""
    return cast(OfflineAlgorithm, _class(config)(with_defaults(config)))


def check_policy_loss(name: str) -> None:
    """Raises ConfigError for a name that no policy loss has. Imports none: losses need torch, and the driver does not."""
    own = [term for term, place in LOSS_TERMS.items() if place.startswith("rlpost.algorithms.policy:") and term != "entropy"]
    if ":" not in name and name not in own and name not in entry_points(TERM_GROUP):
        raise ConfigError(
            f"no policy loss is named {name!r} (algorithm.policy_loss); expected {', '.join(own)} or `package.module:function`"
        )


def _class(config: AlgorithmConfig) -> Any:
    return resolve(config.name, kind="algorithm", group="rlpost.algorithms", catalogue=ALGORITHMS)


def find_term(name: str) -> TermFunction:
    """The loss term of that name. Raises ConfigError when there is none."""
    return cast("TermFunction", resolve(name, kind="loss term", group=TERM_GROUP, catalogue=LOSS_TERMS))


def find_terms(components: Sequence[LossComponent]) -> dict[str, TermFunction]:
    """The functions that these components name."""
    return {component.term: find_term(component.term) for component in components}
