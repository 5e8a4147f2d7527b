"""Weight sync: from the sharded trainer to every engine, proven before the policy version moves.

    buckets.py      which tensors travel in one buffer (pure)
    fingerprint.py  an order-independent 128-bit hash over all tensors
    collective.py   the process group between trainer rank 0 and the engines (gloo or NCCL), and the sender
    receiver.py     the receiving end inside vLLM: a backend of its weight-transfer interface
    coordinator.py  stage on all engines, compare fingerprints, commit (driver)

Guaranteed: a version is committed only after every live engine acknowledged it with the trainer's fingerprint; generation
resumes whatever happens.
"""
