"""The optional prebuild: with DS_BUILD_* set, installing compiles kernels into the package. The
rest: pyproject.toml.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036, said before anything that an older one cannot read
    sys.exit("deepspeed4science needs Python 3.10 or newer; this is " + sys.version.split()[0])

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import setuptools

if int(setuptools.__version__.partition(".")[0]) < 77:  # without build isolation nobody has checked
    sys.exit(
        f"deepspeed4science needs setuptools 77 or newer to be built; this is "
        f"{setuptools.__version__}: pip install 'setuptools>=77'"
    )

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # a build front end does not put the source folder there
# pip's build isolation hides the environment's packages: nvcc and CUTLASS are looked up among them,
# those of the user's folder, of the system beneath a venv and of .pth files included.
HIDING = ("PYTHONPATH", "PYTHONNOUSERSITE")
asked = subprocess.run(
    [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"],
    env={name: value for name, value in os.environ.items() if name not in HIDING},
    stdout=subprocess.PIPE,
    check=True,
)
sys.path += [one for one in json.loads(asked.stdout.splitlines()[-1]) if one not in sys.path]

from op_builder.errors import BuildError  # noqa: E402
from op_builder.ops import prebuild  # noqa: E402

PACKAGES = ("deepspeed4science", "op_builder")
HIDDEN = (
    "If it is installed: this build sees no packages of that environment. Build without isolation "
    "(uv: --no-build-isolation, build: --no-isolation), or set CUTLASS_PATH and CUDA_HOME"
)


class BuildPackageAndKernels(build_py):
    """Copies the Python files and our headers, then compiles what was asked for; a failure stops
    the install with its reason.

    A checkout and an editable install read csrc/ where it is, a wheel carries it as data of the
    package (op_builder/paths.py).
    """

    def run(self) -> None:
        if not self.editable_mode:
            for name in PACKAGES:  # an earlier build's, which may have been renamed since
                for module in (Path(self.build_lib) / name).rglob("*.py"):
                    module.unlink()
        super().run()
        package = (HERE if self.editable_mode else Path(self.build_lib)) / "deepspeed4science"
        if not self.editable_mode:
            shutil.rmtree(package / "csrc", ignore_errors=True)  # of an earlier build
            shutil.copytree(HERE / "csrc", package / "csrc")
        try:
            prebuild.build_requested(package / "prebuilt")
        except BuildError as error:
            if "pip install" in str(error) and importlib.util.find_spec("torch") is None:
                raise BuildError(f"{error}. {HIDDEN}") from error
            raise


class Distribution(setuptools.Distribution):
    """With compiled kernels in it, a wheel is for one platform."""

    def has_ext_modules(self) -> bool:
        return bool(prebuild.requested())


class PlatformWheel(bdist_wheel):
    """Kernels know neither Python nor torch: one wheel serves all of them."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", "any" if self.root_is_pure else platform


setuptools.setup(
    cmdclass={"build_py": BuildPackageAndKernels, "bdist_wheel": PlatformWheel},
    distclass=Distribution,
)
