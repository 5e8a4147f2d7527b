"""LoRA adapters in a real engine: it never samples from the bare model, computes with the newest adapter, and proves that it does.

The engine's worker has hands of the test (``TamperedWorker``) that damage what vLLM keeps of an adapter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_process import EngineProcess, engine_settings, make_request, random_prompts
from weight_sender import BUCKET_BYTES, CPU, HOST, TIMEOUT_S, TOLERANCE, PlainModel, Sender, live_bits
from weight_versions import Versions, requests_of

from rlpost.config.schema import LoraConfig
from rlpost.training.lora import add_adapters
from rlpost.types import GenerateRequest, GenerateResult, InfrastructureError, SyncAcknowledgement, SyncPlan, SyncRefusedError
from rlpost.weights.receiver import WorkerExtension
from rlpost.weights.sender import WeightSender
from rlpost.weights.shards import ShardedWeights

CARRIERS = ["collective", "ipc", "disk"]
ALL = LoraConfig(rank=8, alpha=16.0)
NO_VERSION = -1
"""What a driver takes an engine to hold between the two parts of a sync of weights and adapter."""

QKV = "model.layers.1.self_attn.qkv_proj"


# ---- the engine's worker, with hands -----------------------------------------------------------------------------------


class TamperedWorker(WorkerExtension):
    """Answers some methods itself, the others as an engine's worker does."""

    def weights(self, method: str, arguments: bytes) -> bytes:
        """See WorkerExtension."""
        import pickle

        if hasattr(self, f"do_{method}"):
            return pickle.dumps(getattr(self, f"do_{method}")(*pickle.loads(arguments)))
        return super().weights(method, arguments)

    @property
    def _manager(self) -> Any:
        worker: Any = self
        return worker.model_runner.lora_manager._adapter_manager

    def do_buffers(self, module: str, letter: str) -> list[np.ndarray]:
        """What a layer computes with: each part's whole buffer."""
        layer = self._manager.modules[module]
        return [part[0, 0].float().numpy().copy() for part in getattr(layer, f"lora_{letter}_stacked")]

    def do_corrupt(self, module: str, letter: str) -> None:
        """Change the first element of a layer's last part."""
        getattr(self._manager.modules[module], f"lora_{letter}_stacked")[-1][0, 0, 0, 0] += 1.0

    def do_corrupt_next(self, module: str, letter: str) -> None:
        """Let the next adapter that is put in place be damaged there."""
        manager, activate = self._manager, self._manager.activate_adapter

        def damaged(adapter: int) -> bool:
            manager.activate_adapter = activate
            answer: bool = activate(adapter)
            self.do_corrupt(module, letter)
            return answer

        manager.activate_adapter = damaged

    def do_forget_next(self) -> None:
        """Let the next adapter be taken and not reach the layers."""
        manager, activate = self._manager, self._manager.activate_adapter

        def forgetful(adapter: int) -> bool:
            manager.activate_adapter = activate
            manager.lora_index_to_id[0] = adapter
            manager._active_adapters[adapter] = None
            return True

        manager.activate_adapter = forgetful


# ---- the sending end ---------------------------------------------------------------------------------------------------


class AdapterSender(Sender):
    """A trainer of one rank that trains adapters of ``lora`` on a plain model."""

    def __init__(
        self, engine: EngineProcess, plain: PlainModel, lora: LoraConfig = ALL, *, version: int = 0, directory: Path | None = None
    ):
        super().__init__(engine, plain.weights, version=version, directory=directory)
        self.plain, self.lora = plain, lora
        self.model = copy.deepcopy(plain.model)
        add_adapters(self.model, lora)
        self.weights = ShardedWeights(self.model, engine.settings.dtype, BUCKET_BYTES)
        self.sender = WeightSender(self.weights, CPU, host=HOST, keep_baseline=False)

    @torch.no_grad()
    def train(self, seed: int) -> PlainModel:
        """Give the adapters new values. Returns the plain model that they are merged into: W + s B A."""
        generator = torch.Generator().manual_seed(seed)
        merged = copy.deepcopy(self.plain.model)
        for adapter in self.weights.adapters:
            adapter.first.copy_(torch.randn(adapter.first.shape, generator=generator) * 0.1)
            adapter.second.copy_(torch.randn(adapter.second.shape, generator=generator) * 0.1)
            weight = merged.get_submodule(adapter.layer).weight
            weight += self.lora.alpha / self.lora.rank * (adapter.second @ adapter.first)
        return PlainModel(merged, self.plain.dtype)

    def encode_adapter(self, version: int, base: int | None = None) -> SyncPlan:
        """Encode the adapters; the plan that brings them."""
        self.report = self.sender.encode_adapter(True)
        plan = replace(self.plan(version, "adapter"), message_bytes=self.report.bytes)
        return plan if base is None else replace(plan, base_version=base)

    def bring(self, plan: SyncPlan) -> SyncAcknowledgement:
        """Stage an encoded adapter and apply it; raises what the engine raised. The engine stays paused."""
        if plan.link not in self.sender._outlets:
            self.join("collective")
        if self.carrier == "disk":
            self.sender.send_message(plan)
            self.engine.call("stage_weights", plan)
        else:
            self.stage(plan)
        acknowledgement: SyncAcknowledgement = self.engine.call("apply_weights", plan)
        return acknowledgement

    def sync_adapter(self, version: int) -> None:
        """A whole sync of adapters that succeeds."""
        self.check(self.bring(self.encode_adapter(version)), version)
        self.commit(version)

    def sync_everything(self, version: int) -> None:
        """The weights under the adapter, then the adapter, in one pause: a run's first sync, and what heals an engine."""
        if not self.carrier:
            self.join("collective")
        self.apply(self.plan(version, "full", verify=False))
        self.check(self.bring(self.encode_adapter(version, NO_VERSION)), version)
        self.commit(version)


class History(Versions):
    """The history of one engine with adapters."""

    sender: AdapterSender

    def train(self) -> int:
        """Note a next version with other adapters."""
        self.sender.version = self.current
        return self.prepare(self.sender.train(self.current + 1))

    def step(self) -> int:
        """Train and sync; the version."""
        version = self.train()
        self.sender.sync_adapter(version)
        return version

    @contextmanager
    def another(self, sender: AdapterSender) -> Iterator[None]:
        """A sender that takes over for a while."""
        usual, self.sender = self.sender, sender
        try:
            yield
        finally:
            sender.close()
            self.sender = usual
            usual.close()
            self.engine.call("describe_weights", usual.sender.manifest)
            self.check_serves(self.heal())

    def heal(self) -> int:
        """A full sync of a next version, whatever the engine holds."""
        version = self.train()
        self.sender.sync_everything(version)
        return version


def lora_settings(**options: Any) -> Any:
    settings = replace(engine_settings(**options), lora_rank=8)
    return replace(settings, extra={"worker_extension_cls": f"{__name__}.TamperedWorker"})


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    """A started engine that expects adapters of rank 8 at most."""
    process = EngineProcess(lora_settings())
    yield process
    process.stop()


@pytest.fixture(scope="module")
def history(engine: EngineProcess, plain: PlainModel, tmp_path_factory: pytest.TempPathFactory) -> History:
    return History(engine, AdapterSender(engine, plain, directory=tmp_path_factory.mktemp("weights")), plain)


# ---- what it samples from ----------------------------------------------------------------------------------------------


def test_before_an_adapter_came_every_request_is_refused(history: History) -> None:
    """Also after the weights under it came: a run whose rollouts silently use the bare model must be impossible."""
    requests = requests_of(3)
    for outcome in history.engine.outcomes(requests):
        assert isinstance(outcome, InfrastructureError) and "has no adapter yet" in str(outcome)
    history.sender.join("collective")
    history.sender.apply(history.sender.plan(0, "full"))
    history.sender.commit(0)
    [outcome] = history.engine.outcomes(requests_of(1))
    assert isinstance(outcome, InfrastructureError) and "has no adapter yet" in str(outcome)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_after_each_of_several_syncs_the_engine_equals_the_merged_model_and_not_the_base(history: History, carrier: str) -> None:
    history.sender.join(carrier)
    for _ in range(3):
        before = history.models[history.current]
        version = history.step()
        requests = requests_of(6, seed=version)
        for request, result in zip(requests, history.engine.generate(requests), strict=True):
            assert set(result.versions.tolist()) == {version}
            history.check(request, result)
            for other in (before, history.plain):
                assert np.abs(other.logprobs(request, result) - result.logprobs).max() > 100 * TOLERANCE


def test_a_new_adapter_leaves_no_kv_of_the_old_one(history: History) -> None:
    """A prefix cache that survives under the same adapter name is silent: logprobs are tenths off."""
    history.step()
    prompt = random_prompts(1, 100, seed=11)[0]

    def ask() -> tuple[GenerateRequest, GenerateResult]:
        request = make_request(prompt, seed=1)
        return request, history.engine.generate([request])[0]

    ask()
    assert ask()[1].cached_tokens == 96
    history.step()
    request, result = ask()
    assert result.cached_tokens == 0
    history.check(request, result)
    request, result = ask()
    assert result.cached_tokens == 96
    history.check(request, result)


@pytest.mark.parametrize("pause", ["keep", "abort"])
def test_running_requests_go_on_with_the_new_adapter_and_each_token_is_of_its_version(history: History, pause: str) -> None:
    old = history.step()
    history.engine.call("set_pause", pause)
    long = requests_of(16, seed=12, max_new_tokens=150, temperature=2.0)
    history.engine.call("begin", long, 5)
    new = history.train()
    plan = history.sender.encode_adapter(new)
    history.sender.stage(plan)
    applying = history.engine.begin("apply_weights", plan)
    if pause == "abort":
        history.engine.call("free")  # what is aborted ends with a step of the core
    history.sender.check(applying.result(TIMEOUT_S), new)
    history.engine.call("free")
    history.sender.commit(new)
    results = history.check_all(long, {old, new})
    both = [result for result in results if len(set(result.versions.tolist())) == 2]
    assert len(both) > 8 and all((np.diff(result.versions) >= 0).all() for result in results)
    history.engine.call("set_pause", "keep")


@pytest.mark.parametrize(
    "targets",
    [r"q_proj$", r"(v|up)_proj$", r"layers\.1\..*(k|gate)_proj$", r"down_proj$"],
    ids=["first-part-of-a-fused-layer", "last-parts", "middle-part-in-one-layer", "not-fused"],
)
def test_adapters_on_some_parts_of_fused_layers_leave_the_other_parts_alone(history: History, targets: str) -> None:
    """vLLM fuses query, key, value and gate, up; what was there of the adapter before must be gone."""
    history.step()
    with history.another(AdapterSender(history.engine, history.plain, LoraConfig(rank=5, alpha=15.0, targets=targets))):
        history.check_serves(history.step())


def test_layers_without_an_adapter_hold_zeros_and_the_others_the_bits_that_were_sent(history: History) -> None:
    history.step()
    with history.another(AdapterSender(history.engine, history.plain, LoraConfig(rank=5, alpha=15.0, targets=r"layers\.1\..*q_proj$"))):
        history.step()
        [adapter] = history.sender.weights.adapters
        for letter, sent in (("a", adapter.first), ("b", 3.0 * adapter.second)):
            [[query, key, value]] = history.engine.call("_workers", "buffers", QKV, letter)
            expected = np.zeros_like(query)
            expected[: sent.shape[0], : sent.shape[1]] = sent.detach().numpy()
            np.testing.assert_array_equal(query, expected)
            assert not key.any() and not value.any()
            [other] = history.engine.call("_workers", "buffers", QKV.replace("1", "0"), letter)
            assert not any(part.any() for part in other)


# ---- the proof ---------------------------------------------------------------------------------------------------------


def test_a_damaged_adapter_shows_in_what_is_sampled_and_the_next_one_replaces_it(history: History) -> None:
    version = history.step()
    history.engine.call("_workers", "corrupt", QKV, "b")
    [request] = requests_of(1, seed=3)
    [result] = history.engine.generate([request])
    assert np.abs(history.models[version].logprobs(request, result) - result.logprobs).max() > 100 * TOLERANCE
    history.check_serves(history.step())


@pytest.mark.parametrize("letter", ["a", "b"])
def test_an_adapter_that_is_damaged_while_it_is_put_in_place_is_refused_by_name(history: History, letter: str) -> None:
    history.heal()
    history.engine.call("_workers", "corrupt_next", QKV, letter)
    version = history.train()
    with pytest.raises(SyncRefusedError, match=rf"1 of 28 tensors .*layers\.1\.self_attn\.v_proj\.lora_{letter.upper()}") as caught:
        history.sender.bring(history.sender.encode_adapter(version))
    assert caught.value.reason == "adapter"
    history.check_serves(history.heal())


def test_an_adapter_that_does_not_reach_the_layers_is_refused(history: History) -> None:
    """vLLM says that it took it, and would go on with the one before."""
    history.heal()
    history.engine.call("_workers", "forget_next")
    version = history.train()
    with pytest.raises(SyncRefusedError, match=r"28 of 28 tensors of the adapter are not in the engine's layers"):
        history.sender.bring(history.sender.encode_adapter(version))
    history.check_serves(history.heal())


def test_after_a_refused_adapter_nothing_is_sampled_until_the_engine_is_healed(history: History) -> None:
    history.heal()
    history.engine.call("_workers", "corrupt_next", QKV, "b")
    with pytest.raises(SyncRefusedError):
        history.sender.bring(history.sender.encode_adapter(history.train()))
    history.engine.call("resume")
    [outcome] = history.engine.outcomes(requests_of(1))
    assert isinstance(outcome, InfrastructureError) and "of no policy version" in str(outcome)
    with pytest.raises(SyncRefusedError, match="has weights of no version") as caught:
        history.sender.bring(history.sender.encode_adapter(history.train()))
    assert caught.value.reason == "wrong_base"
    history.check_serves(history.heal())


def test_a_flipped_bit_in_the_weights_under_an_adapter_is_found_by_its_proof_and_named(history: History) -> None:
    """They never travel again, so nothing else would ever find it."""
    history.heal()
    history.engine.call("flip", f"{QKV}.base_layer.weight", 37)
    version = history.train()
    acknowledgement = history.sender.bring(history.sender.encode_adapter(version))
    assert acknowledgement.fingerprints != history.sender.fingerprints
    [held] = history.engine.call("tensor_sums")
    right = history.sender.sender.tensor_sums(0)
    assert [name for name in right if held[name] != right[name]] == ["model.layers.1.self_attn.q_proj.weight"]
    history.check_serves(history.heal())


def test_weights_under_an_adapter_are_renewed_in_place_and_proven_live(history: History) -> None:
    """vLLM hides the layers inside wrappers; its own way of loading weights would drop the adapter."""
    history.heal()
    moved = history.plain.variant(55)
    with history.another(AdapterSender(history.engine, moved)):
        [worker] = history.sender.describe()
        assert (worker["proof"], worker["why"]) == ("live", "")
        history.check_serves(history.heal())
        held = {name.replace(".base_layer.", "."): bits for name, bits in history.engine.call("live").items()}
        expected = live_bits(moved.weights, "float32")
        assert set(held) == set(expected)
        assert all(np.array_equal(held[name], expected[name]) for name in expected)


# ---- adapters that do not fit ------------------------------------------------------------------------------------------


def test_an_adapter_of_a_rank_above_the_engines_is_refused_with_both_ranks(history: History) -> None:
    history.heal()
    with history.another(AdapterSender(history.engine, history.plain, LoraConfig(rank=16))):
        with pytest.raises(SyncRefusedError, match=r"(?i)rank 16 .*max_lora_rank 8"):
            history.sender.bring(history.sender.encode_adapter(history.train()))


@pytest.mark.parametrize(
    "layer", ["model.layers.9.self_attn.q_proj", "model.layers.0.self_attn.query", "layers.0.self_attn.q_proj"],
    ids=["a-layer-that-is-not-there", "a-name-that-no-layer-has", "another-prefix"],
)  # fmt: skip
def test_an_adapter_of_a_layer_that_the_engine_does_not_have_is_refused_by_name(history: History, layer: str) -> None:
    """Silently left out, rollouts would lack a part of the policy."""
    history.heal()
    adapter = history.sender.weights.adapters[0]
    right, adapter.layer = adapter.layer, layer
    try:
        plan = history.sender.encode_adapter(history.current + 1)
        with pytest.raises(SyncRefusedError, match=layer.rsplit(".", 1)[-1] if "query" in layer else rf"2 of 28 .*{layer}"):
            history.sender.bring(plan)
    finally:
        adapter.layer = right
    history.check_serves(history.heal())


# ---- other engines -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"in_actor": False, "tensor_parallel": 2}, {"in_actor": False}],
    ids=["bfloat16", "two-workers", "core-in-its-own-process"],
)  # fmt: skip
def test_adapters_in_other_kinds_of_engine(options: dict[str, Any]) -> None:
    plain = PlainModel.load("tiny-sort5", options.get("dtype", "float32"))
    engine = EngineProcess(lora_settings(**options))
    try:
        history = History(engine, AdapterSender(engine, plain), plain)
        history.check_serves(history.heal())
        for _ in range(2):
            before = history.models[history.current]
            version = history.step()
            for result in history.check_serves(version):
                assert len(result.tokens)
            [request] = requests_of(1, seed=5)
            [result] = engine.generate([request])
            for other in (before, plain):
                assert np.abs(other.logprobs(request, result) - result.logprobs).max() > 3 * history.tolerance
    finally:
        engine.stop()
