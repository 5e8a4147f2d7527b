"""The history of one engine's weights: a plain model for each version, against which every sampled token is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from engine_process import EngineProcess, make_request, random_prompts, succeeded
from weight_sender import TOLERANCES, PlainModel, Sender, live_bits

from rlpost.types import GenerateRequest, GenerateResult, SyncMode, SyncPlan


class Versions:
    """One engine, its sender, its next version, and the model of each version that it ever had."""

    def __init__(self, engine: EngineProcess, sender: Sender, plain: PlainModel) -> None:
        self.engine, self.sender, self.plain = engine, sender, plain
        self.models: dict[int, PlainModel] = {0: plain}
        self.tolerance = TOLERANCES[engine.settings.dtype]

    @property
    def current(self) -> int:
        """The newest version that was prepared; the engine's, once it was synced."""
        return max(self.models)

    def prepare(self, model: PlainModel | None = None) -> int:
        """Note the next version's weights: a new variant of the start, unless given."""
        version = self.current + 1
        self.models[version] = model or self.plain.variant(version)
        return version

    def prepare_sparse(self) -> int:
        """Note a next version in which a fiftieth of the elements moved, by so much that it shows."""
        return self.prepare(self.models[self.current].sparse_variant(self.current + 1, self.plain))

    def sync(self, model: PlainModel | None = None, mode: SyncMode = "full") -> int:
        """A sync that succeeds, to ``model`` or to a new variant; its version."""
        version = self.prepare(model)
        self.sender.sync(self.models[version], version, mode)
        return version

    def encode(self, version: int) -> SyncPlan:
        """The delta from what the engine has to a prepared version."""
        self.sender.load(self.models[version])
        return self.sender.encode(version)

    def check(self, request: GenerateRequest, result: GenerateResult) -> None:
        """Every token has the logprob that the model of its stamped version gives to the whole sequence before it."""
        for version in np.unique(result.versions):
            mine = result.versions == version
            expected = self.models[int(version)].logprobs(request, result)
            np.testing.assert_allclose(result.logprobs[mine], expected[mine], atol=self.tolerance, err_msg=f"tokens of version {version}")

    def check_all(self, requests: Sequence[GenerateRequest], allowed: set[int]) -> list[GenerateResult]:
        """Wait for requests that were submitted: each has one result, right in every token and of these versions only."""
        results = [succeeded(outcome) for outcome in self.engine.finish(requests)]
        for request, result in zip(requests, results, strict=True):
            assert len(result.tokens) and set(result.versions.tolist()) <= allowed
            self.check(request, result)
        return results

    def check_serves(self, version: int, seed: int = 0) -> list[GenerateResult]:
        """New requests are answered with the weights of ``version``."""
        requests = requests_of(4, seed=seed or version)
        self.engine.call("submit", requests)
        return self.check_all(requests, {version})

    def check_bits(self, version: int) -> None:
        """The engine's live parameters are those of ``version``, bit for bit."""
        check_bits(self.engine, self.models[version].weights)


def check_bits(engine: EngineProcess, weights: Mapping[str, torch.Tensor]) -> None:
    """The engine's live parameters are these, bit for bit."""
    held, expected = engine.call("live"), live_bits(weights, engine.settings.dtype)
    assert set(held) == set(expected)
    different = {name: int((held[name] != expected[name]).sum()) for name in held if not np.array_equal(held[name], expected[name])}
    assert not different, f"elements that differ: {different}"


def requests_of(count: int, *, seed: int = 0, max_new_tokens: int = 12, temperature: float = 1.0) -> list[GenerateRequest]:
    """Requests with random prompts."""
    prompts = random_prompts(count, seed=seed)
    return [make_request(p, seed=n, max_new_tokens=max_new_tokens, temperature=temperature) for n, p in enumerate(prompts)]
