"""The environment: read in one module, never written, every variable documented."""

import ast
import os
from pathlib import Path

import pytest

from op_builder import env
from op_builder.errors import BuildError

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "environment.md"


def test_names_are_unique_and_every_row_says_something():
    names = [variable.name for variable in env.VARIABLES]
    assert len(set(names)) == len(names)
    assert all(variable.meaning and variable.default for variable in env.VARIABLES)


def test_the_documents_have_this_very_table():
    """If not, paste what `python -c "from op_builder import env; print(env.table())"` says."""
    assert env.table() in PAGE.read_text()


def reads_environment(tree):
    """Lines that touch os.environ or os.getenv, however they are imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in (
            "environ",
            "environb",
            "getenv",
            "putenv",
        ):
            yield node.lineno
        imported = node.names if isinstance(node, ast.ImportFrom) and node.module == "os" else []
        if {alias.name for alias in imported} & {"environ", "getenv", "putenv"}:
            yield node.lineno


def test_only_env_touches_the_environment():
    found = []
    for package in ("op_builder", "deepspeed4science"):
        for path in (REPOSITORY / package).rglob("*.py"):
            if path != REPOSITORY / "op_builder" / "env.py":
                lines = reads_environment(ast.parse(path.read_text()))
                found += [f"{path.relative_to(REPOSITORY)}:{line}" for line in lines]
    assert found == []


def test_every_name_read_is_in_the_table(monkeypatch):
    monkeypatch.setenv("DS4S_NOT_IN_THE_TABLE", "1")
    with pytest.raises(KeyError, match=r"env\.py's table"):
        env.text("DS4S_NOT_IN_THE_TABLE")


def test_empty_counts_as_unset(monkeypatch):
    monkeypatch.setenv("CXX", "  ")
    assert env.text("CXX") is None
    monkeypatch.setenv("CXX", " g++ ")
    assert env.text("CXX") == "g++"


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1", True), ("ON", True), ("yes", True), ("0", False), ("False", False), ("", None)],
)
def test_flag(monkeypatch, value, expected):
    monkeypatch.setenv("DS_BUILD_OPS", value)
    assert env.flag("DS_BUILD_OPS") is expected


@pytest.mark.parametrize(
    ("read", "name", "value"),
    [
        (env.flag, "DS_BUILD_OPS", "maybe"),
        (env.positive_int, "MAX_JOBS", "0"),
        (env.positive_int, "MAX_JOBS", "-2"),
        (env.positive_int, "MAX_JOBS", "many"),
        (env.whole_number, "DS4S_CACHE_MAX_MB", "2 GB"),
        (env.whole_number, "DS4S_CACHE_MAX_MB", "-1"),
        (lambda name: env.choice(name, ("avx2", "portable")), "DS4S_CPU_ISA", "sse"),
    ],
)
def test_nonsense_is_told(monkeypatch, read, name, value):
    """Expected, got, what to do; never a silent default."""
    monkeypatch.setenv(name, value)
    with pytest.raises(BuildError, match=f"{name}: expected .*got '{value}'.*unset it"):
        read(name)


def test_choice_ignores_case(monkeypatch):
    monkeypatch.setenv("DS4S_CPU_ISA", "AVX2")
    assert env.choice("DS4S_CPU_ISA", ("avx2", "portable")) == "avx2"


def test_folders(monkeypatch):
    monkeypatch.setenv("DS4S_CACHE_PATH", "/a: ~/b ::/c")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert env.folders("DS4S_CACHE_PATH") == ("/a", "/home/somebody/b", "/c")
    monkeypatch.delenv("DS4S_CACHE_PATH")
    assert env.folders("DS4S_CACHE_PATH") == ()


def test_compilers_speak_english_and_we_change_nothing(monkeypatch):
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    before = dict(os.environ)
    assert env.for_compiler()["LC_ALL"] == "C"
    assert dict(os.environ) == before
