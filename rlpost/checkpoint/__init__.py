"""What a resume needs, written atomically.

    state.py      a rank's part: model, optimizer with step, schedule, RNG (torch's sharded format, reshards by itself)
    directory.py  a checkpoint's directory: written beside, renamed, completion mark last; finding the newest complete one
    export.py     a Hugging Face directory of the policy; `python -m rlpost.checkpoint export`

Guaranteed: a directory without its completion mark is never resumed from, and a crash at any moment leaves the
previous checkpoint whole.
"""
