"""README tells the truth: its files exist, its example runs (test_env.py checks the table)."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_linked_files_exist():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_nothing_but_env_reads_the_environment():
    """So that the table above is complete."""
    sources = [*(ROOT / "op_builder").rglob("*.py"), *(ROOT / "deepspeed4science").rglob("*.py")]
    assert len(sources) > 30
    readers = {
        source.name for source in sources if re.search(r"os\.(environ|getenv)", source.read_text())
    }
    assert readers <= {"env.py"}


def test_example_runs():
    torch = pytest.importorskip("torch")
    example = re.findall(r"```python\n(.*?)```", README, re.S)[0]
    names: dict[str, object] = {}
    exec(example, names)
    pair = names["pair"]
    assert isinstance(pair, torch.Tensor) and pair.grad is not None
    assert pair.grad.isfinite().all()


def test_recipes_run():
    """Those for models are tried with the models' own packages in tests/clients."""
    pytest.importorskip("torch")
    recipes = re.findall(r"```python\n(.*?)```", README, re.S)[1:]
    assert len(recipes) == 4
    for recipe in recipes:
        try:
            exec(recipe, {})
        finally:
            switch_back()


def switch_back():
    from deepspeed4science.drop_in import Switch

    for finder in [finder for finder in sys.meta_path if isinstance(finder, Switch)]:
        finder.back()
