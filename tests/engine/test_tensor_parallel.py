"""An engine of two tensor-parallel workers in processes of their own: each holds a part of the weights, and proves that part."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from engine_process import EngineProcess, engine_settings, make_request, random_prompts
from weight_sender import TOLERANCE, PlainModel, Sender
from weight_versions import Versions

from rlpost.types import GenerateResult, SyncRefusedError
from rlpost.weights.layout import whole

pytestmark = pytest.mark.slow

SPLIT = {
    "model.embed_tokens.weight": 0,
    "model.layers.0.self_attn.q_proj.weight": 0,
    "model.layers.0.self_attn.o_proj.weight": 1,
    "model.layers.1.mlp.gate_proj.weight": 0,
    "model.layers.1.mlp.up_proj.weight": 0,
    "model.layers.1.mlp.down_proj.weight": 1,
}
"""The dimension in which two workers halve a tensor; norms, and keys and values of the model's only such head, are on both."""


@pytest.fixture(scope="module")
def versions(plain: PlainModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Versions]:
    """The module's engine has two workers."""
    engine = EngineProcess(engine_settings(in_actor=False, tensor_parallel=2))
    yield Versions(engine, Sender(engine, plain.weights, directory=tmp_path_factory.mktemp("weights")), plain)
    engine.stop()


def test_each_worker_holds_its_half_of_what_is_split_and_all_of_the_rest(versions: Versions) -> None:
    workers = versions.sender.describe()
    manifest = versions.sender.sender.manifest
    assert [worker["proof"] for worker in workers] == ["live", "live"]
    for name, shape, first, second in zip(manifest.names, manifest.shapes, *(worker["layout"] for worker in workers), strict=True):
        if name in SPLIT:
            dimension, size = SPLIT[name], shape[SPLIT[name]]
            halves = [list(whole(shape)), list(whole(shape))]
            halves[0][dimension], halves[1][dimension] = (0, size // 2), (size // 2, size)
            assert [list(first), list(second)] == halves, name
        elif "norm" in name or "k_proj" in name or "v_proj" in name:
            assert first is None and second is None, name


def test_it_samples_what_a_plain_model_and_one_worker_would(versions: Versions) -> None:
    versions.check_serves(versions.current)


@pytest.mark.parametrize("carrier", ["collective", "ipc", "disk"])
def test_full_syncs_and_deltas_reach_both_workers_and_each_proves_its_part(versions: Versions, carrier: str) -> None:
    """Fingerprints are compared worker by worker, and both workers together must give a plain model's logprobs."""
    versions.sender.join(carrier)
    version = versions.sync()
    assert len(set(versions.sender.fingerprints)) == 2, "they hold different parts"
    versions.check_serves(version)
    for _ in range(2):
        version = versions.prepare_sparse()
        versions.sender.sync(versions.models[version], version, "delta")
        versions.check_serves(version)
    versions.check_serves(versions.sync(mode="trained"))


def test_a_change_that_only_one_worker_holds_changes_only_its_fingerprint(versions: Versions) -> None:
    """Rows 0 to 63 of the embedding are the first worker's."""
    if not versions.sender.carrier:
        versions.sync()
    before = versions.sender.fingerprints
    for row, keeps in ((3, 1), (100, 0)):
        model = versions.models[versions.current].copy()
        model.model.get_parameter("model.embed_tokens.weight").data[row] *= 1.5
        version = versions.sync(model, "delta")
        after = versions.sender.fingerprints
        assert after[keeps] == before[keeps] and after[1 - keeps] != before[1 - keeps]
        before = after
        versions.check_serves(version)


def test_a_damaged_delta_is_refused_by_both_and_the_engine_serves_on(versions: Versions) -> None:
    if versions.current == 0:
        versions.sync()
    versions.sender.join("collective")
    held, version = versions.current, versions.prepare_sparse()
    plan = versions.encode(version)
    message = versions.sender.sender._message
    assert message is not None
    message[-7] ^= 1
    with pytest.raises(SyncRefusedError, match="damaged") as caught:
        versions.sender.stage(plan)
    assert caught.value.reason == "corrupt"
    versions.check_serves(held)
    message[-7] ^= 1
    versions.sender.stage(plan)
    versions.sender.check(versions.sender.apply(plan), version)
    versions.sender.commit(version)
    versions.check_serves(version)


def test_its_greedy_output_after_syncs_is_that_of_one_worker(versions: Versions, plain: PlainModel) -> None:
    """The same weights in an engine of one worker give the same tokens."""
    version = versions.sync()
    prompts = random_prompts(8, seed=40)

    def ask(engine: EngineProcess) -> list[GenerateResult]:
        return engine.generate([make_request(prompt, temperature=0.0) for prompt in prompts])

    single = EngineProcess(engine_settings())
    try:
        Sender(single, plain.weights).sync(versions.models[version], 1)
        for one, other in zip(ask(versions.engine), ask(single), strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=TOLERANCE)
    finally:
        single.stop()
