"""What a job must hold: whole bundles on equal nodes, as few as can be, and refusals before anything is submitted."""

from __future__ import annotations

from collections import Counter
from itertools import count, product
from typing import Any

import pytest

from rlpost.config.derive import placement_bundles
from rlpost.config.load import load_config
from rlpost.config.schema import RewardConfig, RunConfig
from rlpost.jobs.needs import CPUS_OF_A_GPU, HEAD_CPUS, JobNeeds, job_needs, overrides_in_job
from rlpost.types import ConfigError


def multinode(*overrides: str) -> RunConfig:
    return load_config(["config=grpo_qwen_multinode", *overrides]).config


def shapes(needs: JobNeeds) -> list[tuple[str, int, int]]:
    return [(group.role, group.nodes, group.gpus) for group in needs.groups]


@pytest.mark.parametrize(
    ("overrides", "separate", "expected"),
    [
        ([], False, [("shared", 4, 8)]),
        ([], True, [("trainer", 2, 8), ("rollout", 2, 8)]),
        (["training.ranks=64", "engine.count=32"], False, [("shared", 16, 8)]),
        (["training.ranks=64", "engine.count=32"], True, [("trainer", 8, 8), ("rollout", 8, 8)]),
    ],
)
def test_the_multinode_config_fills_4_and_16_nodes(overrides: list[str], separate: bool, expected: list[tuple[str, int, int]]) -> None:
    needs = job_needs(multinode(*overrides), gpus_per_node=8, separate_roles=separate)
    assert shapes(needs) == expected
    assert needs.device == "gpu" and {group.node_gpus for group in needs.groups} == {8}


def test_every_bundle_of_the_run_is_held_once() -> None:
    """A job without one of them would wait for ever in the driver's placement."""
    config = multinode("algorithm.kl_coefficient=0.1", "algorithm.reference=actor")
    for separate in (False, True):
        held = [bundle for group in job_needs(config, gpus_per_node=8, separate_roles=separate).groups for bundle in group.bundles]
        asked = placement_bundles(config, "gpu")
        assert Counter((b.role, b.index) for b in held) == Counter((b.role, b.index) for b in asked)


def test_an_engine_is_never_split_and_no_node_is_asked_for_in_vain() -> None:
    """Engines of k GPUs and ranks of one fit on n nodes of g exactly when n * (g // k) engines and n * g GPUs do."""
    config = multinode()
    for ranks, engines, parallel, size in product((1, 3, 8, 13), (1, 3, 4), (1, 2, 3, 5), (5, 8)):
        config.training.ranks, config.engine.count, config.engine.tensor_parallel = ranks, engines, parallel

        def holds(nodes: int, gpus: int, case: tuple[int, int, int] = (ranks, engines, parallel)) -> bool:
            return nodes * (gpus // case[2]) >= case[1] and nodes * gpus >= case[0] + case[1] * case[2]

        fewest = next(nodes for nodes in count(1) if holds(nodes, size))
        smallest = next(gpus for gpus in range(1, size + 1) if holds(fewest, gpus))
        assert shapes(job_needs(config, gpus_per_node=size)) == [("shared", fewest, smallest)], (ranks, engines, parallel, size)


def test_colocated_engines_and_ranks_share_their_gpus_and_cannot_be_separated() -> None:
    config = multinode("placement.mode=colocated", "training.ranks=16")
    assert shapes(job_needs(config, gpus_per_node=8)) == [("shared", 2, 8)]
    with pytest.raises(ConfigError, match=r"separate_roles=true.*placement\.mode=split"):
        job_needs(config, gpus_per_node=8, separate_roles=True)


def test_nodes_of_rollout_engines_may_be_larger_than_those_of_trainers() -> None:
    config = multinode("engine.tensor_parallel=8", "engine.count=2", "training.ranks=16")
    needs = job_needs(config, gpus_per_node=4, rollout_gpus_per_node=8, separate_roles=True)
    assert shapes(needs) == [("trainer", 4, 4), ("rollout", 2, 8)]
    with pytest.raises(ConfigError, match=r"engine bundle needs 8 GPUs on one node, but rollout_gpus_per_node=4"):
        job_needs(config, gpus_per_node=8, rollout_gpus_per_node=4, separate_roles=True)


def test_cpus_that_do_not_suffice_for_one_kind_of_nodes_are_said_to_be_of_both() -> None:
    config = multinode("engine.count=2")
    with pytest.raises(
        ConfigError, match=r"need 32 CPUs a node, but cpus_per_node=16 \(trainer nodes; cpus_per_node is asked of all nodes"
    ):
        job_needs(config, gpus_per_node=8, cpus_per_node=16, separate_roles=True)


def test_given_nodes_are_asked_only_for_their_part_of_the_run() -> None:
    few = multinode("training.ranks=4", "engine.count=2")  # 8 GPUs
    assert [(g.nodes, g.gpus, g.cpus) for g in job_needs(few, gpus_per_node=8, nodes=2).groups] == [(2, 4, 16)]
    cpu = multinode("placement.device=cpu")  # 24 bundles of 4 CPUs
    assert [(g.nodes, g.cpus, g.bundle_cpus) for g in job_needs(cpu, gpus_per_node=0, nodes=3).groups] == [(3, 32, 32)]
    with pytest.raises(ConfigError, match=r"nodes=3 with 0 GPUs and 16 CPUs each do not hold the run.*set nodes=6"):
        job_needs(cpu, gpus_per_node=0, cpus_per_node=16, nodes=3)


def test_whoever_computes_gradients_or_scores_stands_with_the_trainers() -> None:
    config = multinode("algorithm.kl_coefficient=0.1", "algorithm.reference=actor", "algorithm.name=ppo", "algorithm.critic.ranks=4")
    config.rewards.append(RewardConfig(model="reward-model"))
    trainer, rollout = job_needs(config, gpus_per_node=8, separate_roles=True).groups
    assert Counter(bundle.role for bundle in trainer.bundles) == {"trainer": 16, "critic": 4, "reference": 1, "reward": 1}
    assert Counter(bundle.role for bundle in rollout.bundles) == {"engine": 8}
    assert (trainer.nodes, trainer.gpus) == (3, 8)


def test_an_offline_run_has_no_rollout_nodes() -> None:
    config = load_config(["config=dpo_tiny", "placement.device=gpu", "training.ranks=4"]).config
    for separate in (False, True):
        assert shapes(job_needs(config, gpus_per_node=8, separate_roles=separate)) == [("trainer", 1, 4)]


def test_gpus_are_meant_even_where_this_machine_has_none() -> None:
    """The one that submits is a laptop; auto there is CPU."""
    config = multinode("placement.device=auto")
    assert job_needs(config, gpus_per_node=8).device == "gpu"
    config.engine.tensor_parallel = 1
    assert job_needs(config, gpus_per_node=0).device == "cpu"
    config.placement.device = "cpu"
    cpu = job_needs(config, gpus_per_node=8, cpus_per_node=16)
    assert cpu.device == "cpu" and all(group.gpus == group.node_gpus == 0 for group in cpu.groups)


def test_cpus_are_those_of_the_bundles_but_some_for_each_gpu() -> None:
    few = multinode("placement.trainer_cpus=0.5", "placement.engine_cpus=0.5")
    assert job_needs(few, gpus_per_node=8).groups[0].cpus == 8 * CPUS_OF_A_GPU
    many = multinode("placement.trainer_cpus=6", "placement.engine_cpus=6")
    trainer, rollout = job_needs(many, gpus_per_node=8, separate_roles=True).groups
    assert (trainer.cpus, rollout.cpus) == (48, 8 * CPUS_OF_A_GPU)
    assert job_needs(few, gpus_per_node=8, cpus_per_node=100, memory_gib_per_node=900).groups[0].cpus == 100


def test_a_cpu_run_takes_as_many_nodes_as_its_cpus_need() -> None:
    config = multinode("placement.device=cpu")  # 24 bundles of 4 CPUs
    assert [(g.nodes, g.cpus, g.gpus) for g in job_needs(config, gpus_per_node=0, cpus_per_node=10).groups] == [(12, 10, 0)]
    assert [(g.nodes, g.cpus) for g in job_needs(config, gpus_per_node=0).groups] == [(1, 96)]


def test_the_head_has_a_cpu_for_each_reward_worker() -> None:
    config = multinode("reward_runner.workers=7")
    assert job_needs(config, gpus_per_node=8).head_cpus == HEAD_CPUS + 7
    config.rewards = []
    assert job_needs(config, gpus_per_node=8).head_cpus == HEAD_CPUS


@pytest.mark.parametrize(
    ("overrides", "size", "message"),
    [
        ([], {"gpus_per_node": 0}, r"placement\.device is gpu, but gpus_per_node=0; give the GPUs"),
        (
            ["engine.tensor_parallel=16"],
            {"gpus_per_node": 8},
            r"engine bundle needs 16 GPUs.*gpus_per_node=8; set engine\.tensor_parallel=8",
        ),
        ([], {"gpus_per_node": 8, "cpus_per_node": 3}, r"trainer bundle needs 4 CPUs.*cpus_per_node=3.*raise cpus_per_node to 4"),
        ([], {"gpus_per_node": 8, "cpus_per_node": 20}, r"24 bundles fill 4 node\(s\) of 8 GPUs.*need 32 CPUs a node.*cpus_per_node=20"),
        ([], {"gpus_per_node": -1}, "gpus_per_node=-1"),
        ([], {"gpus_per_node": 8, "cpus_per_node": 0}, "cpus_per_node=0"),
    ],
)
def test_what_no_node_can_hold_is_refused_with_the_fix(overrides: list[str], size: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job_needs(multinode(*overrides), **size)


def test_in_a_job_the_run_joins_its_ray_and_a_retry_resumes() -> None:
    config = multinode()
    assert overrides_in_job(config, "gpu") == ("placement.ray_address=auto", "placement.device=gpu", "resume=auto")
    config.resume = "runs/other"
    assert "resume=auto" not in overrides_in_job(config, "gpu")
