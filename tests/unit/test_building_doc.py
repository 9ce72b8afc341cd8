"""docs/building.md keeps up with the program: its messages, its variables, its places."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from op_builder import env
from op_builder.ops import presets
from op_builder.ops.status import STATES
from op_builder.toolchain import arch, cutlass, nvcc, nvcc_wheels
from op_builder.toolchain.cpu_isa import CPU_ISAS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "building.md").read_text()
GAP = "\u2026"


def quoted_messages() -> list[str]:
    """What stands in backticks in the first column under "Messages"."""
    section = TEXT.partition("\n## Messages\n")[2]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def program_texts() -> list[str]:
    """Every string of the program, with a gap where something is filled in."""
    texts = []
    for folder in ("op_builder", "deepspeed4science"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [p.value if isinstance(p, ast.Constant) else GAP for p in node.values]
                    texts.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value.replace("%s", GAP))
    return texts


PROGRAM = program_texts()


@pytest.mark.parametrize("message", quoted_messages())
def test_each_message_is_one_that_the_program_says(message: str) -> None:
    wanted = message.removesuffix(GAP).rstrip("; ").removesuffix(GAP)
    assert any(wanted in text for text in PROGRAM), "the program says this no longer"


def test_messages_are_found_at_all() -> None:
    assert len(quoted_messages()) > 25


def test_each_variable_exists() -> None:
    known = {variable.name for variable in env.VARIABLES} | {"LD_LIBRARY_PATH", "OMP_NUM_THREADS"}
    named = set(re.findall(r"`([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|CC|CXX|PATH|TMPDIR)\b", TEXT))
    assert named
    assert named <= known


@pytest.mark.parametrize("word", [*CPU_ISAS, *STATES])
def test_each_state_and_instruction_set_has_its_row(word: str) -> None:
    assert re.search(rf"^\| `?{word}`? \|", TEXT, re.MULTILINE)


def test_the_calls_that_are_compiled_beforehand() -> None:
    """Each list's rows, and no others."""
    lists = {"install": presets.INSTALL_ROWS, **presets.PRESETS}
    section = TEXT.partition("\n## Compiling beforehand\n")[2].partition("\n## ")[0]
    told = [line for line in section.splitlines() if line.startswith(("| install", "| `"))]
    for name, wanted in lists.items():
        ends = [f" | {row.what} | {row.head_dim} | {row.bias} |" for row in wanted]
        mine = [line for line in told if name in line.split(" | ")[0]]
        assert [line.partition(" | ")[1] + line.partition(" | ")[2] for line in mine] == ends


def test_versions_and_commands_are_those_of_the_program() -> None:
    assert ".".join(map(str, nvcc.OLDEST)) + " is the oldest that serves" in TEXT
    assert f'pip install "{nvcc_wheels.PARTS}"' in TEXT
    assert f"nvidia-cutlass=={'.'.join(map(str, cutlass.OLDEST))}.0" in TEXT


def test_remedies_name_packages_that_an_index_has() -> None:
    """This one is installed from its sources."""
    remedies = [text for text in (*PROGRAM, TEXT) if "pip install" in text]
    assert len(remedies) > 5
    wanted = [word for text in remedies for word in re.findall(r"pip install (.+)", text)]
    assert not [one for one in wanted if "deepspeed4science" in one.partition(";")[0]]


def test_the_extra_installs_all_parts_of_the_toolkit() -> None:
    """pip would take the missing ones from another release."""
    text = (ROOT / "pyproject.toml").read_text()
    assert f'cuda = ["{nvcc_wheels.PARTS}", ' in text
    assert f'"nvidia-cutlass=={".".join(map(str, cutlass.OLDEST))}.0"' in text


def test_the_forms_of_architecture_lists() -> None:
    """Both those that the page offers and those that it says are refused."""
    section = TEXT.partition("### Architectures")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    offered = [form for row in rows for form in re.findall(r"`([^`]+)`", row)]
    assert len(offered) > 10
    for form in offered:
        assert arch.parse(form), form
    refused = re.search(r"Anything else \(([^)]+)\)", section)
    assert refused
    for form in re.findall(r"`([^`]+)`", refused[1]):
        with pytest.raises(RuntimeError):
            arch.parse(form)
