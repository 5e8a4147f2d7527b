"""From a run's configuration to the job that holds it, and the commands of the scheduler that runs it. No torch.

- ``needs.py``      what the job must hold: equal nodes by role, each with whole placement bundles.
- ``slurm.py``      an sbatch script that starts Ray on every node of the allocation.
- ``kuberay.py``    a RayJob or RayCluster and the ConfigMap with the run's configuration; ``manifest_checks.py`` what is wrong with such
  manifests, found without a cluster; ``kube_schema.py`` the fields that they may have.
- ``packaging.py``  the files of a working directory that a Ray job takes along.
- ``*_settings.py`` what each is told besides the run's configuration; ``secrets.py`` names of settings that read like secrets.
- ``*_commands.py`` render, submit, status, logs, stop: what ``rlpost.launch`` asks of a scheduler; ``kubectl.py`` kubectl's answers.

Guaranteed: what is rendered holds all bundles of the run at once, names secrets and never holds one, and a retry of the job resumes.
"""
