"""A user without rights, and a workshop that he can reach."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from ..toys import Workshop, kill_spawned
from . import people


@pytest.fixture(scope="session")
def nobody():
    """A user without rights: `people.Person`."""
    folder = Path(tempfile.mkdtemp(prefix="ds4s-test-"))
    folder.chmod(0o755)
    with people.nobody(folder) as person:
        yield person
    folder.rmdir()  # not what is in it: a Python was mounted there


@pytest.fixture
def open_folder():
    """A folder that every user can reach, as pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="ds4s-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def his(open_folder, nobody):
    """A workshop of that user's own, in which processes run as he."""
    shop = Workshop.make(open_folder / "workshop", python=nobody.python, packages=nobody.packages)
    if nobody.is_somebody_else:
        nobody.give(shop.root)
    yield shop
    kill_spawned()


@pytest.fixture
def forbidden(open_folder):
    """A folder that nobody but root may enter; for root there is none, hence `his`."""
    folder = open_folder / "forbidden"
    (folder / "inside").mkdir(parents=True)
    folder.chmod(0)
    yield folder / "inside"
    folder.chmod(0o755)
    assert os.listdir(folder) == ["inside"]
