"""Rewards: what a finished completion is worth, said by plain Python functions in processes of their own, or by reward models.

What comes in: ``RewardConfig`` (which functions or models, weights, options) and ``RewardItem`` (prompt, completion, the row's fields).
What goes out: one ``RewardOutcome`` an item, in order: the weighted sum, each reward's raw value, and the failure if any.

    result.py          RewardResult, what a function may return besides a float or None
    signature.py       does a function fit, and which arguments does it get
    resolve.py         names of the configuration to checked functions; the catalogue of built-ins
    builtin.py         the built-in functions (math equivalence in mathematics.py)
    runner.py          RewardRunner: queue, deadlines, who is to blame, the weighted sum
    worker_process.py  the parent's end of one worker process
    worker.py          the worker process: calls functions one by one, checks what they return
    model_reward.py    reward models: calls gathered into batches; functions and models added up
    wire.py            the messages between the two
    __main__.py        `python -m rlpost.rewards check | list`

Guaranteed: a raise, a NaN, a wrong type, a time-out, a dead process are failures with a name, never a reward of 0; one bad
call costs one trajectory, the others are still scored. Nothing here imports ray, torch or vllm.
"""

from rlpost.rewards.resolve import CATALOGUE, ENTRY_POINT_GROUP, load_rewards, resolve_reward
from rlpost.rewards.result import RewardResult
from rlpost.rewards.runner import RewardRunner
from rlpost.rewards.signature import check_signature

__all__ = ["CATALOGUE", "ENTRY_POINT_GROUP", "RewardResult", "RewardRunner", "check_signature", "load_rewards", "resolve_reward"]
