"""Only what pyproject.toml cannot say: a wheel carries ``configs/*.yaml`` as ``rlpost/configs``, where names are looked up."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Copies the configs beside the modules. An editable install reads them from the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "rlpost" / "configs"
        self.mkpath(str(target))
        for path in sorted(Path("configs").glob("*.yaml")):
            self.copy_file(str(path), str(target / path.name))


setup(cmdclass={"build_py": BuildWithConfigs})
