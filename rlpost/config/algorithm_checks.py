"""Do the settings of an algorithm fit together? Part of :mod:`rlpost.config.checks`, in the same form: each check yields problems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from rlpost.config.algorithms import LOSS_OPTIONS, OFFLINE, ONLINE_DEFAULTS, WITH_REFERENCE, is_offline, with_defaults
from rlpost.config.derive import needs_critic, resolve_old_logprobs, resolve_reference
from rlpost.config.schema import RunConfig

GROUP_ADVANTAGES = ("group_std", "group_mean", "maxrl", "leave_one_out", "greedy")
"""Advantages of whole samples; all but greedy compare a sample with the others of its group."""


def check_algorithm(config: RunConfig) -> Iterator[str]:
    """All problems of ``algorithm.*``."""
    if is_offline(config.algorithm):
        yield from _offline(config)
    else:
        if config.algorithm.name in OFFLINE:
            yield f"algorithm.kind=online with algorithm.name={config.algorithm.name}, which learns from data; set algorithm.kind=auto"
        for check in (_sampling, _advantage, _kl, _correction, _shaping, _filter, _critic):
            yield from check(config)
    yield from _reference(config)


def warn_algorithm(config: RunConfig) -> Iterator[str]:
    """What works, but is probably not meant."""
    algorithm = config.algorithm
    yield from _unread(config)
    if is_offline(algorithm):
        if config.rewards:
            yield f"rewards are not used: algorithm.name={algorithm.name} learns from the data set"
        return
    if config.training.lora.rank and resolve_reference(config) == "initial" and algorithm.reference_path is None:
        yield "algorithm.reference=initial keeps a second copy of the model; with LoRA, adapters_off gives the same without"
    if needs_critic(config) and not algorithm.shaping.whiten:
        yield "algorithm.name=ppo without algorithm.shaping.whiten=true: advantages keep the scale of the rewards"


PREFERENCE_READ: Mapping[str, frozenset[str]] = {
    "dpo": frozenset({"loss", "beta", "label_smoothing", "likelihood"}),
    "simpo": frozenset({"beta", "margin", "label_smoothing"}),
    "orpo": frozenset({"beta"}),
    "kto": frozenset({"beta", "desirable", "undesirable"}),
    "reward_model": frozenset({"margin", "centering"}),
}
"""What each offline algorithm reads of algorithm.preference."""


def _unread(config: RunConfig) -> Iterator[str]:
    """Settings that were changed and that this algorithm never looks at."""
    algorithm, offline = config.algorithm, is_offline(config.algorithm)
    if ":" in algorithm.name:
        return
    advantage = with_defaults(algorithm).advantage
    unread: list[tuple[str, Any, set[str]]] = [("preference.", algorithm.preference, set(_names(algorithm.preference)))]
    unread[0][2].difference_update(PREFERENCE_READ.get(algorithm.name, ()))
    if offline:
        online_only = {"advantage", "policy_loss", "clip_low", "clip_high", "dual_clip", "old_logprobs", "gamma", "gae_lambda"}
        unread.append(("", algorithm, online_only | {"kl_coefficient", "kl_in", "kl_estimator", "kl_target", "entropy_coefficient"}))
    elif advantage != "gae":
        unread.append(("critic.", algorithm.critic, set(_names(algorithm.critic)) - {"path"}))
        unread.append(("", algorithm, {"gae_lambda"} | (set() if advantage.startswith("batch") else {"gamma"})))
    for section in ("correction", "shaping", "filter") if offline else ():
        unread.append((f"{section}.", getattr(algorithm, section), set(_names(getattr(algorithm, section)))))
    for prefix, group, names in unread:
        defaults = type(group)()
        for name in sorted(names):
            if getattr(group, name) != getattr(defaults, name):
                yield f"algorithm.{prefix}{name} is not read by algorithm.name={algorithm.name}"


def _names(group: Any) -> list[str]:
    return [field.name for field in fields(group)]


def _offline(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.kind == "offline" and algorithm.name in ONLINE_DEFAULTS:
        yield f"algorithm.kind=offline with algorithm.name={algorithm.name}, which samples; set algorithm.kind=auto"
    for name in ("minibatches", "epochs"):
        if getattr(algorithm, name) != 1:
            yield (
                f"algorithm.{name}={getattr(algorithm, name)} is for online algorithms: offline, one step is one optimizer step over "
                "schedule.prompts_per_step rows; set it to 1"
            )
    smoothing = algorithm.preference.label_smoothing
    if algorithm.name == "dpo" and algorithm.preference.loss == "robust" and not 0 < smoothing < 0.5:
        yield (
            f"algorithm.preference.loss=robust needs the share of wrong labels: algorithm.preference.label_smoothing is {smoothing:g}, "
            "expected above 0 and below 0.5"
        )
    if algorithm.name == "dpo" and smoothing and algorithm.preference.loss in ("ipo", "hinge"):
        yield f"algorithm.preference.label_smoothing={smoothing:g} is not used by loss={algorithm.preference.loss}; set it to 0"
    rows = {"schedule.prompts_per_step": config.schedule.prompts_per_step}
    if config.evaluation.every:
        rows["evaluation.prompts"] = config.evaluation.prompts
    for key, count in rows.items():
        if algorithm.name == "kto" and count < 2:
            yield f"{key}={count} with algorithm.name=kto: its baseline pairs a prompt with another row's answer; set it to 2 or more"
    if algorithm.name == "kto" and algorithm.reference == "precomputed":
        yield (
            "algorithm.reference=precomputed with algorithm.name=kto: its baseline pairs prompts with others' answers, new ones in every "
            "batch; set algorithm.reference=initial, actor or adapters_off"
        )


def _sampling(config: RunConfig) -> Iterator[str]:
    algorithm, staleness = config.algorithm, config.schedule.max_staleness
    if config.sampling.temperature <= 0:
        yield (
            f"sampling.temperature is {config.sampling.temperature}: greedy samples of a group are all equal and their logprobs are not "
            "those of a distribution; set it above 0 (1.0 is usual). Greedy decoding belongs in evaluation.temperature"
        )
    updates = "minibatches" if algorithm.minibatches > 1 else "epochs"
    if algorithm.old_logprobs == "current" and (algorithm.minibatches * algorithm.epochs > 1 or staleness > 0):
        cause = f"schedule.max_staleness={staleness}" if staleness > 0 else f"algorithm.{updates}={getattr(algorithm, updates)}"
        yield (
            f"algorithm.old_logprobs=current with {cause}: the importance ratio would be 1 although the samples come from an older "
            "policy, so nothing corrects or clips; set algorithm.old_logprobs=auto, engine or recompute"
        )

    several = algorithm.minibatches * algorithm.epochs > 1
    if with_defaults(algorithm).policy_loss == "reinforce" and (several or (staleness > 0 and algorithm.correction.level == "none")):
        cause = f"algorithm.{updates}={getattr(algorithm, updates)}" if several else f"schedule.max_staleness={staleness}"
        yield (
            f"algorithm.policy_loss=reinforce with {cause}: nothing weights or clips samples of an older policy; set "
            "algorithm.policy_loss=policy_clip" + ("" if several else " or algorithm.correction.level=token") + ", or stay on-policy"
        )


def _advantage(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    advantage = with_defaults(algorithm).advantage
    if algorithm.group_size == 1 and ":" not in algorithm.name and advantage in (*GROUP_ADVANTAGES[:-1], "batch_baseline"):
        yield (
            f"algorithm.group_size is 1, but algorithm.advantage={advantage} compares a sample with the others of its group, "
            "so every advantage would be 0 and nothing would be learnt; set algorithm.group_size=2 or more (8 is usual)"
        )
    policy_loss = with_defaults(algorithm).policy_loss
    if algorithm.dual_clip and policy_loss != "policy_clip":
        yield f"algorithm.dual_clip={algorithm.dual_clip:g} is a bound of policy_clip, not of {policy_loss}; set it to 0"
    if 0 < algorithm.dual_clip <= 1:
        yield f"algorithm.dual_clip={algorithm.dual_clip:g} would cut the loss of every bad sample; expected 0 (off) or more than 1"
    if ":" not in algorithm.name and ":" not in policy_loss:
        known = LOSS_OPTIONS.get(policy_loss, ())
        for name in sorted(set(algorithm.options) - set(known)):
            expected = f"expected any of {', '.join(known)}" if known else "it takes none"
            yield f"algorithm.options.{name} is no option of algorithm.policy_loss={policy_loss}: {expected}; remove it"
    if advantage == "teacher" and algorithm.reference_path is None:
        yield "algorithm.advantage=teacher needs a teacher: set algorithm.reference_path to its model directory"


def _kl(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    estimator, place = algorithm.kl_estimator, algorithm.kl_in
    if estimator == "k1" and place == "loss":
        yield (
            "algorithm.kl_estimator=k1 with algorithm.kl_in=loss: its gradient does not depend on the reference; "
            "set algorithm.kl_estimator=k2, k3 or k3_unbiased, or algorithm.kl_in=reward"
        )
    if estimator == "k3_unbiased" and place == "reward":
        yield "algorithm.kl_estimator=k3_unbiased is weighted in the loss; with algorithm.kl_in=reward set k1, k2 or k3"
    if place == "reward" and with_defaults(algorithm).advantage == "teacher":
        yield "algorithm.kl_in=reward with algorithm.advantage=teacher: nothing reads that reward; set algorithm.kl_in=loss"
    advantage = with_defaults(algorithm).advantage
    if place == "reward" and algorithm.kl_coefficient > 0 and algorithm.filter.truncated == "drop" and advantage in GROUP_ADVANTAGES[:-1]:
        yield (
            "algorithm.kl_in=reward with algorithm.filter.truncated=drop: the KL of dropped samples is not computed, so they would be in "
            "their group's baseline without it; set algorithm.kl_in=loss or algorithm.filter.truncated=keep"
        )
    if algorithm.kl_coefficient == 0 and algorithm.kl_target is not None:
        yield f"algorithm.kl_target={algorithm.kl_target:g} steers algorithm.kl_coefficient, which is 0; give it a start above 0"


def _reference(config: RunConfig) -> Iterator[str]:
    algorithm, used = config.algorithm, resolve_reference(config)
    offline = is_offline(algorithm)
    needed = f"algorithm.name={' or '.join(WITH_REFERENCE)}" if offline else "algorithm.kl_coefficient above 0"
    if used == "none" and algorithm.reference in ("actor", "moving_average", "adapters_off", "precomputed"):
        yield (f"algorithm.reference={algorithm.reference}, but nobody would ask it: it is read with {needed}; remove it, or set that")
    if algorithm.reference_path is not None and used not in ("initial", "actor"):
        yield (
            f"algorithm.reference_path={algorithm.reference_path} would not be used: it is read with {needed} and algorithm.reference="
            f"initial or actor (found {algorithm.reference}); set both or remove it"
        )
    if used == "adapters_off" and not config.training.lora.rank:
        yield "algorithm.reference=adapters_off needs LoRA adapters, and training.lora.rank is 0; set algorithm.reference=initial"
    if used == "precomputed" and not offline:
        yield (
            "algorithm.reference=precomputed is for offline algorithms, whose rows are known before the first step "
            f"({', '.join(OFFLINE)}); set algorithm.reference=initial or actor"
        )


def _correction(config: RunConfig) -> Iterator[str]:
    one = config.algorithm.correction
    if one.level == "none":
        return
    if resolve_old_logprobs(config) == "engine":
        yield (
            f"algorithm.correction.level={one.level} with algorithm.old_logprobs=engine: the importance ratio is taken against the engine "
            "already, so the correction would be 1; set algorithm.old_logprobs=auto or recompute"
        )
    if one.action != "truncate" and one.low >= one.high:
        yield f"algorithm.correction.low={one.low:g} is not below high={one.high:g}; with action={one.action} weights between them are kept"
    if one.action == "truncate" and one.low:
        yield f"algorithm.correction.low={one.low:g} is not used by action=truncate; set action=clip or mask, or remove it"


def _shaping(config: RunConfig) -> Iterator[str]:
    shaping = config.algorithm.shaping
    if shaping.clip_low is not None and shaping.clip_high is not None and shaping.clip_low >= shaping.clip_high:
        yield f"algorithm.shaping.clip_low={shaping.clip_low:g} is not below clip_high={shaping.clip_high:g}: all rewards would be equal"
    advantage = with_defaults(config.algorithm).advantage
    if shaping.combine == "each" and advantage not in GROUP_ADVANTAGES[:-1]:
        yield (
            f"algorithm.shaping.combine=each compares each reward within its group, and algorithm.advantage={advantage} does not; "
            "set combine=sum"
        )
    shaped = [name for name in ("clip_low", "clip_high") if getattr(shaping, name) is not None]
    shaped += [name for name in ("overlong_buffer", "length_penalty") if getattr(shaping, name)]
    if shaping.combine == "each" and shaped:
        yield f"algorithm.shaping.{shaped[0]} changes the sum of the rewards, and combine=each compares each by itself; set combine=sum"
    if shaping.combine == "each" and config.algorithm.kl_in == "reward" and config.algorithm.kl_coefficient > 0:
        yield "algorithm.shaping.combine=each leaves no place for algorithm.kl_in=reward; set algorithm.kl_in=loss"
    if advantage == "maxrl" and (shaping.overlong_buffer or shaping.length_penalty or config.algorithm.kl_in == "reward"):
        yield (
            "algorithm.advantage=maxrl divides by the group's mean reward, which penalties (algorithm.shaping, kl_in=reward) can make "
            "negative; remove them, or take another advantage"
        )
    if shaping.overlong_buffer > config.sampling.max_new_tokens:
        yield (
            f"algorithm.shaping.overlong_buffer={shaping.overlong_buffer} is more than sampling.max_new_tokens="
            f"{config.sampling.max_new_tokens}: every sample would be punished; lower it"
        )


def _filter(config: RunConfig) -> Iterator[str]:
    one = config.algorithm.filter
    bounds = [name for name in ("least_mean", "most_mean") if getattr(one, name) is not None]
    if bounds and one.zero_variance == "keep":
        yield f"algorithm.filter.{bounds[0]} is not used with algorithm.filter.zero_variance=keep; set that to drop or resample"
    advantage = with_defaults(config.algorithm).advantage
    if one.zero_variance != "keep" and advantage == "teacher":
        yield (
            f"algorithm.filter.zero_variance={one.zero_variance} looks at rewards, and algorithm.advantage=teacher judges tokens without; "
            "set it to keep"
        )
    elif one.zero_variance != "keep" and config.algorithm.group_size == 1 and ":" not in config.algorithm.name:
        yield (
            f"algorithm.filter.zero_variance={one.zero_variance} with algorithm.group_size=1: one reward has no variance, so every group "
            "would be refused; set algorithm.group_size=2 or more, or zero_variance=keep"
        )
    if len(bounds) == 2 and one.least_mean >= one.most_mean:  # type: ignore[operator]
        yield f"algorithm.filter.least_mean={one.least_mean} is not below most_mean={one.most_mean}: every group would be refused"


def _critic(config: RunConfig) -> Iterator[str]:
    algorithm, critic = config.algorithm, config.algorithm.critic
    if critic.path is not None and not needs_critic(config):
        yield f"algorithm.critic.path={critic.path} would not be used: algorithm.advantage is not gae; set algorithm.name=ppo, or remove it"
    if needs_critic(config) and critic.warmup_steps >= config.schedule.steps:
        yield (
            f"algorithm.critic.warmup_steps={critic.warmup_steps} leaves no step of schedule.steps={config.schedule.steps} for the policy; "
            "lower it"
        )
    if needs_critic(config) and config.placement.mode == "colocated":
        yield f"algorithm.name={algorithm.name} with placement.mode=colocated: the critic has GPUs of its own; set placement.mode=split"
