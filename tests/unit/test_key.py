"""Keys and headers, without a compiler (with one: tests/system/test_content_key.py)."""

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from op_builder.build.ninja_run import NinjaRun
from op_builder.cache.key import (
    SYSTEM,
    CompileJob,
    Hashes,
    Header,
    content_key,
    headers_from_depfile,
)

JOB = CompileJob(
    name="unit",
    source="int x;\n",
    suffix=".cpp",
    compiler=Path("/usr/bin/c++"),
    flags=("-O3",),
    include_dirs=(Path("/include"),),
    link_flags=("-lm",),
    identity=(("compiler", "gcc 12.2.0"), ("target", "x86_64")),
)
HEADER = Header(0, "a.h", "00ff")


def key(job=JOB, headers=(HEADER,), machine=62, glibc=(2, 34)):
    return content_key(job, headers, machine, glibc)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"source": "int y;\n"},
        {"suffix": ".cu"},
        {"flags": ("-O2",)},
        {"flags": ("-O3", "")},
        {"link_flags": ()},
        {"flags": ("-O3", "-lm"), "link_flags": ()},
    ],
    ids=str,
)
def test_what_is_asked_for_changes_both_parts(change):
    changed = replace(JOB, **change)
    assert changed.asked != JOB.asked
    assert key(changed) != key()


def test_the_compiler_changes_the_second_part_alone():
    """So that a library made for other machines can be found by what was asked for."""
    changed = replace(JOB, identity=(("compiler", "gcc 13.1.0"), ("target", "x86_64")))
    assert changed.asked == JOB.asked
    assert changed.ident != JOB.ident
    assert key(changed) != key()
    assert key(changed)[:12] == key()[:12] == JOB.asked


@pytest.mark.parametrize(
    "change",
    [
        {"compiler": Path("/opt/bin/c++")},
        {"include_dirs": (Path("/elsewhere"),)},
        {"local_flags": ("-L/opt/lib",)},
        {"memory_bytes": 1},
        {"problem": "no compiler"},
        {"identity": JOB.identity[::-1]},
    ],
    ids=str,
)
def test_places_and_order_change_nothing(change):
    assert key(replace(JOB, **change)) == key()


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (Header(0, "a.h", "00fe"),),
        (Header(0, "b.h", "00ff"),),
        (Header(1, "a.h", "00ff"),),
        (HEADER, Header(SYSTEM, "/usr/include/c++/12/cstdint", "11")),
    ],
    ids=["none", "content", "name", "folder", "one more"],
)
def test_headers_count(headers):
    assert key(headers=headers) != key()


def test_result_counts():
    """Two hosts with one compiler version may still make what only one of them can load."""
    assert len({key(), key(machine=183), key(glibc=(2, 38))}) == 3


def test_system_headers_count_by_content_not_place():
    here = Header(SYSTEM, "/usr/include/c++/12/cstdint", "11")
    there = Header(SYSTEM, "/opt/gcc/include/c++/12/cstdint", "11")
    assert key(headers=(here,)) == key(headers=(there,))
    assert key(headers=(here,)) != key(headers=(replace(here, sha256="12"),))


def test_key_is_the_same_in_every_process():
    """Nothing random (hash seeds, set order) goes in: this value, as long as this layout."""
    assert JOB.asked == "52be68cb29b9"


def test_depfile(tmp_path):
    """As gcc and nvcc write them: lines continued, blanks and # escaped, $ doubled, empty rules;
    backslashes stay as they are.
    """
    include, system, build = (tmp_path / name for name in ("in clude\\x2d", "sys#tem", "build"))
    for folder in (include / "sub", system, build):
        folder.mkdir(parents=True)
    for path in (include / "a.h", include / "sub" / "b$.h", system / "c.h", build / "unit.cpp"):
        path.write_text(path.name)

    def make(path):
        return str(path).replace("$", "$$").replace("#", "\\#").replace(" ", "\\ ")

    text = (
        f"unit.o: unit.cpp \\\n {make(include / 'a.h')} {make(system / 'c.h')} \\\n"
        f" {make(include / 'sub' / '..' / 'a.h')} {make(include / 'sub' / 'b$.h')}\n"
        f"{make(include / 'a.h')}:\n"
    )
    headers = headers_from_depfile(text, build, replace(JOB, include_dirs=(include,)))
    names = [(header.root, header.name) for header in headers]
    assert names == [(SYSTEM, str(system / "c.h")), (0, "a.h"), (0, "sub/b$.h")]
    hashes = Hashes()
    for header in headers:
        assert hashes.of(header.path((include,))) == header.sha256
    (include / "a.h").unlink()  # since it was read
    gone = headers_from_depfile(text, build, replace(JOB, include_dirs=(include,)))
    assert [header.name for header in gone if not header.sha256] == ["a.h"]


def test_hash_of_what_is_not_there():
    assert Hashes().of("/nowhere/a.h") is None
    assert HEADER.path(()) == "", "a job with fewer folders has no such header"


def test_a_header_changed_behind_its_time_has_a_new_hash(tmp_path):
    """As rsync leaves it: the same size and modification time."""
    header = tmp_path / "a.h"
    header.write_text("1")
    before, first = header.stat(), Hashes().of(str(header))
    assert Hashes().of(str(header)) == first
    while header.stat().st_ctime_ns == before.st_ctime_ns:  # the file system's clock ticks slowly
        header.write_text("2")
        os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert Hashes().of(str(header)) != first


def test_a_header_that_is_written_while_it_is_read(tmp_path, monkeypatch):
    """Not one whose time is in the future: it is a file server's, whose clock is another."""
    header = tmp_path / "a.h"
    run = NinjaRun(tmp_path, [], Path("ninja"))
    run._began_ns = time.time_ns() - 10**9
    header.touch()
    changed = partial(run._changed, JOB, [Header(SYSTEM, str(header), "its hash")])
    assert changed() == str(header)
    monkeypatch.setattr("time.time_ns", lambda: run._began_ns)
    assert changed() == ""
