"""The driver: the loop that schedules the phases of a run.

    run.py, run_directory.py   one run from start to end, where it lives, where it resumes from
    preflight.py, inputs.py    what it reads, checked before Ray starts
    actors.py, setup.py        what each actor is told; all parts started, and taken down
    loop.py                    checkpoints, resuming, reports
    online.py                  the loop with engines;   offline.py, reference_cache.py   the loop over a data set
    batch.py                   groups of scored trajectories -> loss terms with global denominators (pure)
    learning.py, updates.py    a batch -> forwards, advantages, optimizer steps of policy and critic
    reward_models.py           trajectories scored by a model
    evaluate.py, failures.py   held-out prompts; the failure budget

The online loop and what it waits for (each wait has a deadline and says for whom it waits):

    take a batch       collector (engines, environments, rewards); an engine's loss is repaired while waiting
    reference, old     trainer ranks or the reference actor, only if the algorithm needs them; values: the critic
    update             trainer ranks, and the critic's
    sync               trainer ranks and every engine; then, and only then, the policy version moves
    evaluate, save     engines; trainer ranks
"""
