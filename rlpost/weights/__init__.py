"""Weight sync: from the sharded trainer to every engine, proven before the policy version moves.

    coordinator.py   stage, apply, compare, commit, heal (driver)
    policy.py        what a sync moves, when it is proven, how many fallbacks are too many (pure)
    sender.py        the trainer rank's end; shards.py what it owns; baseline.py what engines hold, to tell a delta
    receiver.py      the engine worker's end; layout.py where it keeps each tensor
    links.py         what carriers have in common: collective.py (gloo, NCCL), ipc.py (shared memory), disk.py (directory, fsspec)
    buckets.py       which rows travel in one buffer (pure)
    delta.py         the coding of a sparse change (pure)
    fingerprint.py   an order-independent 128-bit hash over all tensors, summed over shards

Guaranteed: a version is committed on an engine only when it holds the trainer's bits; the trainer's baseline and the policy version move
only after every live engine acknowledged; an engine that cannot take part gets a full sync of its own, counted and capped; generation
resumes whatever happens, and tokens of undefined weights are refused.
"""
