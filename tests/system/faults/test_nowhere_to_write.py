"""A machine without a single folder that can be written: what is compiled already still runs."""

import os

import pytest

READONLY = """\
for place in /tmp /var/tmp /dev/shm; do
  mount --rbind $place $place && mount -o remount,bind,ro $place || exit 1
done
cd / && exec "$@"
"""
CHECK = """
import tempfile
try:
    tempfile.gettempdir()
    sys.exit("a folder can be written")
except FileNotFoundError:
    pass
"""


@pytest.fixture
def nowhere(his):
    """His workshop, with a compiled toy in its cache, and nothing that can be written."""
    if os.geteuid() != 0:
        pytest.skip("needs the right to mount")
    his.run()
    python = ("unshare", "-m", "sh", "-c", READONLY, "sh", *his.python)
    shop = type(his)(his.root, his.language, python=python, packages=his.packages)
    unset = dict.fromkeys(("DS4S_CACHE_DIR", "TMPDIR", "XDG_CACHE_HOME"), "")
    return lambda script, **more: shop.run(CHECK + script, **unset, HOME="/nonexistent", **more)


def test_kernels_of_a_shared_folder_run(nowhere, his):
    outcome = nowhere("report(**load())", DS4S_CACHE_PATH=str(his.cache))
    assert (outcome.origin, outcome.report["answer"]) == ("cache", [42])


def test_what_would_have_to_be_compiled_is_refused_by_name(nowhere, his):
    script = "try:\n    load('other')\nexcept BuildError as error:\n    report(error=str(error))"
    error = nowhere(script, DS4S_CACHE_PATH=str(his.cache)).report["error"]
    assert "no folder to compile in" in error
    assert "set TMPDIR" in error


def test_everything_is_asked_without_an_error(nowhere):
    """As a report and a first call do."""
    script = """
from op_builder import ALL_OPS
obstacles = [str(one) for op in ALL_OPS.values() for one in op.obstacles()]
states = [op.status().state for op in ALL_OPS.values()]
report(obstacles=obstacles, states=states)
"""
    assert len(nowhere(script).report["states"]) == 2
