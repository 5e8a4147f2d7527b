"""Rollouts: engines, who asks which engine, and the buffer between generation and training.

    engine.py      the vLLM engine, an async class that Ray makes an actor (the only file here that imports vLLM)
    in_actor.py    vLLM's core run on a thread of the engine's own process
    client.py      the driver's handle of one engine: many requests, few calls
    pool.py        all engines: routing, restart
    router.py      which engine a session goes to (pure)
    episode.py     environment + engine -> trajectory, token in and token out
    collector.py   keeps the buffer full: prompts -> groups of scored trajectories
    buffer.py      the staleness bound (pure)

Guaranteed: each dispatched group reaches the buffer exactly once or ends the run with an error; no token older than
max_staleness versions is handed to the trainer.
"""
