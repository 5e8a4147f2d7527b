"""From a run's configuration to the job that holds it, as text for the scheduler that the user has. Pure: no Ray, no torch, no network.

- ``needs.py``            what the job must hold: equal nodes by role, each with whole placement bundles.
- ``slurm.py``            an sbatch script that starts Ray on every node of the allocation; ``slurm_settings.py`` what it is told.
- ``kuberay.py``          a RayJob or RayCluster and the ConfigMap with the run's configuration; ``kube_settings.py`` what they are told.
- ``manifest_checks.py``  what is wrong with such manifests, found without a cluster; ``kube_schema.py`` the fields that they may have.

In: a :class:`~rlpost.config.schema.RunConfig`, its YAML, and settings. Out: text, or plain mappings that YAML writes. Guaranteed: what is
rendered holds all bundles of the run at once, names secrets and never holds one, and a retry of the job resumes the run.
"""
