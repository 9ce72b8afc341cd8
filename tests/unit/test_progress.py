"""The progress bar's line: what it says at any width, and what it expects."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from op_builder.build import progress, resources
from op_builder.build.build import Unit
from op_builder.build.progress import Bar, ShownUnit
from op_builder.build.wait import _Watched
from op_builder.cache.cache import last_seconds
from op_builder.cache.key import LAYOUT, CompileJob
from op_builder.ops.instantiations import HEAD_DIM_TIERS, CpuKernel, CudaKernel

LONG = "sm80_bwd_bf16_d128_bias2_unaligned for 8.0"


@pytest.fixture
def bar(monkeypatch):
    monkeypatch.setattr(resources, "parallel_jobs", lambda memory_bytes: 2)
    monkeypatch.setattr(Bar, "_draw", lambda self, line: None)
    return Bar()


@pytest.mark.parametrize("columns", range(40, 201, 8))
def test_no_line_is_longer_than_the_terminal(bar, columns):
    bar.begin([ShownUnit(f"{LONG} {number}", None, 40.0) for number in range(12)])
    for elapsed in (0.0, 9.9, 99.9, 9999.9):
        assert len(bar._line(elapsed, columns)) <= columns


def test_what_is_given_up_first(bar):
    bar.begin([ShownUnit(LONG, 12.3, 40.0), ShownUnit("other", 5.0)])
    counts = "0/2  2.0 s, 10 s left"
    assert bar._line(2.0, 200) == (
        f"[###.....................] {counts}  compiling {LONG} (took 12.3 s last time) and 1 more"
    )
    assert (
        bar._line(2.0, 115) == f"[###.....................] {counts}  compiling {LONG} and 1 more"
    )
    assert bar._line(2.0, 102) == f"[#...........] {counts}  compiling {LONG} and 1 more"
    assert bar._line(2.0, 79) == f"[......] {counts}  {LONG}"
    assert bar._line(2.0, 70) == f"{counts}  {LONG}"


@pytest.mark.parametrize(
    ("units", "seconds"),
    [
        ((8.0, 6.0), 8.0),  # side by side
        ((8.0, 6.0, 6.0, 6.0), 13.0),  # two at once
        ((8.0, None), None),
    ],
)
def test_what_is_expected(bar, units, seconds):
    bar.begin([ShownUnit(f"unit {number}", None, usual) for number, usual in enumerate(units)])
    assert bar._expected_s == seconds
    assert ("left" in bar._line(0.0, 80)) == (seconds is not None)


def test_nothing_is_promised_once_it_takes_longer(bar):
    bar.begin([ShownUnit("unit", 5.0)])
    assert "left" not in bar._line(6.0, 80)
    assert "[######################..]" in bar._line(6.0, 80), "95 %"
    bar.finished("unit", 6.0)
    assert bar._line(6.1, 80) == f"[{'#' * 24}] 1/1  6.1 s  compiled"


def test_each_kernel_has_its_usual_time():
    """A backward takes longer than a forward."""
    for isa in ("amx", "portable"):
        times = [CpuKernel(way, "fp32", isa).usual_seconds for way in ("fwd", "bwd")]
        assert 0 < times[0] < times[1] < 10
    for family in ("sm70", "sm75", "sm80", "sm90"):
        tier = HEAD_DIM_TIERS[0]
        kernels = [
            CudaKernel(family, way, "bf16", tier, "none", True, "9.0a") for way in ("fwd", "bwd")
        ]
        assert 0 < kernels[0].usual_seconds < kernels[1].usual_seconds < 60


def test_width_without_a_terminal(monkeypatch):
    monkeypatch.setattr(progress.sys, "stderr", None)
    assert progress._columns() == 80


def test_the_last_compilation_says_how_long_the_next_one_takes(tmp_path):
    """Of several entries of a name the newest one; a longer name is another kernel's."""
    meta = {"layout": LAYOUT, "sha256": "", "machine": 62, "size": 1, "flags": [], "glibc": [2, 4]}
    meta |= {"identity": [], "headers": []}
    entries = (("toy", 5, 1.0), ("toy", 9, 2.0), ("toy", 7, 3.0), ("toy-2", 10, 4.0))
    for name, when, seconds in entries:
        folder = tmp_path / "units" / f"{name}-{when}"
        folder.mkdir(parents=True)
        created = {"time": when, "host": "", "compiler": ""}
        own = {"name": name, "seconds": seconds, "created": created}
        (folder / "meta.json").write_text(json.dumps(meta | own))
    assert last_seconds(tmp_path, "toy") == 2.0
    assert last_seconds(tmp_path, "toy-3") is None


def test_a_compiler_that_takes_long_is_told_of_ever_more_rarely(tmp_path, monkeypatch):
    told = []
    display = SimpleNamespace(note=told.append)
    unit = Unit(CompileJob("toy", "", ".cpp", Path("c++"), (), (), (), ()))
    unit.begun_file = tmp_path / "begun"
    watched = _Watched(unit, display)
    unit.begun_file.touch()
    for now in (0, 179, 181, 182, 361, 363, 700, 727):
        monkeypatch.setattr("time.monotonic", lambda now=now: now)
        watched.tell_delay()
    assert [line.partition(" (")[0] for line in told] == [
        f"still compiling toy after {seconds} s" for seconds in (181, 363, 727)
    ]
