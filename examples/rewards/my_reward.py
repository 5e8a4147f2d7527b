"""Copy this file to write a reward of your own. Nothing else has to be registered or installed.

Try it on data, without any training:

    python -m rlpost.rewards check examples/rewards/my_reward.py:my_reward --data examples/rewards/data.jsonl

Use it in a run's configuration (paths are relative to where you start the run):

    rewards:
      - function: examples/rewards/my_reward.py:my_reward
        weight: 1.0
      - function: examples/rewards/my_reward.py:brevity
        weight: 0.2
        options: {max_words: 12}
"""

from __future__ import annotations

import asyncio
import re

from rlpost.rewards import RewardResult


# The smallest reward. It gets the prompt, the model's completion, and every column of the data row that it names: here
# `answer`. Return a number; return None when this row cannot be judged (the sample is then left out; that is not the same as 0).
def my_reward(prompt: str, completion: str, answer: str | None = None) -> float | None:
    """1 when the completion's last word is the answer."""
    if answer is None:
        return None
    words = re.findall(r"[\w.,-]+", completion)
    return 1.0 if words and words[-1].strip(".,") == answer else 0.0


# `max_words` is no column of the data: it comes from `options` in the configuration. RewardResult adds figures that are
# logged as reward_metrics/brevity/words, beside the reward.
def brevity(prompt: str, completion: str, max_words: int = 20) -> RewardResult:
    """1 for at most `max_words` words, falling to 0 at twice as many."""
    words = len(completion.split())
    value = min(1.0, max(0.0, 2.0 - words / max_words))
    return RewardResult(value, {"words": words})


# An asynchronous reward: use it when the reward waits, for example for a judge behind HTTP. Calls then run concurrently.
# Each has the deadline reward_runner.timeout_s; what raises or runs late is a failure with a name, never a reward of 0.
# **fields takes all columns of the row.
async def judged(prompt: str, completion: str, **fields: object) -> float:
    """Stands for a question to a remote judge."""
    await asyncio.sleep(0.01)  # here you would await your HTTP client
    return 1.0 if str(fields.get("answer")) in completion else 0.0
