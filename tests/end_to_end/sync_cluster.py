"""Two real engines and two real trainer ranks under real Ray, requests that run all the time, and what both must equal."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
from faulty_actors import FaultyEngine, FaultyRankActor

from rlpost.cluster import session
from rlpost.cluster.session import KEEP_FREED_MEMORY
from rlpost.config.schema import TrainingConfig
from rlpost.models.embedded import build
from rlpost.rollout.engine import EngineSettings
from rlpost.rollout.pool import EnginePool
from rlpost.training.group import TrainerGroup
from rlpost.training.protocol import WorkerSettings
from rlpost.types import GenerateRequest, GenerateResult, InfrastructureError, SamplingSettings
from rlpost.weights.coordinator import WeightSync
from rlpost.weights.policy import SyncSettings

MODEL = "tiny-sort5"
ENGINES, RANKS = 2, 2
CALL_TIMEOUT_S = 60.0
START_TIMEOUT_S = 240.0
TOLERANCE = 2e-5
"""Largest |logprob of the engine - logprob of a plain forward| in float32."""
TOLD_APART = 100 * TOLERANCE
"""Two versions' logprobs must differ by this somewhere, or a check could not tell the one from the other."""
FIRST_ID, LAST_ID = 4, 98
"""Token ids of printable characters in the embedded models' vocabulary."""
NO_VERSION = "no policy version"
"""In the error of a request some of whose tokens were sampled after a sync broke off."""


class PlainModel:
    """transformers' own model with a version's weights."""

    def __init__(self, weights: Mapping[str, np.ndarray]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(build(MODEL), dtype=torch.float32, attn_implementation="eager").eval()
        parameters = dict(self.model.named_parameters())
        assert parameters.keys() == weights.keys()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(torch.from_numpy(weights[name].copy()))

    def distribution(self, request: GenerateRequest, result: GenerateResult) -> np.ndarray:
        """Logprobs of all tokens before each sampled one, at the request's temperature (greedy: 1) ``[new tokens, vocabulary]``."""
        import torch

        with torch.no_grad():
            tokens = torch.tensor([*request.tokens, *result.tokens.tolist()])[None]
            logits = self.model(input_ids=tokens, use_cache=False).logits[0, len(request.tokens) - 1 : -1]
            values: np.ndarray = (logits / (request.sampling.temperature or 1.0)).log_softmax(-1).numpy()
        return values

    def logprobs(self, request: GenerateRequest, result: GenerateResult) -> np.ndarray:
        """Of the sampled tokens ``[new tokens]``."""
        return np.take_along_axis(self.distribution(request, result), result.tokens.astype(np.int64)[:, None], 1)[:, 0]


class WatchedPool(EnginePool):
    """The real pool; a test may put something right before the next call of a method of one engine."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.before: dict[tuple[str, int], Callable[[], Awaitable[None]]] = {}

    async def outcomes(self, method: str, arguments: Mapping[int, Sequence[Any]], *, timeout_s: float) -> dict[int, Any]:
        """As the pool's."""
        for index in arguments:
            if (method, index) in self.before:
                await self.before.pop((method, index))()
        return await super().outcomes(method, arguments, timeout_s=timeout_s)


Outcome = tuple[GenerateRequest, GenerateResult | Exception]


class Cluster:
    """The parts, and the plain model of every version that was ever about to be synced. Methods run on one event loop."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.models: dict[int, PlainModel] = {}
        self.version = -1
        self.trainers: TrainerGroup | None = None
        self.engine_pids: list[int] = []
        """Processes, as they were when the present test began: who is at work or stopped cannot be asked."""
        self.rank_pids: list[int] = []
        self._numbers = itertools.count()
        names = [f"engine-{index}" for index in range(ENGINES)]
        self.settings = [_engine_settings(name) for name in names]
        options = [_options({**s.environment(), "RLPOST_LOG_FILE": str(directory / f"{s.name}.log")}) for s in self.settings]
        self.pool = WatchedPool(
            self.settings, options, request_timeout_s=CALL_TIMEOUT_S, start_timeout_s=START_TIMEOUT_S, max_restarts=100,
            actor_class=FaultyEngine,
        )  # fmt: skip

    async def start(self) -> None:
        """Bring engines and trainers up, together."""
        await asyncio.gather(self.pool.start(), self.ensure_trainers())

    async def stop(self) -> None:
        """End them."""
        await self.pool.stop()
        if self.trainers is not None:
            self.trainers.kill()

    async def ensure_trainers(self) -> TrainerGroup:
        """The trainer group; started when there is none."""
        if self.trainers is None:
            settings = WorkerSettings(
                model_path=str(build(MODEL)), training=TrainingConfig(), dtype="float32", device="cpu", attention="padded",
                total_updates=10, seed=0, timeout_s=CALL_TIMEOUT_S,
            )  # fmt: skip
            remote = ray.remote(FaultyRankActor)
            variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **KEEP_FREED_MEMORY}
            options = [_options({**variables, "RLPOST_LOG_FILE": str(self.directory / f"trainer-{rank}.log")}) for rank in range(RANKS)]
            actors = [remote.options(**option).remote(rank, RANKS, settings) for rank, option in enumerate(options)]
            self.trainers = TrainerGroup("trainer", actors, CALL_TIMEOUT_S)
            await self.trainers.setup(START_TIMEOUT_S)
        return self.trainers

    async def signal_engine(self, index: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to an engine's process."""
        os.kill(self.engine_pids[index], number)

    async def kill_rank(self, rank: int) -> None:
        """End a trainer rank's process at once."""
        os.kill(self.rank_pids[rank], signal.SIGKILL)

    def lose_trainers(self) -> None:
        """End what is left of the trainers; the next test gets others."""
        if self.trainers is not None:
            self.trainers.kill()
        self.trainers = None

    async def ranks(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of FaultyRankActor on all ranks."""
        assert self.trainers is not None
        return await asyncio.gather(*(getattr(actor, method).remote(*arguments) for actor in self.trainers.actors))

    async def engine(self, index: int, method: str, *arguments: Any) -> Any:
        """Call a method of one engine's actor."""
        return await getattr(self.pool.actors[index], method).remote(*arguments)

    # ---- weights ---------------------------------------------------------------------------------------------------

    async def connect(self, *, carrier: str = "collective", deltas: bool = True, timeout_s: float = 20.0, **settings: Any) -> WeightSync:
        """A sync of its own for one test, with a first full one done; nothing is left of the test before."""
        trainers = await self.ensure_trainers()
        await self.pool.outcomes("pid", dict.fromkeys(range(ENGINES), ()), timeout_s=CALL_TIMEOUT_S)  # notices who died
        await self.repair()
        self.engine_pids = [await self.engine(index, "pid") for index in range(ENGINES)]
        self.rank_pids = await self.ranks("pid")
        weights = WeightSync(
            trainers,
            self.pool,
            SyncSettings(
                carrier=carrier, deltas=deltas, engine_dtype="float32", bucket_bytes=1 << 17, timeout_s=timeout_s,
                directory=str(self.directory / "weights"), model_path=str(build(MODEL)), **settings,
            ),
        )  # fmt: skip
        await weights.connect()
        report = await weights.sync(await self.change())
        assert (report.mode, dict(report.fallbacks)) == ("full", {})
        for index in range(ENGINES):
            await self.engine(index, "take_received")
        return weights

    async def change(self, share: float = 0.01) -> int:
        """Change the trainer's weights; the number of the version that they are to become."""
        self.version += 1
        await self.ranks("nudge", share, self.version)
        self.models[self.version] = PlainModel((await self.ranks("full_weights"))[0])
        return self.version

    # ---- requests --------------------------------------------------------------------------------------------------

    def request(self, temperature: float, max_new_tokens: int) -> GenerateRequest:
        """A prompt of random characters."""
        number = next(self._numbers)
        random = np.random.default_rng(number)
        tokens = random.integers(FIRST_ID, LAST_ID, int(random.integers(2, 40))).tolist()
        sampling = SamplingSettings(temperature=temperature, max_new_tokens=max_new_tokens)
        return GenerateRequest(request_id=f"r{number}", tokens=tokens, sampling=sampling, seed=number)

    @asynccontextmanager
    async def traffic(self, slots: int = 6) -> AsyncIterator[list[Outcome]]:
        """While it lasts both engines have requests running; one ended before, some begin after. At its end all stand in the list."""
        outcomes: list[Outcome] = []
        over = False

        async def ask() -> None:
            request = self.request(temperature=2.0, max_new_tokens=120)
            try:
                outcomes.append((request, await self.pool.generate(request)))
            except InfrastructureError as error:
                outcomes.append((request, error))

        async def slot() -> None:
            while not over:
                await ask()
            await ask()

        tasks = [asyncio.create_task(slot()) for _ in range(slots)]
        try:
            while not (outcomes and all(self.pool.router.load)):  # noqa: ASYNC110 - the pool tells nobody
                await asyncio.sleep(0.01)
            yield outcomes
        finally:
            over = True
            await asyncio.wait_for(asyncio.gather(*tasks), CALL_TIMEOUT_S)

    async def check_outcomes(self, outcomes: Sequence[Outcome], *, refused: bool = False) -> None:
        """Each request ended once, and each token has the logprob of the version that is stamped on it: the present or the one before.

        Both must occur. ``refused``: some requests must have ended with NO_VERSION instead, and the present version may not occur.
        """
        counts: Counter[str] = Counter()
        for index, alive in enumerate(self.pool.router.alive):
            if alive:
                counts.update(await self.engine(index, "outcome_counts"))
        assert len({request.request_id for request, _ in outcomes}) == len(outcomes) > 0
        assert {counts[request.request_id] for request, _ in outcomes} <= {0, 1}, "0: the engine that served it is gone"
        errors = [str(outcome) for _, outcome in outcomes if isinstance(outcome, Exception)]
        assert all(NO_VERSION in error for error in errors) and bool(errors) == refused, errors
        results = [(request, outcome) for request, outcome in outcomes if not isinstance(outcome, Exception)]
        seen = {int(version) for _, result in results for version in result.versions}
        before, present = self.version - 1, self.version
        assert seen == {before, present} or (refused and seen == {before})
        for request, outcome in results:
            assert len(outcome.tokens)
            for version in np.unique(outcome.versions):
                mine = outcome.versions == version
                expected = self.models[int(version)].logprobs(request, outcome)
                np.testing.assert_allclose(
                    outcome.logprobs[mine], expected[mine], atol=TOLERANCE, err_msg=f"{request.request_id}, tokens of version {version}"
                )

    async def check_engine(self, index: int, version: int) -> None:
        """This engine's greedy outputs and their logprobs are those of a plain model with the version's weights, and of no other."""
        asked = [self.request(temperature=0.0, max_new_tokens=24) for _ in range(4)]
        results = await asyncio.gather(*(self.pool.clients[index].generate(request, CALL_TIMEOUT_S) for request in asked))
        apart = 0.0
        for request, result in zip(asked, results, strict=True):
            assert set(result.versions.tolist()) == {version}
            expected = self.models[version].logprobs(request, result)
            best = self.models[version].distribution(request, result).max(-1)
            assert (expected >= best - TOLERANCE).all(), "greedy tokens are the most likely ones (or as likely)"
            np.testing.assert_allclose(result.logprobs, expected, atol=TOLERANCE)
            other = self.models[version - 1 if version else 1]
            apart = max(apart, float(np.abs(other.logprobs(request, result) - result.logprobs).max()))
        assert apart > TOLD_APART, "another version would have passed as well"

    async def check_synced(self, weights: WeightSync, version: int) -> None:
        """Both engines hold ``version``, which is the trainer's present weights, and the next sync is an ordinary delta to both."""
        assert weights.version == version
        present = PlainModel((await self.ranks("full_weights"))[0])
        for name, parameter in present.model.named_parameters():
            assert parameter.equal(self.models[version].model.get_parameter(name))
        for index in range(ENGINES):
            await self.check_engine(index, version)
            await self.engine(index, "take_received")
        report = await weights.sync(await self.change())
        assert (report.mode, dict(report.fallbacks), report.verified) == ("delta", {}, True)
        for index in range(ENGINES):
            await self.check_engine(index, self.version)
            assert await self.engine(index, "take_received") == {"delta": report.bytes}

    async def repair(self, weights: WeightSync | None = None, version: int = -1) -> tuple[list[str], dict[str, int]]:
        """Replace dead engines as the driver does; their names, and the fallbacks counted. Without ``weights`` they get none."""
        reasons: Counter[str] = Counter()

        async def give(indices: list[int]) -> None:
            if weights is not None:
                reasons.update(await weights.give(indices, version))

        return await self.pool.repair(give), dict(reasons)


def _engine_settings(name: str) -> EngineSettings:
    return EngineSettings(
        name=name, model_path=str(build(MODEL)), dtype="float32", device="cpu", in_actor=True, max_model_len=320, max_num_seqs=32,
        block_size=32, prefix_caching=True, kv_cache_mib=32,
    )  # fmt: skip


def _options(variables: Mapping[str, str]) -> dict[str, Any]:
    """Ray's for one actor, which must find this module."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    return {"num_cpus": 0, "runtime_env": {"env_vars": {**variables, "PYTHONPATH": path}}}


def start_ray() -> None:
    """A cluster of the tests' own on this machine."""
    os.environ.pop("RAY_ADDRESS", None)
    session.connect(None)
