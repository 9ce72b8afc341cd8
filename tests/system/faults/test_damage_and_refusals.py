"""What goes wrong on real machines, really done: damage, unwritable disks, failing tools."""

import contextlib
import json
import os
import re
import shutil
import struct
from pathlib import Path

import pytest

from op_builder.cache.loaded_kernel import ABI_VERSION as ABI

pytestmark = pytest.mark.parametrize("workshop", ["C++", "CUDA"], indirect=True)

FAILS = "\ntry:\n    load()\nexcept {error} as error:\n    report(error=str(error))\n"


def test_second_process_finds_the_first_ones_build(workshop):
    """Compiled once, then loaded from the cache without running a compiler."""
    first, second = workshop.run(), workshop.run()
    assert (first.origin, second.origin) == ("built", "cache")
    assert first.report["answer"] == second.report["answer"] == [42]
    assert first.report["path"] == second.report["path"]
    assert workshop.num_compilations() == 1
    assert "compiling toy" in first.messages
    assert second.messages == ""


def _truncate(library, meta):
    library.write_bytes(library.read_bytes()[:1000])


def _empty(library, meta):
    library.write_bytes(b"")


def _lose(library, meta):
    library.unlink()


def _flip_one_byte(library, meta):
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(data)


def _other_machine(library, meta):
    data = bytearray(library.read_bytes())
    data[18:20] = struct.pack("<H", 183 if data[18] == 62 else 62)  # AArch64 for x86-64
    library.write_bytes(data)


def _cut_meta(library, meta):
    meta.write_text(meta.read_text()[:100])


def _lose_meta(library, meta):
    meta.unlink()


DAMAGES = {
    _truncate: "toy.so has 1000 bytes, expected ",
    _empty: "toy.so has 0 bytes, expected ",
    _lose: "toy.so cannot be read (No such file or directory)",
    _flip_one_byte: "toy.so has other bytes than when it was published",
    _other_machine: "toy.so has other bytes than when it was published",
    _cut_meta: "its meta.json is damaged",
    _lose_meta: "its meta.json is damaged",
}


@pytest.mark.parametrize(
    ("damage", "words"), DAMAGES.items(), ids=[damage.__name__.strip("_") for damage in DAMAGES]
)
def test_damaged_entry_is_set_aside_and_rebuilt_once(workshop, damage, words):
    """Never a crash, never a wrong library: one warning, one rebuild, then all is well again."""
    workshop.run()
    (entry,) = workshop.entries
    damage(entry / "toy.so", entry / "meta.json")
    second, third = workshop.run(), workshop.run()
    assert (second.origin, third.origin) == ("built", "cache")
    assert second.report["answer"] == third.report["answer"] == [42]
    assert workshop.num_compilations() == 2
    assert "moved to" in second.messages
    assert words in second.messages
    assert (workshop.cache / "aside" / entry.name).is_dir()
    assert third.messages == ""


def test_library_that_needs_a_newer_glibc_is_a_miss(workshop):
    """A cache shared with a newer system: compiled again, and the other's entry is left alone."""
    workshop.run()
    (entry,) = workshop.entries
    meta = json.loads((entry / "meta.json").read_text())
    (entry / "meta.json").write_text(json.dumps(meta | {"glibc": [99, 1]}))
    newer = entry.rename(entry.with_name(entry.name[:-4] + "beef"))  # as its own key would differ
    assert workshop.run().origin == "built"
    assert newer.is_dir()
    assert not (workshop.cache / "aside").exists()


def test_readonly_cache_uses_a_private_copy(workshop, make_readonly):
    """A cache that cannot be written costs a compilation and one warning, not the job."""
    workshop.cache.mkdir()
    make_readonly(workshop.cache)
    for _ in range(2):
        outcome = workshop.run("report(**load('toy', 'other'))")
        assert outcome.report["answer"] == [42, 42]
        assert outcome.messages.count("cannot be kept") == 1
        assert "DS4S_CACHE_DIR" in outcome.messages
    assert list(workshop.build_root.iterdir()) == []


def test_readonly_cache_that_has_the_kernel_is_used(workshop, make_readonly):
    workshop.run()
    make_readonly(workshop.cache)
    outcome = workshop.run()
    assert (outcome.origin, outcome.messages) == ("cache", "")


def test_damaged_entry_in_a_readonly_cache_is_passed_over(workshop, make_readonly):
    workshop.run()
    _truncate(workshop.entries[0] / "toy.so", None)
    make_readonly(workshop.cache)
    outcome = workshop.run()
    assert (outcome.origin, outcome.report["answer"]) == ("built", [42])
    assert "cannot be kept" in outcome.messages


def test_full_disk_under_the_cache_uses_a_private_copy(workshop, mount_tmpfs):
    """ENOSPC in the middle of publishing leaves nothing behind."""
    mount_tmpfs(workshop.cache, "4m")
    filler = workshop.cache / "filler"
    filler.write_bytes(b"0" * (4096 - 12) * 1024)
    outcome = workshop.run()
    assert (outcome.origin, outcome.report["answer"]) == ("built", [42])
    assert "No space left on device" in outcome.messages
    remedy = "free some space there, or set DS4S_CACHE_DIR to a folder on another disk"
    assert remedy in outcome.messages and "TMPDIR" not in outcome.messages
    assert workshop.entries == []
    filler.unlink()
    assert workshop.run().origin == "built"
    assert workshop.run().origin == "cache"


def test_full_temporary_folder_is_passed_over(workshop, mount_tmpfs):
    """The system has others; the compilers' own files go where we compile."""
    mount_tmpfs(workshop.build_root, "16k")
    with contextlib.suppress(OSError):  # it is to be full
        (workshop.build_root / "filler").write_bytes(b"0" * 64 * 1024)
    assert workshop.run().origin == "built"


def test_temporary_folder_too_small_to_compile_in_is_told(workshop, mount_tmpfs):
    mount_tmpfs(workshop.build_root, "24k")
    error = workshop.run(FAILS.format(error="BuildError")).report["error"]
    assert re.search("hint: the disk (is|may be) full.* set TMPDIR", error)


@pytest.fixture
def home(workshop, tmp_path, make_readonly):
    """A home that cannot be written; its cache holds one kernel that somebody else put there."""
    workshop.run("report(**load('old'))")
    folder = tmp_path / "home"
    (folder / ".cache").mkdir(parents=True)
    workshop.cache.rename(folder / ".cache" / "deepspeed4science")
    make_readonly(folder)
    return folder


def test_unwritable_home_gives_way_to_a_temporary_folder(workshop, home):
    """Compiled once for all processes of this user here, and told once; what is there is used."""
    places = {"HOME": str(home), "DS4S_CACHE_DIR": "", "XDG_CACHE_HOME": ""}
    first = workshop.run("report(**load('toy', 'other'))", **places)
    assert first.report["origin"] == ["built", "built"]
    kept = workshop.build_root / f"deepspeed4science-{os.geteuid()}"
    assert all(Path(path).is_relative_to(kept) for path in first.report["path"])
    assert first.messages.count(f"{home}/.cache/deepspeed4science cannot be written") == 1
    assert "set DS4S_CACHE_DIR" in first.messages
    second = workshop.run("report(**load('toy', 'old'))", **places)
    assert (second.report["origin"], second.messages) == (["cache", "cache"], "")
    assert second.report["path"][1].startswith(str(home))


def test_cache_path_below_a_file(workshop):
    """A cache folder that cannot exist is like one that cannot be written."""
    workshop.cache.write_text("a file, not a folder")
    outcome = workshop.run()
    assert (outcome.origin, outcome.report["answer"]) == ("built", [42])
    assert "cannot be kept" in outcome.messages


def test_compile_error_shows_the_compilers_first_error(workshop):
    """The error a person needs: first error with its lines, command, whole log, and a hint."""
    workshop.include.joinpath("toy.h").write_text(
        'const int kBroken = "text";\n#define TOY_STATUS 0\n'
    )
    error = workshop.run(FAILS.format(error="CompileError")).report["error"]
    assert "compiling toy failed" in error
    assert "> " in error and "kBroken" in error and re.search(r"toy\.h[:(]1", error)
    assert str(workshop.compiler) in error
    log = error.partition("log: ")[2].splitlines()[0]
    assert "kBroken" in Path(log).read_text()
    assert "hint: " in error
    workshop.write_header(40)
    assert workshop.run().origin == "built"


def test_missing_header_is_named(workshop):
    workshop.include.joinpath("toy.h").unlink()
    error = workshop.run(FAILS.format(error="CompileError")).report["error"]
    assert "toy.h: No such file" in error
    assert "hint: a header is missing" in error


def test_other_units_survive_one_that_fails(workshop):
    """One refused source does not throw away what compiled beside it."""
    script = """
jobs = [toy("good"), toy("bad", source="not C++")]
try:
    jit.load(jobs)
except CompileError as error:
    report(error=str(error), good=load("good")["origin"])
"""
    outcome = workshop.run(script)
    assert "compiling bad failed" in outcome.report["error"]
    assert outcome.report["good"] == ["built"]
    assert workshop.run("report(**load('good'))").origin == "cache"


def test_compiler_killed_for_memory_gets_the_hint(workshop):
    workshop.set_compiler("kill -9 $$")
    error = workshop.run(FAILS.format(error="CompileError")).report["error"]
    assert "hint: the machine ran out of memory" in error
    assert "MAX_JOBS=1" in error


@pytest.mark.parametrize("victims", ["$ninja", "$ninja $shell"])
def test_ninja_ended_by_a_signal_is_no_fault_of_the_compiler(workshop, victims):
    """As by a scheduler that sends SIGUSR1 to all programs of a job."""
    parent = "while read name id; do [ $name = PPid: ] && echo $id; done < /proc/$1/status"
    find = f"of() {{ {parent}; }}; ninja=$(of $PPID); shell=$(of $ninja)"
    workshop.set_compiler(f"{find}; kill -USR1 {victims}; sleep 1")
    error = workshop.run(FAILS.format(error="CompileError")).report["error"]
    assert "hint: a signal ended it" in error


def test_compiler_that_vanished_is_told(workshop):
    workshop.compiler.unlink()
    error = workshop.run(FAILS.format(error="CompileError")).report["error"]
    assert str(workshop.compiler) in error
    assert "hint: a program is missing" in error


def test_no_compiler_at_all(workshop):
    """Without a compiler the reason and the remedy are told; a cached library is still used."""
    without = """
job = toy(compiler=None, identity=(), problem="host compiler: not found; install g++")
try:
    kernel, = jit.load([job])
    report(origin=[kernel.origin])
except ToolchainError as error:
    report(error=str(error))
"""
    assert workshop.run(without).report == {"error": "host compiler: not found; install g++"}
    workshop.run()
    assert workshop.run(without).origin == "cache"


def test_compiler_that_succeeds_with_rubbish(workshop):
    """Exit status 0 is not believed: what cannot be loaded is never published."""
    workshop.set_compiler(
        'while [ "$1" != -o ]; do shift; done; echo rubbish > "$2"; touch toy.d; exit 0'
    )
    error = workshop.run(FAILS.format(error="BuildError")).report["error"]
    assert "toy" in error
    assert workshop.entries == []


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("ds4s_run", "ds4s_ran", "got none named ds4s_run"),
        (f"return {ABI};", "return 99;", f"expected toy with ABI version {ABI}, got toy with 99"),
        (
            'return "toy";',
            'return "tot";',
            f"expected toy with ABI version {ABI}, got tot with {ABI}",
        ),
    ],
    ids=["export", "abi", "name"],
)
def test_library_that_is_not_what_was_asked_for(workshop, before, after, words):
    source = workshop.source().replace(before, after)
    assert source != workshop.source()
    script = f"""
try:
    jit.load([toy(source={source!r})])
except BuildError as error:
    report(error=str(error))
"""
    assert words in workshop.run(script).report["error"]
    assert workshop.entries == []


def test_missing_ninja(workshop):
    script = """
from op_builder.build import build
from op_builder.toolchain.tool import Tool
import op_builder.toolchain.ninja as ninja
missing = Tool("ninja", reason="ninja was not found", remedy="pip install ninja")
ninja.find_ninja = lambda: missing
try:
    load()
except ToolchainError as error:
    report(error=str(error))
"""
    error = workshop.run(script).report["error"]
    assert "ninja was not found; pip install ninja" in error


def test_leftovers_of_killed_processes_are_removed(workshop):
    """What a SIGKILL left in the cache and in the temporary folder goes with the next build."""
    script = """
import os, signal
from op_builder.build import workdir
from op_builder.cache import cache
real = os.rename
def die(source, target):
    if "units" in str(target):
        os.kill(os.getpid(), signal.SIGKILL)
    real(source, target)
os.rename = die
load()
"""
    process = workshop.spawn(script)
    process.communicate(timeout=60)
    assert process.returncode == -9
    assert [path.name.startswith(".unfinished") for path in workshop.entries] == [True]
    assert len(list(workshop.build_root.iterdir())) == 1
    assert workshop.run().origin == "built"
    assert [path.name.startswith("toy-") for path in workshop.entries] == [True]
    assert list(workshop.build_root.iterdir()) == []


def test_folders_of_another_host_are_left_alone(workshop):
    """Where TMPDIR is on a file system whose locks each host knows alone, a running build of
    another host looks abandoned.
    """
    script = """
import fcntl, os, socket
fcntl.flock = lambda handle, operation: None
socket.gethostname = lambda: "host"
from op_builder.build import workdir
mine = workdir.create()
socket.gethostname = lambda: "other-host"
theirs = workdir.create()
report(names=[mine.name[-5:], theirs.name[-11:]], there=mine.exists())
"""
    names = ["-host", "-other-host"]
    assert workshop.run(script).report == {"names": names, "there": True}


def test_a_folder_without_its_name_is_removed_after_an_hour(workshop):
    """A process was killed before it gave the folder its name; another one is about to do so."""
    old, new = workshop.build_root / ".ds4s-new-old", workshop.build_root / ".ds4s-new-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "alive").write_text("")
    os.utime(old, (0, 0))
    workshop.run()
    assert list(workshop.build_root.iterdir()) == [new]


def test_entry_copied_by_hand_is_found(workshop, tmp_path):
    """A cache is a folder like any other: baked into an image, it is read and never written."""
    workshop.run()
    shutil.copytree(workshop.cache, tmp_path / "image")
    outcome = workshop.run(
        DS4S_CACHE_PATH=f"{tmp_path}/absent:{tmp_path}/image", DS4S_CACHE_DIR=str(tmp_path / "new")
    )
    assert outcome.origin == "cache"
    assert outcome.report["path"][0].startswith(f"{tmp_path}/image/")
    assert not (tmp_path / "new" / "units").exists()
