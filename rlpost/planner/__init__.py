"""What a run will need, as pure functions: memory, time, weight sync, placement, tokens, cost. No torch, no Ray, no GPU.

In: a model's shape and plain numbers with their unit in their name. Out: frozen records whose lines carry their formula as text and
say whether they rest on an assumption or on a measurement. Every impossible value is a ConfigError that says what to change.

- ``quantities.py``   units, and the checks that all others use.
- ``shapes.py``       a model's sizes from its config.json, parameters by part.
- ``memory.py``       weights, gradients, optimizer states, adapters, KV cache.
- ``activations.py``  what the forward keeps for the backward pass, and the logits.
- ``deepspeed.py``    DeepSpeed's own estimates of ZeRO-2 and ZeRO-3.
- ``roles.py``        one GPU's memory by role and phase; what fits.
- ``collectives.py``  seconds of collectives at a measured bus bandwidth, and the traffic of sharding and tensor parallelism.
- ``timing.py``       seconds of generation, prefill and training; the phases of a step.
- ``sync.py``         seconds of a weight sync over each transport; when a delta pays.
- ``split.py``        step time over trainer/rollout splits, against colocated.
- ``tokens.py``       prefix reuse of agents, packing, imbalance of experts.
- ``cost.py``         GPU-hours and money.

GB is 1e9 bytes, GiB 2^30. Nothing rounds up to be safe: margins are the caller's.
"""
