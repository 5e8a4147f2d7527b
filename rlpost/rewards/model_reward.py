"""Reward models: scores of whole trajectories by a model that others run, and their sum with what reward functions say.

    score(items) --tokens--> queue --one batch at a time--> score_batch (an actor's, say)

Many episodes end at about the same time, each asking for its own score. While one batch is being computed the next one collects, so
the model sees few large batches and nobody waits for a timer.

Guaranteed: every item gets its own score or an error; every batch has a deadline; an error reaches everybody who waits, at once.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlpost.types import ConfigError, Failure, InfrastructureError, RewardItem, RewardOutcome

GATHER_S = 0.01
"""A first call waits this long for others of the same moment; far below the time of a batch."""

ScoreBatch = Callable[[list[np.ndarray]], Awaitable[Sequence[float]]]
"""Token sequences ``[tokens]`` each -> a score each, in order."""

ScoreItems = Callable[[Sequence[RewardItem]], Awaitable[Sequence[RewardOutcome]]]

_Waiting = tuple[np.ndarray, "asyncio.Future[float]"]


@dataclass(eq=False)
class ModelReward:
    """One reward model. ``max_tokens`` is the size of a batch (a longer sequence comes alone), ``timeout_s`` its deadline.

    ``score`` may be called concurrently, all in one event loop.
    """

    name: str
    weight: float
    score_batch: ScoreBatch
    max_tokens: int
    timeout_s: float
    _queue: deque[_Waiting] = field(default_factory=deque, init=False)
    _serving: asyncio.Task[None] | None = field(default=None, init=False)

    async def score(self, items: Sequence[RewardItem]) -> list[float | None]:
        """The score of each item by its exact tokens; None where the model gave no finite number.

        Raises InfrastructureError when a batch failed or was late, for everybody who waits then.
        """
        loop = asyncio.get_running_loop()
        waiting = [(_tokens_of(item), loop.create_future()) for item in items]
        self._queue.extend(waiting)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve(), name=f"reward model {self.name}")
        scores = await asyncio.gather(*(future for _, future in waiting))
        return [score if math.isfinite(score) else None for score in scores]

    async def _serve(self) -> None:
        """Batch after batch until nobody waits. Ends early only with an error that all who wait are told."""
        batch: list[_Waiting] = []
        try:
            await asyncio.sleep(GATHER_S)
            while batch := self._take():
                for (_, future), score in zip(batch, await self._scores(batch), strict=True):
                    if not future.done():  # else nobody waits for it any more
                        future.set_result(float(score))
        except BaseException as error:
            self._fail([*batch, *self._queue], error)
            self._queue.clear()
            if not isinstance(error, Exception):
                raise

    def _take(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        size = 0
        while self._queue and (not batch or size + len(self._queue[0][0]) <= self.max_tokens):
            tokens, future = self._queue.popleft()
            if not future.done():
                batch.append((tokens, future))
                size += len(tokens)
        return batch

    async def _scores(self, batch: Sequence[_Waiting]) -> Sequence[float]:
        deadline = asyncio.timeout(self.timeout_s)
        try:
            async with deadline:
                scores = await self.score_batch([tokens for tokens, _ in batch])
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise InfrastructureError(f"it did not score {len(batch)} trajectories within {self.timeout_s:g} s") from error
        if len(scores) != len(batch):
            raise InfrastructureError(f"it gave {len(scores)} scores for {len(batch)} trajectories")
        return scores

    def _fail(self, waiting: Sequence[_Waiting], cause: BaseException) -> None:
        what = str(cause) if isinstance(cause, InfrastructureError) else f"{type(cause).__name__}: {cause}"
        for _, future in waiting:
            if not future.done():
                error = InfrastructureError(f"reward model {self.name}: {what}")
                error.__cause__ = cause
                future.set_exception(error)


def _tokens_of(item: RewardItem) -> np.ndarray:
    if item.trajectory_tokens is None:
        raise AssertionError(f"{item.trajectory_id}: a reward model needs RewardItem.trajectory_tokens")
    return item.trajectory_tokens


@dataclass(frozen=True, kw_only=True)
class CombinedRewards:
    """Reward functions (``RewardRunner.score``, or None without any) and reward models as one reward."""

    functions: ScoreItems | None
    models: Sequence[ModelReward]

    async def score(self, items: Sequence[RewardItem]) -> list[RewardOutcome]:
        """One outcome an item, in order: the weighted sum, or None when any reward gave none. Raises InfrastructureError."""
        by_models = asyncio.gather(*(model.score(items) for model in self.models))
        by_functions, scores = await asyncio.gather(self._by_functions(items), by_models)
        outcomes = list(by_functions)
        for model, row in zip(self.models, scores, strict=True):
            outcomes = [_add(outcome, model, score) for outcome, score in zip(outcomes, row, strict=True)]
        return outcomes

    async def _by_functions(self, items: Sequence[RewardItem]) -> Sequence[RewardOutcome]:
        if self.functions is None:
            return [RewardOutcome(trajectory_id=item.trajectory_id, value=0.0) for item in items]
        return await self.functions(items)


def _add(outcome: RewardOutcome, model: ModelReward, score: float | None) -> RewardOutcome:
    """The outcome with one more summand; of several failures the first that is a fault is told."""
    parts = {**outcome.parts, model.name: score}
    if score is not None:
        value = None if outcome.value is None else outcome.value + model.weight * score
        return replace(outcome, value=value, parts=parts)
    failure = outcome.failure
    if failure is None or not failure.is_fault:
        failure = Failure(kind="not_a_number", where=model.name, message=f"reward model {model.name} gave a score that is not finite")
    return replace(outcome, value=None, parts=parts, failure=failure)


def check_same_tokenizer(policy: Path, reward_model: Path, where: str) -> None:
    """Each token of the policy must be the same token of the reward model, which is given the policy's tokens as they are.

    ``policy`` and ``reward_model`` are model directories, ``where`` the configuration key of the latter (``rewards[0].model``).
    Further tokens of the reward model (a padding token, say) do no harm. Raises ConfigError.
    """
    own, other = _vocabulary(policy, "model.path"), _vocabulary(reward_model, where)
    different = [token for token in own if own[token] != other.get(token)]
    if different:
        token = min(different)
        has = f"{other[token]!r} there" if token in other else "missing there"
        raise ConfigError(
            f"{where}: the tokenizer of {reward_model} is not that of the policy {policy}: {len(different)} of {len(own)} tokens differ, "
            f"the first is {token}, {own[token]!r} here and {has}. It is given the policy's exact tokens; "
            "take one that was trained from a model with the same tokenizer"
        )


def _vocabulary(directory: Path, key: str) -> dict[int, str]:
    """Every token's text by its id, added tokens last, because they win."""
    file = directory / "tokenizer.json"
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        added = {int(token["id"]): str(token["content"]) for token in content.get("added_tokens", ())}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{key}: {file} cannot be read as a tokenizer ({type(error).__name__}: {error}); policy and reward model are compared by it: "
            "write it there with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        ) from error
    # Unigram models list (piece, score), others map the piece to its id.
    pieces = enumerate(piece for piece, _ in vocabulary) if isinstance(vocabulary, list) else ((i, p) for p, i in vocabulary.items())
    return {**dict(pieces), **added}
