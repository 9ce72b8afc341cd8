"""The models' own packages, pinned, from the package index into pytest's cache; tests are skipped,
and say why, where it cannot be reached.
"""

import os
import shutil
import subprocess
import sys
import types

import pytest

# With the requirements of the modules that are imported here.
PACKAGES = {
    "boltz": ("boltz==2.2.1", "einops==0.8.2"),
    "boltz-community": ("boltz-community==2.13.0", "einops==0.8.2"),
    "boltzgen": ("boltzgen==0.3.2", "einops==0.8.2"),
    "protenix": ("protenix==2.0.0", "optree==0.20.0"),
    "openfold3": ("openfold3==0.5.0", "ml_collections==1.1.0", "absl-py==2.5.1", "PyYAML==6.0.3"),
    "intellifold": ("intellifold==2.0.2", "einops==0.8.2"),
    "rf3": (
        *("rc-foundry==0.2.0", "beartype==0.22.9", "environs==11.2.1", "marshmallow==3.26.1"),
        *("python-dotenv==1.2.1", "jaxtyping==0.3.3", "wadler-lindig==0.1.7"),
        *("opt-einsum==3.4.0", "einops==0.8.2"),
    ),
    "opendde": (
        *("opendde==1.2.0", "optree==0.20.0", "ml_collections==1.1.0", "absl-py==2.5.1"),
        *("PyYAML==6.0.3", "pydantic==2.14.4", "pydantic-core==2.50.5"),
        *("annotated-types==0.8.0", "typing-inspection==0.4.5"),
    ),
    "lightning": (
        *("lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0"),
        *("PyYAML==6.0.3", "tqdm==4.70.1"),
    ),
}


@pytest.fixture(scope="module")
def client(request):
    """The package that the test module names as CLIENT, on sys.path; its modules are unloaded at
    the end.
    """
    name = request.module.CLIENT
    torch = pytest.importorskip("torch")
    folder = installed(request.config.cache.mkdir("clients"), name)
    before, path = dict(sys.modules), list(sys.path)
    layer_norm = os.environ.get("LAYERNORM_TYPE")
    os.environ["LAYERNORM_TYPE"] = "torch"  # Protenix's own is compiled for a GPU
    sys.path.insert(0, str(folder))
    sys.modules.update(stand_ins())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # many small calls
    yield folder
    torch.set_num_threads(threads)
    os.environ.pop("LAYERNORM_TYPE")
    if layer_norm is not None:
        os.environ["LAYERNORM_TYPE"] = layer_norm
    sys.path[:] = path
    for added in set(sys.modules) - set(before):
        if getattr(sys.modules[added], "__file__", None) is None or str(folder) in str(
            sys.modules[added].__file__
        ):
            del sys.modules[added]


def installed(cache, name):
    folder = cache / "-".join(PACKAGES[name]).replace("=", "")
    if not folder.exists():
        partial = cache / f"{folder.name}.{os.getpid()}"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1"]
        install = ["install", "--quiet", "--no-deps", "--no-compile", "--target", str(partial)]
        install += ["--ignore-requires-python"]  # of the modules that are imported, all run
        done = subprocess.run(
            [*pip, "--timeout", "15", *install, *PACKAGES[name]], capture_output=True, text=True
        )
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            pytest.skip(f"{PACKAGES[name][0]} cannot be installed here: {said[-1]}")
        try:
            partial.rename(folder)
        except OSError:  # another process was first
            if not folder.exists():
                raise
            shutil.rmtree(partial)
    return folder


def stand_ins():
    """Stand-ins for large packages that those modules import and that do not matter here: initial
    values drawn by SciPy are overwritten, and types of structures are only compared with.
    """
    zeros = types.SimpleNamespace(std=lambda **_: 1.0, rvs=lambda size, **_: [0.0] * int(size))
    attributes = {
        "scipy": {}, "scipy.stats": {"truncnorm": zeros}, "scipy.spatial": {},
        "scipy.spatial.transform": {"Rotation": object},
        "gemmi": {"__version__": "0"}, "biotite": {}, "biotite.structure": {"AtomArray": frozenset},
    }  # fmt: skip
    modules = {}
    for name, values in attributes.items():
        if name.partition(".")[0] not in sys.modules:
            module = modules[name] = types.ModuleType(name)
            module.__path__ = []
            vars(module).update(values)
    return modules
