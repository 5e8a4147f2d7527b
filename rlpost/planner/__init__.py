"""What a run will need, as pure functions: memory, time, weight sync, placement, tokens, cost. No torch, no Ray, no GPU.

In: a model's shape and plain numbers with their unit in their name. Out: frozen records whose lines carry their formula as text and
say whether they rest on an assumption or on a measurement. Every impossible value is a ConfigError that says what to change.

Formulas, each by itself:

- ``quantities.py``   units, and the checks that all others use.
- ``shapes.py``       a model's sizes from its config.json, parameters by part; ``known_models.py`` those of public models.
- ``hardware.py``     machines: data sheets of GPUs, what is assumed of their nodes, slips of units.
- ``memory.py``       weights, gradients, optimizer states, adapters, KV cache.
- ``activations.py``  what the forward keeps for the backward pass, and the logits.
- ``deepspeed.py``    DeepSpeed's own estimates of ZeRO-2 and ZeRO-3.
- ``roles.py``        one GPU's memory by role and phase.
- ``collectives.py``  seconds of collectives at a measured bus bandwidth, and the traffic of sharding and tensor parallelism.
- ``timing.py``       seconds of generation, prefill and training; lengths with a long tail.
- ``sync.py``         seconds of a weight sync over each transport; when a delta pays.
- ``split.py``        step time over trainer/rollout splits, against colocated.
- ``tokens.py``       prefix reuse of agents, packing, imbalance of experts.
- ``cost.py``         GPU-hours and money.

From a run's configuration to a plan, and from a run back to better plans:

- ``options.py``      what a plan is told besides the configuration.
- ``workload.py``     a step as sequences and tokens: assumed, given, or recorded by a run.
- ``footprint.py``    memory of every process of a run.
- ``seconds.py``      works of every phase: amounts, each with the coefficient that it costs.
- ``coefficients.py`` these coefficients, assumed or measured, and calibration.yaml.
- ``plan.py``         all of it together.
- ``advice.py``       the smallest change that makes a run fit; ``compare.py`` several plans in one table.
- ``measured.py``     a run's figures beside the plan's; ``calibrate.py`` fits the coefficients to them.
- ``render.py``, ``html.py``, ``as_json.py``: what people and programs see.

GB is 1e9 bytes, GiB 2^30. Nothing rounds up to be safe: margins are the caller's.
"""
