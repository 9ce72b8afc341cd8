"""One OpenMP runtime in the process: torch's where torch is, the system's elsewhere."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from op_builder.toolchain import openmp

from .toys import REPOSITORY, Workshop

SCRIPT = """
import json, os, sys
{first}
from op_builder import EvoformerAttnCPUBuilder
from op_builder.toolchain import openmp
from op_builder.ops.instantiations import CpuKernel
before = openmp.present()
builder = EvoformerAttnCPUBuilder()
kernel = CpuKernel("fwd", "fp32", "portable")
library = builder.load(verbose=False, kernels=[kernel]).kernel(kernel)
reading, writing = os.pipe()
if os.fork() == 0:
    os.write(writing, str(openmp.threads(8)).encode())
    os._exit(0)
answers = dict(before=before, after=openmp.present(), path=str(library.path))
answers.update(threads=openmp.threads(8), threads_in_child=int(os.read(reading, 10)))
sys.stdout.write(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    return Workshop.make(tmp_path_factory.mktemp("openmp") / "workshop")


def run(workshop, first=""):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(first=first)],
        cwd=REPOSITORY,
        env=workshop.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_without_torch_the_systems(workshop):
    answers = run(workshop)
    assert answers["before"] == []
    assert len(answers["after"]) == 1


def test_with_torch_its_own(workshop):
    """No second runtime, whose threads would fight with torch's for the cores."""
    pytest.importorskip("torch")
    answers = run(workshop, "import torch")
    assert len(answers["before"]) == 1
    assert answers["after"] == answers["before"]


def test_private_copy_under_another_name(workshop, tmp_path):
    """Wheels bring runtimes whose own name is changed too, so that asking by name finds another."""
    system = run(workshop)["after"][0]
    copy = tmp_path / "libgomp-a34b3233.so.1"
    data = Path(system).read_bytes()
    renamed = data.replace(b"\0libgomp.so.1\0", b"\0libgimp.so.1\0")
    assert renamed != data
    copy.write_bytes(renamed)
    answers = run(workshop, f"import ctypes; ctypes.CDLL({str(copy)!r})")
    assert answers["before"] == answers["after"] == [str(copy)]


def test_a_mapped_file_whose_name_is_not_utf_8(workshop, tmp_path):
    """Such as a data set that the program has mapped into memory."""
    name = os.fsencode(tmp_path) + b"/\xe9"
    Path(os.fsdecode(name)).write_bytes(b"x")
    mapping = (
        f"import mmap; data = mmap.mmap(os.open({name!r}, os.O_RDONLY), 0, prot=mmap.PROT_READ)"
    )
    assert len(run(workshop, mapping)["after"]) == 1


def test_library_needs_no_runtime_by_name(workshop):
    """A NEEDED entry would load the system's runtime beside torch's."""
    library = run(workshop)["path"]
    with open(library, "rb") as stream:
        data = stream.read()
    assert b"GOMP_parallel" in data
    assert b"libgomp.so" not in data and b"libomp.so" not in data


def test_one_thread_in_a_forked_child(workshop):
    """libgomp's threads do not survive a fork; a parallel region in the child would hang."""
    answers = run(workshop)
    assert (answers["threads"], answers["threads_in_child"]) == (8, 1)


def test_torchs_runtime_comes_before_another_librarys(monkeypatch):
    """scikit-learn, for one, brings a libgomp that no thread of torch uses."""
    others = "/site/scikit_learn.libs/libgomp-a34b3233.so.1.0.0"
    torchs = "/site/torch/lib/libgomp.so.1"
    maps = "".join(f"7f00-7f01 r-xp 0 08:01 1 {path}\n" for path in (others, torchs, "/x/libc.so"))
    monkeypatch.setattr(openmp, "open", lambda *_: io.BytesIO(maps.encode()), raising=False)
    assert openmp.present() == [torchs, others]


def test_a_runtime_whose_file_was_replaced_leaves_the_next_one(monkeypatch):
    """As by an upgrade below a running process: the file cannot be opened as what is mapped."""
    opened = []

    def open_library(path, mode):
        if path == "/replaced":
            raise OSError("not loaded")
        opened.append(path)

    monkeypatch.setattr(openmp, "_opened", [])
    monkeypatch.setattr(openmp, "present", lambda: ["/replaced", "/mapped"])
    monkeypatch.setattr("ctypes.CDLL", open_library)
    openmp.provide()
    openmp.provide()
    assert opened == ["/mapped"]


def test_a_child_forked_before_any_library_may_use_threads(monkeypatch):
    monkeypatch.setattr(openmp, "_forked", False)
    for opened, threads in (([], 8), ([None], 1)):
        monkeypatch.setattr(openmp, "_opened", opened)
        openmp._after_fork()
        assert openmp.threads(8) == threads
