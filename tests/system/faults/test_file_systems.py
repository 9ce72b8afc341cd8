"""File systems that refuse calls, and a container's layers."""

import json
import os
import subprocess

import pytest

from op_builder.toolchain import memo

REFUSE = """
import errno
def refuse(*arguments, **how): raise OSError(errno.{error}, "refused")
os.fsync = os.chmod = os.fchmod = os.utime = refuse
report(**load())
"""


@pytest.mark.parametrize("error", ["EPERM", "EINVAL", "ENOSYS", "ENOTSUP"])
def test_calls_that_a_file_system_does_not_know(workshop, error):
    """FUSE and CIFS know neither fsync nor chmod: kernels are kept all the same."""
    outcome = workshop.run(REFUSE.format(error=error))
    assert outcome.report["answer"] == [42]
    assert "cannot be kept" not in outcome.messages
    assert workshop.run().origin == "cache"


@pytest.fixture
def layered(workshop, tmp_path):
    """The workshop's cache as a container sees one of its image: below a layer of its own."""
    workshop.run()
    lower, upper, work = (tmp_path / name for name in ("lower", "upper", "work"))
    workshop.cache.rename(lower)
    for folder in (upper, work, workshop.cache):
        folder.mkdir()
    options = f"lowerdir={lower},upperdir={upper},workdir={work},redirect_dir=off"
    mount = ["mount", "-t", "overlay", "-o", options, "overlay", str(workshop.cache)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"layers cannot be mounted here: {done.stderr.strip()}")
    yield workshop
    subprocess.run(["umount", "-l", str(workshop.cache)], check=True)


def damage(entry):
    (entry / "toy.so").write_bytes(b"damaged")


def test_damaged_entry_of_a_lower_layer_heals(layered):
    """It cannot be renamed there: once compiled again, all is well."""
    damage(layered.entries[0])
    assert layered.run().origin == "built"
    assert layered.run().origin == "cache"
    assert layered.num_compilations() == 2


def test_cache_of_a_lower_layer_is_cleared(layered):
    script = "from deepspeed4science import cache_command as c\nreport(code=c.main(['clear']))"
    process = layered.spawn(script)
    stdout, stderr = process.communicate(timeout=60)
    assert '"code": 0' in stdout, stderr
    assert "removed 1 kernels" in stdout
    assert layered.entries == []


EXDEV = """
import errno
rename = os.rename
def of_another_layer(source, target):
    if os.path.basename(str(source)).startswith("toy-"):
        raise OSError(errno.EXDEV, "Invalid cross-device link")
    rename(source, target)
os.rename = of_another_layer
"""


def test_damaged_entry_that_cannot_be_renamed(workshop):
    """As above, where no layers can be mounted."""
    workshop.run()
    damage(workshop.entries[0])
    assert workshop.run(EXDEV + "report(**load())").origin == "built"
    assert workshop.run().origin == "cache"
    clear = "from deepspeed4science import cache_command as c\ncode = c.main(['clear'])\n"
    process = workshop.spawn(EXDEV + clear + "sys.exit(code)")
    assert process.wait(60) == 0
    assert workshop.entries == []


def test_damaged_entry_that_cannot_even_be_removed(workshop):
    """It is another's, or of a mount of its own: a second name beside it serves from then on."""
    workshop.run()
    (entry,) = workshop.entries
    damage(entry)
    script = EXDEV + "import shutil\nshutil.rmtree = lambda *a, **k: None\n"
    keep_meta = (
        "unlink = os.unlink\nos.unlink = lambda p: None if 'meta' in str(p) else unlink(p)\n"
    )
    outcome = workshop.run(script + keep_meta + "report(**load())")
    assert outcome.report["path"][0].endswith(f"{entry.name}.2/toy.so")
    second = workshop.run()
    assert (second.origin, second.report["answer"]) == ("cache", [42])
    assert workshop.num_compilations() == 2


WRONG = [None, 7, -7, 1.5, "text", [], {}, [[1]], [None], {"a": 1}, True, "\udcff"]
FIELDS = [
    *("layout", "name", "flags", "identity", "headers", "machine", "glibc", "size", "sha256"),
    *("seconds", "created"),
]


@pytest.mark.parametrize("field", FIELDS)
def test_meta_of_wrong_types(workshop, field):
    """Right shape, wrong types, in one process for speed: found damaged, never a TypeError."""
    workshop.run()
    (meta,) = workshop.cache.glob("units/*/meta.json")
    whole = json.loads(meta.read_text())
    script = f"""
import contextlib, io, pathlib
from op_builder.cache import cache, search
from op_builder.cache.key import Hashes
from deepspeed4science import cache_command
meta, whole, wrong = pathlib.Path({str(meta)!r}), {whole!r}, {WRONG!r}
for value in wrong:
    meta.write_text(json.dumps(whole | {{{field!r}: value}}))
    with contextlib.redirect_stdout(io.StringIO()):
        cache_command.main(["list"])
    list(search.fitting(search.roots()[-1], toy(), Hashes()))
    cache.last_seconds(search.roots()[-1].path, "toy")
with contextlib.redirect_stdout(io.StringIO()):
    code = cache_command.main(["clear"])
report(code=code, left=os.listdir(search.roots()[-1].path / "units"))
"""
    assert workshop.run(script).report == {"code": 0, "left": []}


@pytest.mark.parametrize("answer", WRONG[:-1])
def test_memo_of_wrong_types(tmp_path, monkeypatch, answer):
    """Whoever changed it: it is asked for again."""
    monkeypatch.setenv("DS4S_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(memo, "_answers", {})
    memo.remember("kind", "key", lambda: {"version": "13.0"})
    (path,) = (tmp_path / "cache" / "memo").iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"answer": answer}))
    monkeypatch.setattr(memo, "_answers", {})
    assert memo.remember("kind", "key", lambda: {"version": "13.1"}) == {"version": "13.1"}


@pytest.mark.parametrize("what", ["{entry}", "{entry}/meta.json", "{entry}/toy.so"])
def test_fifo_in_the_place_of(workshop, what):
    """Opened as a file is, it would be waited for until somebody writes."""
    workshop.run()
    path = workshop.cache / "units" / what.format(entry=workshop.entries[0].name)
    if path.is_dir():
        path.rename(workshop.root / "old")
    else:
        path.unlink()
    os.mkfifo(path)
    assert workshop.run().origin == "built"
    assert workshop.run().origin == "cache"


def test_fifo_in_the_place_of_a_memo(tmp_path, monkeypatch):
    monkeypatch.setenv("DS4S_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(memo, "_answers", {})
    memo.remember("kind", "key", lambda: 1)
    (path,) = (tmp_path / "cache" / "memo").iterdir()
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(memo, "_answers", {})
    assert memo.remember("kind", "key", lambda: 2) == 2
    assert path.is_file()
