"""The cache looked after: last use, the size cap, and `python -m deepspeed4science cache`."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from deepspeed4science import cache_command

from .toys import finish, until

DAY = 86400.0
PAD = "__attribute__((used)) static const char kPad[600000] = {1};\n"  # three toys are under 2 MiB


@pytest.fixture
def big(workshop):
    """Toys of more than half a MiB."""
    (workshop.include / "toy.h").write_text(f"#define TOY_STATUS 40\n{PAD}")
    return workshop


def folder_of(workshop, name):
    (folder,) = [entry for entry in workshop.entries if entry.name.startswith(f"{name}-")]
    return folder


def set_age(folder, days):
    os.utime(folder, (time.time() - days * DAY,) * 2)


def age_days(folder):
    return (time.time() - folder.stat().st_mtime) / DAY


def names(workshop):
    return sorted(entry.name.partition("-")[0] for entry in workshop.entries)


def test_a_load_is_remembered_to_the_hour(workshop):
    """Not each one: a thousand ranks must not write to one folder at once."""
    workshop.run()
    (entry,) = workshop.entries
    for before, after in ((3.0, 0.0), (0.5 / 24, 0.5 / 24), (-3.0, 0.0)):  # -3: of a wrong clock
        set_age(entry, before)
        assert workshop.run().origin == "cache"
        assert age_days(entry) == pytest.approx(after, abs=0.01)


def test_a_shared_cache_is_not_written(workshop, tmp_path):
    """Nor is one that cannot be, without a word."""
    workshop.run()
    workshop.cache.rename(tmp_path / "shared")
    (entry,) = (tmp_path / "shared" / "units").iterdir()
    set_age(entry, 3.0)
    assert workshop.run(DS4S_CACHE_PATH=str(tmp_path / "shared")).origin == "cache"
    assert age_days(entry) > 2.9


def test_a_readonly_cache_stays_silent(workshop, make_readonly):
    workshop.run()
    set_age(workshop.entries[0], 3.0)
    make_readonly(workshop.cache)
    outcome = workshop.run()
    assert (outcome.origin, outcome.messages) == ("cache", "")


def test_what_was_not_used_for_longest_goes_first(big):
    for name, age in (("a", 9.0), ("b", 8.0), ("c", 7.0)):
        big.run(f"report(**load({name!r}))", DS4S_CACHE_MAX_MB="2")
        set_age(folder_of(big, name), age)
    assert names(big) == ["a", "b", "c"], "three fit"
    big.run("report(**load('a'))", DS4S_CACHE_MAX_MB="2")
    big.run("report(**load('d'))", DS4S_CACHE_MAX_MB="2")
    assert names(big) == ["a", "c", "d"]
    assert big.run("report(**load('b'))", DS4S_CACHE_MAX_MB="0").origin == "built"
    assert names(big) == ["a", "b", "c", "d"], "0 is no limit"


def test_a_process_that_ends_as_soon_as_it_can_evicts_as_well(big):
    """A script that only compiles: it ends while its building thread is still at the end."""
    big.run("report(**load('a', 'b', 'c'))")
    for name in "abc":
        set_age(folder_of(big, name), 9.0)
    script = """
import time
from op_builder.build import build
real = build.Build._check_cancelled
def late(self):
    if self._ninja_run is not None:
        time.sleep(0.3)
    real(self)
build.Build._check_cancelled = late
report(**load("d"))
"""
    assert big.run(script, DS4S_CACHE_MAX_MB="1").origin == "built"
    assert names(big) == ["d"]


def test_what_was_used_within_the_hour_stays(big):
    """Somebody else is about to load it, or the cap is below what one job needs."""
    big.run("report(**load('a', 'b', 'c'))")
    big.run("report(**load('d'))", DS4S_CACHE_MAX_MB="1")
    assert names(big) == ["a", "b", "c", "d"]


def test_a_use_in_the_future_keeps_nothing(big):
    """A clock went wrong and was set right since: such an entry would stay for years."""
    big.run("report(**load('a'))")
    set_age(folder_of(big, "a"), -1000.0)
    big.run("report(**load('b'))")
    big.run("report(**load('c'))", DS4S_CACHE_MAX_MB="1")
    assert names(big) == ["b", "c"]


def test_what_this_process_uses_stays(big):
    """However long ago it was loaded: training runs for weeks."""
    script = """
load("a")
from pathlib import Path
for entry in (workshop.cache / "units").glob("a-*"):
    os.utime(entry, (1, 1))
load("b")
for entry in (workshop.cache / "units").glob("b-*"):
    os.utime(entry, (2, 2))
in_child = os.fork()
if in_child == 0:  # a child has its parent's libraries
    load("c")
    os._exit(0)
os.waitpid(in_child, 0)
report(**load("a"))
"""
    big.run("report(**load('old'))")
    set_age(folder_of(big, "old"), 9.0)
    big.run(script, DS4S_CACHE_MAX_MB="1")
    assert names(big) == ["a", "b", "c"]


def test_damaged_entries_go_first(big):
    big.run("report(**load('a', 'b'))")
    set_age(folder_of(big, "b"), 9.0)
    library = folder_of(big, "a") / "a.so"
    library.write_bytes(library.read_bytes()[:500_000])
    big.run("report(**load('a'))", DS4S_CACHE_MAX_MB="0")
    assert len(list((big.cache / "aside").iterdir())) == 1
    big.run("report(**load('c'))", DS4S_CACHE_MAX_MB="2")
    assert names(big) == ["a", "b", "c"]
    assert list((big.cache / "aside").iterdir()) == []


def test_a_limit_that_is_no_number_costs_a_warning(workshop):
    outcome = workshop.run(DS4S_CACHE_MAX_MB="2 GB")
    assert (outcome.origin, outcome.report["answer"]) == ("built", [42])
    assert "DS4S_CACHE_MAX_MB: expected a whole number or 0, got '2 GB'" in outcome.messages


def test_many_processes_build_load_and_evict_at_once(big):
    """Everybody always gets the right answer; in the end the cache is within its limit."""
    script = """
from op_builder.cache import cache, loaded_kernel
from op_builder.build.loader import Loader
cache.USE_GRAIN_S = -10.0  # nothing is safe for having been used just now
answers = []
for name in 4 * ("a", "b", OWN, "c"):
    loader = Loader(jit.search.roots)  # as a new process would
    (kernel,) = loader.load([toy(name)], verbose=False)
    answers.append(kernel.run((2).to_bytes(4, sys.byteorder), 0))
    loaded_kernel._in_use.clear()
report(answers=answers)
"""
    processes = [
        big.spawn(script.replace("OWN", repr(f"own{i}")), DS4S_CACHE_MAX_MB="1") for i in range(3)
    ]
    outcomes = [finish(process, timeout=200) for process in processes]
    assert all(outcome.report["answers"] == [42] * 16 for outcome in outcomes)
    assert big.num_compilations() > 6, "six kernels, some of them evicted and compiled again"
    big.run(
        "from op_builder.cache import cache\ncache.USE_GRAIN_S = -10.0\nreport(**load('last'))",
        DS4S_CACHE_MAX_MB="1",
    )
    assert names(big) == ["last"]


def test_killed_while_removing(big):
    """Half of an entry is never seen, and what is left goes with the next build."""
    big.run("report(**load('a', 'b'))")
    for name, age in (("a", 10.0), ("b", 9.0)):
        set_age(folder_of(big, name), age)
    script = """
import signal
def die(path, **more):
    os.kill(os.getpid(), signal.SIGKILL)
from op_builder.cache import staging
staging.shutil = type(sys)("shutil")
staging.shutil.rmtree = die
load("c")
sys.stdin.readline()
"""
    process = big.spawn(script, DS4S_CACHE_MAX_MB="1")
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert [name[:4] for name in names(big)] == [".unf", "b", "c"], "a is gone as a whole"
    assert big.run("report(**load('d'))").origin == "built"
    assert [name.startswith(".unfinished") for name in names(big)].count(True) == 0


@pytest.fixture
def command(workshop, monkeypatch, capsys):
    """A function that runs `cache ...` on the toys' cache; what it prints, or its error."""
    monkeypatch.setenv("DS4S_CACHE_DIR", str(workshop.cache))
    monkeypatch.delenv("DS4S_CACHE_PATH", raising=False)

    def run(*arguments, code=0):
        assert cache_command.main(arguments) == code
        said = capsys.readouterr()
        return said.err if code else said.out

    return run


def test_list(workshop, command, monkeypatch, tmp_path):
    """Each entry with its place, size, age and origin, also of folders that others share."""
    workshop.run("report(**load('a', 'b'))")
    workshop.cache.rename(tmp_path / "shared")
    monkeypatch.setenv("DS4S_CACHE_PATH", str(tmp_path / "shared"))
    workshop.run("report(**load('c'))")
    set_age(folder_of(workshop, "c"), 9.0)
    rows = [row for row in json.loads(command("list", "--json")) if row["place"] != "install"]
    assert [(row["place"], row["name"]) for row in rows] == [
        ("shared", "a"),
        ("shared", "b"),
        ("cache", "c"),
    ]
    assert all(row["host"] == os.uname().nodename and row["seconds"] > 0 for row in rows)
    assert rows[2]["size_bytes"] == sum(
        file.stat().st_size for file in folder_of(workshop, "c").iterdir()
    )
    text = command("list")
    (line,) = [line for line in text.splitlines() if line.startswith("cache    c ")]
    assert "9 d" in line and f"on {os.uname().nodename} in" in line
    assert f"cache: {workshop.cache}, " in text and "of 2048 MiB" in text


CHANGES = {
    "flags": 'flags=("-O2", "-fPIC")',
    "link flags": 'link_flags=("-Wl,-O1",)',
    "compiler": 'identity=(("compiler", "toy 1.1"),)',
    "source": 'source=toy().source + "// more\\n"',
}


@pytest.mark.parametrize(("component", "change"), CHANGES.items(), ids=CHANGES)
def test_explain_says_which_component_changed(workshop, command, component, change):
    """That one and no other."""
    workshop.run()
    workshop.run(f"jit.load([toy({change})])\nreport()")
    lines = command("explain", "toy").splitlines()
    changed = [line for line in lines[2:] if not line.startswith("    ")]
    assert len(changed) == 1 and changed[0].startswith(f"  {component}: ")
    assert (lines[-1] == "    +// more") == (component == "source")
    listed = [line.split()[2] for line in command("list").splitlines() if " toy " in line]
    whole = [entry.name.removeprefix("toy-") for entry in workshop.entries]
    assert len(set(listed)) == 2, "told apart"
    for keys in (listed, whole):
        assert f"  {component}: " in command("explain", *keys)


def test_explain_names_a_changed_header(workshop, command):
    workshop.run()
    workshop.write_header(50)
    workshop.run()
    lines = command("explain", "toy").splitlines()
    assert len(lines) == 3 and lines[2].startswith("  header toy.h: ")


def test_explain_what_cannot_be(workshop, command):
    workshop.run()
    assert "there is no entry nothing" in command("explain", "nothing", code=1)
    assert "there is only one entry toy" in command("explain", "toy", code=1)
    assert "one name or two keys, got 3" in command("explain", "a", "b", "c", code=1)


def test_clear(workshop, command, monkeypatch, tmp_path):
    """By name, by age, all; what others share stays."""
    workshop.run("report(**load('shared'))")
    workshop.cache.rename(tmp_path / "shared")
    workshop.run("report(**load('a', 'b', 'c', 'd'))")
    monkeypatch.setenv("DS4S_CACHE_PATH", str(tmp_path / "shared"))
    set_age(folder_of(workshop, "d"), 40.0)
    assert "removed 1 kernels" in command("clear", "--unused-days", "30")
    assert names(workshop) == ["a", "b", "c"]
    assert "removed 1 kernels" in command("clear", folder_of(workshop, "a").name)
    assert names(workshop) == ["b", "c"]
    assert "holds no entry shared" in command("clear", "shared", code=1)
    assert "removed 2 kernels" in command("clear")
    assert names(workshop) == []
    assert len(list((tmp_path / "shared" / "units").iterdir())) == 1
    assert workshop.run("report(**load('b'))").origin == "built"


def test_other_peoples_folders_stay(big, command):
    """Somebody named a folder that he uses himself."""
    own = [
        big.cache / place
        for place in ("units/mine/file", "aside/mine/file", "failed/file", "memo/file")
    ]
    for file in own:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(4 << 20))
    set_age(own[0].parent, 2.0)
    big.run(DS4S_CACHE_MAX_MB="1")
    command("clear")
    assert names(big) == ["mine"] and all(file.exists() for file in own)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("",), "expected a name or key"),
        *((("--unused-days", days), "a number of days, 0 or more") for days in ("-1", "nan", "x")),
    ],
)
def test_clear_of_what_nobody_means_is_refused(options, message, workshop, command, capsys):
    workshop.run()
    with pytest.raises(SystemExit, match="2"):
        command("clear", *options)
    assert message in capsys.readouterr().err
    assert names(workshop) == ["toy"]


def test_clear_what_cannot_be_written(workshop, command, make_readonly):
    workshop.run()
    make_readonly(workshop.cache)
    assert "1 could not be removed" in command("clear", code=1)
    assert names(workshop) == ["toy"]


def test_clearing_under_a_running_process(workshop, command):
    """What is loaded stays usable."""
    process = workshop.spawn("load()\nsys.stdin.readline()\nreport(**load())")
    until(lambda: names(workshop) == ["toy"] and not list((workshop.cache / "locks").glob("x")))
    process.stderr.readline(), process.stderr.readline()
    command("clear")
    process.stdin.write("go\n")
    process.stdin.flush()
    assert finish(process).report["answer"] == [42]
