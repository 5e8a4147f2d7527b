"""What ``python -m rlpost.doctor`` looks at: the machine, the cluster, and whether training computes what it should.

    report.py        a finding, and how findings are printed, written as JSON and made an exit code
    host.py          what the machine checks read: files, commands, limits; tests give their own
    needs.py         what a run's configuration asks of a machine
    software.py      versions of Python and packages, the build of torch
    devices.py       NVIDIA GPUs, NVLink, InfiniBand, network cards
    machine.py       memory, shared memory, limits, clock, environment, Ray's leftovers; all machine checks in order
    storage.py       room and speed of the disks that a run writes to
    links.py         ports and names, and what two processes get through between them
    cluster.py       the same on every node of a Ray cluster, and what only several nodes can have wrong
    cluster_checks.py  the judgements on what the nodes answered
    verify.py        equivalence checks on the user's own configuration, scaled down

In comes a configuration (or none), out goes a list of findings. A check changes nothing that it does not put back, has a deadline, and says
``unknown`` where it cannot tell; a probe that hangs or breaks is a failed finding that names its node.
"""
