"""rlpost: post-train language models with reinforcement learning on a Ray cluster.

The way of the data, one direction (docs/architecture.md):

    prompts -> episode (environment + engine) -> trajectory -> reward -> group -> advantages -> packed batch
            -> trainer update -> version v+1 -> stage on engines -> commit -> next episodes

Start with ``python -m rlpost.train config=grpo_tiny``.
"""

__version__ = "0.1.0"
