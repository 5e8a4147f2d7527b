"""The driver: one loop that schedules the phases of a run.

    run_directory.py  where a run lives, and where it resumes from
    batch.py          groups of scored trajectories -> loss terms with the global denominator (pure)
    setup.py          builds every part of a run from its configuration, and takes it down
    online.py         the loop
    evaluate.py       held-out prompts, with their own sampling
    failures.py       the failure budget

The loop and what it waits for (each wait has a deadline and says for whom it waits):

    take a batch       collector (engines, environments, rewards); an engine's loss is repaired while waiting
    reference, old     trainer ranks or the reference actor, only if the algorithm needs them
    update             trainer ranks
    sync               trainer ranks and every engine; then, and only then, the policy version moves
    evaluate, save     engines; trainer ranks
"""
