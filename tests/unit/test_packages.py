"""An install takes every package along: pyproject.toml names each, since some hold data alone."""

import os
import subprocess
import sys
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


@pytest.fixture
def in_deepspeed(tmp_path):
    """A function that runs Python where DeepSpeed's own op_builder lies."""
    (tmp_path / "op_builder").mkdir()
    (tmp_path / "op_builder" / "__init__.py").write_text("class EvoformerAttnBuilder: pass")

    def run(code):
        path = f"{tmp_path}{os.pathsep}{ROOT}"
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_deepspeeds_op_builder_does_not_hide_ours(in_deepspeed):
    done = in_deepspeed("import deepspeed4science.errors, op_builder; print(op_builder.__file__)")
    assert Path(done.stdout.strip()) == ROOT / "op_builder" / "__init__.py", done.stderr
    done = in_deepspeed("import op_builder, deepspeed4science")
    assert "op_builder was imported from" in done.stderr
    assert "import deepspeed4science first" in done.stderr
