"""The optional prebuild: with DS_BUILD_* set, installing compiles kernels into the package. The
rest: pyproject.toml.
"""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # a build front end does not put the source folder there

from op_builder import prebuild  # noqa: E402


class BuildPackageAndKernels(build_py):
    """Copies the Python files, then compiles what was asked for; a failure stops the install with
    its reason.
    """

    def run(self) -> None:
        super().run()
        root = HERE if self.editable_mode else Path(self.build_lib)
        prebuild.build_requested(root / "deepspeed4science" / "prebuilt")


class PlatformWheel(bdist_wheel):
    """A wheel with compiled kernels is bound to the platform, but neither to a Python nor to a
    torch.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not prebuild.requested()

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", "any" if self.root_is_pure else platform


setup(cmdclass={"build_py": BuildPackageAndKernels, "bdist_wheel": PlatformWheel})
