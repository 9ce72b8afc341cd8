"""An install takes every package along: pyproject.toml names each, since some hold data alone."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(
    ".".join(init.parent.relative_to(ROOT).parts)
    for top in ("op_builder", "deepspeed4science")
    for init in (ROOT / top).rglob("__init__.py")
)


@pytest.mark.parametrize("package", PACKAGES)
def test_it_is_named(package):
    _, _, named = (ROOT / "pyproject.toml").read_text().partition("\npackages = [")
    assert f'"{package}"' in named.partition("]")[0]
