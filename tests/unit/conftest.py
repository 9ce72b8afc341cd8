"""Fixtures that several test files share."""

import sys

import pytest


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of packages; what was imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
