"""The trainer: one worker a rank, blind to the algorithm.

In: packed micro-batches with per-token weights, advantages and logprobs (packing.py makes them on the driver), a list
of loss components, a global denominator. Out: metrics, and the weights as a stream of full tensors.

Guaranteed: the gradient does not depend on micro-batch size, packing or rank count, for the denominator is counted over
the whole optimizer step before the first backward, and every rank runs the same number of micro-batches.

    packing.py    trajectories -> equal numbers of balanced micro-batches a rank (numpy only)
    model.py      load, shard and patch a Hugging Face model so that its forward returns logprobs and entropy
    attention.py  attention over packed rows
    norm.py       RMS normalisation in one pass each way
    logprob.py    logprob and entropy of targets without holding [tokens, vocabulary]
    optimizer.py  parameter groups and the learning-rate schedule
    protocol.py   what driver and rank say to each other
    worker.py     a trainer rank: update, logprobs, weights out, save and load
    group.py      all ranks as Ray actors, called together with a deadline
"""
