"""Every command of the documents: run here as it is written, or by the test that is named beside
it; where it needs a GPU, a network or a model, its arguments at least are those of the program.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed4science import build_command, cache_command, report, run_command
from tests.documents import PAGES, ROOT, commands, name

# Where a kind of command is run as it stands there, but for folders: regular expression, test.
RUN_BY = {
    r"pip install \.": "tests/system/test_install.py::test_loading_the_wheel_compiles_nothing",
    r'pip install "\.\[cuda\]"': "tests/system/test_cuda_extra.py::"
    "test_one_toolkit_of_the_release_that_torch_pins",
    r"DS_BUILD_.* pip (install|wheel)( --no-deps)?( -w dist)? \.": "tests/system/test_install.py::"
    "test_loading_the_wheel_compiles_nothing",
    r"python -m deepspeed4science build( .*)?": "tests/system/test_build_command.py::"
    "test_several_readonly_folders_before_the_writable_one",
    r"python -m deepspeed4science cache explain .*": "tests/system/test_cache_tools.py::"
    "test_explain_says_which_component_changed",
    r"python -m deepspeed4science cache clear": "tests/system/test_cache_tools.py::test_clear",
    r"python -m deepspeed4science run( .*)?": "tests/clients/test_lightning.py::"
    "test_every_rank_is_switched",
    r"scripts/instructions .*": "tests/system/test_cuda_compile.py::"
    "test_each_instruction_has_a_line",
    r"python -m benchmarks plot FILE.json": "tests/unit/test_benchmarks.py::"
    "test_result_file_reads_back_as_table_and_plot",
    r"python -m benchmarks results": "tests/unit/test_benchmark_results.py::"
    "test_results_page_is_what_the_result_files_say",
    r"torchrun --nproc-per-node 4 examples/axial_parallel.py": "tests/distributed/test_example.py::"
    "test_losses_are_those_of_one_process",
}
# What no test can run everywhere, and why.
NEEDS = {
    r"scripts/(test|check)( .*)?": "nothing: these are what runs the tests",
    r"scripts/(format|gpu|same_code)( .*)?": "a working tree to change, a GPU, an older revision",
    r"python -m benchmarks beside .*": "a GPU, an older revision",
    r"pip install .*": "a network",
    r"torchrun --nproc-per-node 2 -m benchmarks.many_gpus": "two GPUs",
    r"python -m benchmarks (run|replay|load|layers|blocks|host|startup)( .*)?": "a GPU, or minutes",
    r"python -m benchmarks ceilings .*": "a GPU",
    r"python -m tests.numeric.fuzz .*": "a GPU",
}
RUN_HERE = (
    "scripts/demo",
    "ds_report",
    "ds_report --json",
    "python -m deepspeed4science cache list --json",
    "python -m benchmarks list",
    "python -m benchmarks show FILE.json",
    'python -c "import torch"',
)


def documented() -> list[str]:
    """Without brackets around options. Whole programs named in passing (`... run CLIENT ...`, with
    dots in place of arguments) are no commands.
    """
    pages = [page for page in PAGES if "history" not in name(page) and page.stem != "CHANGELOG"]
    found = {one for page in pages for one in commands(page.read_text())}
    plain = {re.sub(r" ?\[(NAME \.\.\.|--[\w-]+ \w+)\]|[\[\]](?=-|$)", "", one) for one in found}
    return sorted(one for one in plain if "..." not in one)


def alike(patterns: dict[str, str], command: str) -> str | None:
    return next((to for one, to in patterns.items() if re.fullmatch(one, command)), None)


@pytest.mark.parametrize("command", documented())
def test_each_command_is_run_somewhere_or_says_why_not(command: str) -> None:
    if command in RUN_HERE:
        return
    test = alike(RUN_BY, command)
    if test is None:
        assert alike(NEEDS, command), "no test runs this command"
        return
    file, _, function = test.partition("::")
    assert f"\ndef {function}(" in (ROOT / file).read_text(), f"{test} is not there"
    pytest.skip(f"run by {test}")


def test_nothing_is_listed_that_no_document_has() -> None:
    found = documented()
    assert [one for one in RUN_HERE if one not in found] == []
    patterns = (*RUN_BY, *NEEDS)
    assert [one for one in patterns if not any(re.fullmatch(one, c) for c in found)] == []


@pytest.mark.parametrize("command", [one for one in documented() if one in RUN_HERE])
def test_it_runs(command: str, tmp_path: Path) -> None:
    """Exit code 0, but for a report, which may say that this machine is not usable."""
    result = min((ROOT / "benchmarks" / "results").glob("*-xeon-*.json"))
    shutil.copy(result, tmp_path / "FILE.json")
    line = command.replace("ds_report", "python -m deepspeed4science report")
    line = line.replace("scripts/demo", "python -m deepspeed4science demo --device cpu")
    program, *arguments = shlex.split(line)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert program == "python"
    assert done.returncode in ((0, 1) if "report" in line else (0,)), done.stdout + done.stderr
    assert done.stdout or "-c" in arguments
    assert "Traceback" not in done.stderr


def parsers() -> dict[str, Callable[[], argparse.ArgumentParser]]:
    from benchmarks import cli
    from tests.numeric import fuzz

    return {
        "python -m deepspeed4science build": build_command._parser,
        "python -m deepspeed4science cache": cache_command._parser,
        "python -m deepspeed4science run": run_command._parser,
        "python -m benchmarks": cli._parser,
        "python -m tests.numeric.fuzz": fuzz.command_parser,
    }


@pytest.mark.parametrize(
    "command", [one for one in documented() if one.startswith("python -m") and "report" not in one]
)
def test_its_arguments_are_those_of_the_program(command: str) -> None:
    matching = [start for start in parsers() if command.startswith(start)]
    assert matching
    words = shlex.split(command[len(matching[0]) :])
    if words:
        parsers()[matching[0]]().parse_args(words)


def test_the_scripts_and_the_console_script_are_there() -> None:
    named = {one.split()[0] for one in documented() if one.startswith("scripts/")}
    assert len(named) > 4
    for script in named:
        assert os.access(ROOT / script, os.X_OK), script
    assert f'ds_report = "{report.__name__}:main"' in (ROOT / "pyproject.toml").read_text()


def test_a_command_without_a_test_would_be_seen() -> None:
    text = "    python -m benchmarks pictures  # new\n\n`pip install .` and `ds_report --yaml`\n"
    assert commands(text) == ["python -m benchmarks pictures", "pip install .", "ds_report --yaml"]
    assert not any(
        "ds_report --yaml" in RUN_HERE or alike(p, "ds_report --yaml") for p in (RUN_BY, NEEDS)
    )
