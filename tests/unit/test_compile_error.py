"""What a refused source looks like to the person who has to mend it."""

from dataclasses import replace
from pathlib import Path

import pytest

from op_builder.build.compile_error import explain, is_lasting
from op_builder.build.ninja_run import Failed
from op_builder.cache.key import CompileJob

OURS = "/csrc/deepspeed4science/evoformer_attn/sm90/mma/wgmma_atoms.h"
JOB = CompileJob("unit", "", ".cpp", Path("c++"), (), (), (), ())


def message(log, tmp_path):
    return str(explain(Failed(JOB, log, "c++ -c unit.cpp"), tmp_path / "failed"))


def test_first_error_with_five_lines_around_it(tmp_path):
    """Warnings before and consequences after it are many; the first error is the cause."""
    before = [f"unit.cpp:{n}:1: warning: before {n}" for n in range(20)]
    after = [f"unit.cpp:{n}:1: error: consequence {n}" for n in range(20)]
    text = message("\n".join([*before, "unit.cpp:7:3: error: the cause", *after]), tmp_path)
    shown = [line for line in text.splitlines() if "unit.cpp:" in line]
    assert [line[2] for line in shown] == [" "] * 5 + [">"] + [" "] * 5
    assert shown[5].endswith("error: the cause")
    assert shown[0].endswith("before 15") and shown[-1].endswith("consequence 4")
    assert "command: c++ -c unit.cpp" in text


def test_whole_log_is_kept(tmp_path):
    text = message("one\ntwo: error: three", tmp_path)
    log = Path(text.partition("log: ")[2].splitlines()[0])
    assert log.is_relative_to(tmp_path)
    assert log.read_text() == "$ c++ -c unit.cpp\none\ntwo: error: three"


def test_log_goes_elsewhere_when_the_cache_is_readonly(tmp_path):
    (tmp_path / "failed").write_text("a file where the folder should be")
    text = message("x: error: y", tmp_path)
    log = Path(text.partition("log: ")[2].splitlines()[0])
    assert "x: error: y" in log.read_text()
    log.unlink()


def test_log_goes_elsewhere_when_others_may_write_the_cache(tmp_path):
    tmp_path.chmod(0o777)
    text = message("x: error: y", tmp_path)
    log = Path(text.partition("log: ")[2].splitlines()[0])
    assert not log.is_relative_to(tmp_path) and list(tmp_path.iterdir()) == []
    log.unlink()


def test_a_long_line_is_cut(tmp_path):
    text = message(f"unit.cpp:7:3: error: {'x' * 100_000}", tmp_path)
    assert max(map(len, text.splitlines())) < 600


@pytest.mark.parametrize(
    ("log", "hint"),
    [
        ("c++: fatal error: Killed signal terminated program cc1plus", "out of memory"),
        ("exit status 137", "MAX_JOBS=1"),
        ("nvcc error   : 'cicc' died due to signal 9 (Kill signal)", "MAX_JOBS=1"),
        ("cc1plus: out of memory allocating 65536 bytes", "MAX_JOBS=1"),
        ("fatal error: error writing to /tmp/a.s: No space left on device", "TMPDIR"),
        ("c++: internal compiler error: File size limit exceeded signal terminated", "ulimit -f"),
        ("nvcc error   : 'cicc' died due to signal 24", "ulimit -t"),
        ("c++: fatal error: Terminated signal terminated program cc1plus", "a signal ended it"),
        ("nvcc error   : 'g++' died due to signal 15", "a signal ended it"),
        ("Terminated\nexit status 143", "a signal ended it"),
        ("ninja: build stopped: interrupted by user.", "a signal ended it"),
        ("nvcc error   : 'g++' died due to signal 11", "report it with the log"),
        ("k.h:1:10: fatal error: cutlass/cutlass.h: No such file or directory", "nvidia-cutlass"),
        ("unit.cpp:2:10: fatal error: cstdint: No such file or directory", "g++ on Debian"),
        ("unit.cpp:2:10: fatal error: my.h: No such file or directory", "a header is missing"),
        ("k.h:1:10: fatal error: 'cute/tensor.hpp' file not found", "nvidia-cutlass"),
        ("unit.cpp:2:10: fatal error: 'cmath' file not found", "g++ on Debian"),
        ("unit.cpp:2:10: fatal error: 'my.h' file not found", "a header is missing"),
        ("c++: error: unrecognized command-line option '-mavx512bf16'", "too old"),
        ("clang: error: unknown argument: '-mamx-tile'", "too old"),
        ("/usr/bin/ld: cannot find -lcudart_static: No such file or directory", "library to link"),
        ("sh: 1: /opt/c++: not found\nexit status 127", "program is missing"),
        ("unit.cpp:1:1: internal compiler error: Segmentation fault", "another version, in CXX"),
        (f'{OURS}(15): error: static assertion failed with "no N"', "adding-a-kernel.md"),
        (f"{OURS}:15:3: error: static assertion failed: no N", "adding-a-kernel.md"),
        ("vector:15:3: error: static assertion failed: no N", "report it with the log"),
        ("unit.cpp:1:1: error: expected ';'", "report it with the log"),
        ("", "report it with the log"),
    ],
)
def test_hint(tmp_path, log, hint):
    assert hint in message(log, tmp_path).partition("hint: ")[2]


def test_a_compiler_that_says_nothing_of_a_full_disk(tmp_path):
    """nvcc's own words are "Failed to preprocess host compiler properties" and the like."""
    log = "nvcc fatal   : Failed to preprocess host compiler properties."
    full = Failed(JOB, log, "nvcc", free_bytes=3 << 20, folder=Path("/scratch/x"))
    assert "disk may be full, 3.0 MiB are left in /scratch/x" in str(explain(full, tmp_path))
    assert not is_lasting(full), "others may find more room"
    roomy = replace(full, free_bytes=3 << 30)
    assert "disk" not in str(explain(roomy, tmp_path)) and is_lasting(roomy)
