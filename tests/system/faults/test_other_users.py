"""Folders that others may write: nothing of theirs is loaded, and they stop nothing of ours."""

import os
import shutil
import socket
import stat
from types import SimpleNamespace

import pytest

from op_builder.system import files, ownership

from .people import NOBODY

OTHER = NOBODY - 1  # somebody else again


def mode(path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.fixture
def planted(his, open_folder):
    """A function that makes everything in his cache another user's, whose library says so."""
    if os.geteuid() != 0:
        pytest.skip("needs the right to give files away")

    def plant(*places, owner=OTHER, bits=None):
        for place in places:
            os.chown(place, owner, owner)
            if bits is not None:
                os.chmod(place, bits)

    his.run()
    his.set_compiler("")
    return plant


@pytest.mark.parametrize("what", ["root", "units", "entry", "library"])
def test_library_of_another_user_is_not_loaded(his, planted, what):
    entry = his.entries[0]
    places = {
        "root": his.cache,
        "units": his.cache / "units",
        "entry": entry,
        "library": entry / "toy.so",
    }
    planted(places[what], bits=0o755)
    outcome = his.run()
    assert (outcome.origin, outcome.report["answer"]) == ("built", [42])
    assert f"{places[what]} belongs to user {OTHER}" in outcome.messages
    assert outcome.messages.count("passed over") == 1
    assert "DS4S_CACHE_DIR" in outcome.messages


@pytest.mark.parametrize("what", ["root", "units", "entry", "library"])
@pytest.mark.parametrize("bits", [0o1777, 0o777, 0o775, 0o2775])
def test_what_others_may_write_is_not_loaded(his, what, bits):
    """777 for everybody; 775 where the group is not the user's own; 2775 is what `mkdir` makes in a
    project's folder; 1777 is meant so, as /tmp: its rights are not to be taken away.
    """
    his.run()
    entry = his.entries[0]
    places = {
        "root": his.cache,
        "units": his.cache / "units",
        "entry": entry,
        "library": entry / "toy.so",
    }
    os.chmod(places[what], bits)
    outcome = his.run()
    assert (outcome.origin, outcome.report["answer"]) == ("built", [42])
    mend = "name a folder of your own" if bits == 0o1777 else f"chmod go-w {places[what]}, or "
    assert f"{places[what]} can be written by others ({mend}" in outcome.messages
    if what in ("root", "units"):  # many containers' volumes are such folders
        assert outcome.report["path"][0].startswith(f"{his.cache}/deepspeed4science-")
        assert his.run().origin == "cache"
    os.chmod(places[what], bits & ~0o1022)
    assert his.run().origin == "cache"


def test_link_to_another_users_folder(his, planted, open_folder):
    elsewhere = open_folder / "elsewhere"
    his.cache.rename(elsewhere)
    his.cache.symlink_to(elsewhere)
    planted(elsewhere)
    outcome = his.run()
    assert outcome.origin == "built"
    assert f"{his.cache} belongs to user {OTHER}" in outcome.messages


def test_shared_cache_of_root_is_loaded_and_anothers_is_not(his, planted, open_folder):
    """DS4S_CACHE_PATH: who fills a cache for others is root."""
    shared = open_folder / "shared"
    his.cache.rename(shared)
    for place in (shared, *shared.rglob("*")):
        os.chown(place, 0, 0)
        os.chmod(place, 0o755)
    assert his.run(DS4S_CACHE_PATH=str(shared)).origin == "cache"
    planted(shared, *shared.rglob("*"))
    outcome = his.run(DS4S_CACHE_PATH=str(shared))
    assert outcome.origin == "built"
    assert f"{shared} belongs to user {OTHER}" in outcome.messages


def test_group_that_a_folder_was_made_for(his, nobody):
    """A setgid folder of root's is shared with its group: its members believe each other."""
    if not nobody.is_somebody_else:
        pytest.skip("needs root")
    his.cache.mkdir()
    os.chown(his.cache, 0, NOBODY)
    os.chmod(his.cache, 0o2770)
    assert his.run().origin == "built"
    assert his.run().origin == "cache"
    assert mode(his.cache / "locks") == mode(his.cache / "units") == 0o2770
    for place in his.cache.rglob("*"):
        os.chown(place, OTHER, NOBODY)
    assert his.run().origin == "cache"


def test_group_that_somebody_else_made_a_folder_for(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs the right to give files away")
    (tmp_path / "units").mkdir(mode=0o770)
    for place in (tmp_path / "units", tmp_path):
        os.chown(place, OTHER, NOBODY)
        os.chmod(place, 0o2770)
    assert f"{tmp_path} belongs to user {OTHER}" in ownership.doubt_about(tmp_path)


@pytest.mark.parametrize(
    ("members", "is_own"), [([], True), (["me"], True), (["me", "you"], False)]
)
def test_own_group_has_one_member(members, is_own, monkeypatch):
    user = SimpleNamespace(pw_gid=77, pw_name="me")
    group = SimpleNamespace(gr_name="me", gr_mem=members)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: user)
    monkeypatch.setattr("grp.getgrgid", lambda gid: group)
    assert ownership._is_own_group.__wrapped__(77) == is_own
    assert not ownership._is_own_group.__wrapped__(78)


@pytest.mark.parametrize(
    ("above", "umask"), [(0o755, 0o000), (0o755, 0o002), (0o755, 0o077), (0o2770, 0o002)]
)
def test_own_folders_are_for_their_user_alone(his, above, umask):
    """Whatever the umask, and below a project's setgid folder, too: nobody else reads, waits for or
    changes anything there.
    """
    os.chmod(his.cache.parent, above)
    his.run(f"os.umask({umask})\nreport(**load())")
    assert mode(his.cache) == 0o700
    for place in his.cache.rglob("*"):
        assert mode(place) & 0o022 == 0, place
    assert {mode(lock) for lock in (his.cache / "locks").iterdir()} == {0o600}
    assert his.run().origin == "cache"


def test_a_folder_that_inherited_its_group_shares_nothing(his, nobody):
    """As `mkdir` makes it in a project's folder: nobody else may hold its locks."""
    his.cache.mkdir()
    if nobody.is_somebody_else:
        nobody.give(his.cache)
    os.chmod(his.cache, 0o2755)
    assert his.run().origin == "built"
    assert [str(place) for place in his.cache.rglob("*") if mode(place) & 0o022] == []


def test_what_root_makes_for_all_can_be_read_by_all(tmp_path):
    """An image's or a share's folder, whatever the umask; what it holds is no secret."""
    before = os.umask(0o077)
    try:
        files.make_root(tmp_path / "image", private=False)
        files.write_new(tmp_path / "image" / "kernel.so", b"code", 0o644)
    finally:
        os.umask(before)
    assert mode(tmp_path / "image") == 0o755
    assert mode(tmp_path / "image" / "kernel.so") == 0o644


def test_lock_that_is_a_link(his, nobody):
    """What it points to is neither overwritten nor waited for."""
    his.run()
    (lock,) = (his.cache / "locks").iterdir()
    precious = his.root / "precious"
    for link in (os.symlink, os.link):
        precious.write_text("precious")
        nobody.give(precious) if nobody.is_somebody_else else None
        lock.unlink()
        link(precious, lock)
        shutil.rmtree(his.cache / "units")
        assert his.run().origin == "built"
        assert precious.read_text() == "precious"


def test_lock_that_is_a_fifo(his):
    his.run()
    (lock,) = (his.cache / "locks").iterdir()
    lock.unlink()
    os.mkfifo(lock)
    shutil.rmtree(his.cache / "units")
    assert his.run().origin == "built"


def test_log_that_is_a_link(his, nobody):
    his.include.joinpath("toy.h").write_text("#error on purpose\n")
    fails = "try:\n    load()\nexcept CompileError:\n    report(failed=True)"
    assert his.run(fails).report["failed"]
    (log,) = (his.cache / "failed").iterdir()
    precious = his.root / "precious"
    precious.write_text("precious")
    if nobody.is_somebody_else:
        nobody.give(precious)
    log.unlink()
    log.symlink_to(precious)
    assert his.run(fails).report["failed"]
    assert precious.read_text() == "precious"
    assert "on purpose" in log.read_text()


def test_readable_lock_stalls_nobody(his, nobody):
    """Another user cannot open it, and what was readable once is not any more."""
    if not nobody.is_somebody_else:
        pytest.skip("needs two users")
    his.run()
    (lock,) = (his.cache / "locks").iterdir()
    assert mode(lock) == 0o600
    os.chmod(lock, 0o666)  # as older versions made it
    his.write_header(50)
    assert his.run().report["answer"] == [52]
    assert mode(lock) == 0o600


def test_abandoned_folders_of_others_are_left_alone(his, nobody):
    """Folders to compile in have names that anybody can make up in /tmp."""
    if not nobody.is_somebody_else:
        pytest.skip("needs two users")
    foreign = his.build_root / f"ds4s-build-foreign_-{socket.gethostname()}"
    foreign.mkdir()
    (foreign / "alive").write_text("")
    os.chmod(foreign / "alive", 0o666)
    os.chmod(foreign, 0o777)
    his.run()
    assert (foreign / "alive").exists()


def test_the_report_says_so(his):
    his.run()
    os.chmod(his.cache, 0o1777)
    script = """
import contextlib, io
from deepspeed4science import report as r
out = io.StringIO()
with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
    r.main(["--json"])
report(text=out.getvalue())
"""
    warning = f"compiled kernels in {his.cache} are passed over, this user's are kept in "
    assert warning in his.run(script).report["text"]
