"""`pip install ".[cuda]"` from nothing: one toolkit, of the release that PyTorch pins.

An index of stubs: the packages' names, versions and requirements are those of the real index, their
contents are not. pip resolves as it always does and installs nothing.
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest

from . import trees

# PyTorch on Linux: its release and that of the toolkit it pins; 2.10 and the CPU builds pin none.
TORCH = {"2.10.0": "", "2.11.0": "13.0.2", "2.14.1": "13.0.3", "2.15.0": "13.2.2"}
TOOLKITS = ("13.0.2", "13.0.3", "13.1.1", "13.2.2", "13.5.0")
PARTS = {
    "nvcc": "nvidia-cuda-nvcc",
    "nvvm": "nvidia-nvvm",
    "crt": "nvidia-cuda-crt",
    "cudart": "nvidia-cuda-runtime",
    "cccl": "nvidia-cuda-cccl",
    "nvrtc": "nvidia-cuda-nvrtc",
}


def stub(index: Path, name: str, version: str, *requires: str, extras: tuple[str, ...] = ()):
    file = name.replace("-", "_")
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Provides-Extra: {extra}" for extra in extras]
    lines += [f"Requires-Dist: {one}" for one in requires]
    tags = "Wheel-Version: 1.0\nGenerator: stub\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(index / f"{file}-{version}-py3-none-any.whl", "w") as wheel:
        folder = f"{file}-{version}.dist-info"
        wheel.writestr(f"{folder}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{folder}/WHEEL", tags)
        wheel.writestr(f"{folder}/RECORD", "")


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    for toolkit in TOOLKITS:
        for name in PARTS.values():
            stub(folder, name, toolkit)
        parts = [f'{name}=={toolkit}.*; extra == "{extra}"' for extra, name in PARTS.items()]
        stub(folder, "cuda-toolkit", toolkit, *parts, extras=tuple(PARTS))
    for version in ("12.9.4", "13.0.3", "13.4.4"):
        stub(folder, "cuda-bindings", version)
        stub(folder, "cuda-python", version, f"cuda-bindings~={version}")
    for version, toolkit in TORCH.items():
        pins = [f"cuda-toolkit[cudart,nvrtc]=={toolkit}", "cuda-bindings<14,>=13.0.3"]
        stub(folder, "torch", version, *(pins if toolkit else ["cuda-bindings==12.9.4"]))
    stub(folder, "nvidia-cutlass", "4.2.0.0", "cuda-python")
    for name in ("ninja",):
        stub(folder, name, "99.0")
    return folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return trees.clone(tmp_path_factory.mktemp("extra") / "tree", without=("tests", "benchmarks"))


def resolved(tree: Path, index: Path, *more: str) -> dict[str, str]:
    """What pip would install into an empty environment."""
    report = index / "report.json"
    done = trees.pip(
        *("install", "--dry-run", "--ignore-installed", "--no-build-isolation", "--no-index"),
        *("--find-links", str(index), "--report", str(report), f"{tree}[cuda]", *more),
        home=index,
        PIP_CONFIG_FILE=os.devnull,  # a machine's own limits of versions do not count here
        PIP_CONSTRAINT="",
        PIP_FIND_LINKS="",
        PIP_EXTRA_INDEX_URL="",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "multiple versions of torch" not in done.stdout, "each is 500 MB to download"
    found = [one["metadata"] for one in json.loads(report.read_text())["install"]]
    return {one["name"]: one["version"] for one in found}


@pytest.mark.parametrize("torch", ["", *TORCH])
def test_one_toolkit_of_the_release_that_torch_pins(torch, tree, index):
    """The newest PyTorch, or the one that somebody asks for with it."""
    found = resolved(tree, index, *([f"torch=={torch}"] if torch else []))
    assert found["torch"] == (torch or "2.15.0")
    expected = TORCH[found["torch"]] or TOOLKITS[-1]
    parts = [PARTS[part] for part in ("nvcc", "nvvm", "crt", "cudart", "cccl")]
    assert {name: found[name] for name in parts} == dict.fromkeys(parts, expected)
    assert found["nvidia-cutlass"] == "4.2.0.0"
