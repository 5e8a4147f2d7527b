"""Only what pyproject.toml cannot say: a wheel carries ``configs/`` and ``launch/`` inside the package, where they are looked up."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CARRIED = ("configs/*.yaml", "launch/slurm/*.sbatch")


class BuildWithFiles(build_py):
    """Copies configs and job templates beside the modules. An editable install reads them from the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for path in sorted(path for pattern in CARRIED for path in Path().glob(pattern)):
            target = Path(self.build_lib) / "rlpost" / path
            self.mkpath(str(target.parent))
            self.copy_file(str(path), str(target))


setup(cmdclass={"build_py": BuildWithFiles})
