"""The kernels' pages and the code say the same: sizes of tiles, equations that are cited."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import quoted
from tests.documents import ROOT

KERNELS = ROOT / "csrc" / "deepspeed4science" / "evoformer_attn"
MATH = (ROOT / "docs" / "math.md").read_text()


def constant(text: str, name: str) -> int:
    found = re.search(rf"\b{name}(?:<\w+>)? = (\d+);", text)
    assert found, name
    return int(found[1])


def equations() -> set[str]:
    """The numbers that head an equation: "7", "6a"."""
    return set(re.findall(r"^ {4}\((\d+a?)\) ", MATH, re.M))


def cited(text: str) -> set[str]:
    """The numbers behind "math.md": "math.md (7)", "math.md (1) to (7)", "math.md (8) and (9)"."""
    numbers: set[str] = set()
    for run in re.findall(r"math\.md ((?:\(\d+a?\)(?:, | and | to |,? \n?)*)+)", text):
        parts = re.findall(r"\((\d+a?)\)(?= (to)\b)?", run)
        for (number, to), (last, _) in zip(parts, [*parts[1:], ("", "")], strict=True):
            numbers.add(number)
            if to:
                numbers |= {str(n) for n in range(int(number), int(last) + 1)}
    return numbers


def sources(folder: str) -> list[Path]:
    return sorted((KERNELS / folder).rglob("*.h"))


def test_tiles_of_the_cpu():
    page = (ROOT / "docs" / "kernels" / "cpu.md").read_text()
    sizes = (KERNELS / "cpu" / "tile_sizes.h").read_text()
    fma = constant(sizes, "kFmaQueries")
    pair = re.search(r"kPairQueries = kKeys == kForwardKeys \? (\d+) : (\d+);", sizes)
    assert pair
    for direction, rows in (("forward", int(pair[1])), ("backward", int(pair[2]))):
        keys = constant(sizes, f"k{direction.title()}Keys")
        assert f"| {direction}, fma engine | {fma} | {keys} |" in page
        assert f"| {direction}, pair engine | {rows} | {keys} |" in page


def test_tiles_of_the_sm90_forward():
    page = (ROOT / "docs" / "kernels" / "sm90.md").read_text()
    code = (KERNELS / "sm90" / "forward" / "tile_sizes.h").read_text()
    number = r"(\d), " * 4
    found = re.findall(
        rf"ForwardTiles<{number}/\*kPipelined=\*/([^>]+?)(?:, /\*kSplits=\*/(\d))?>", code
    )
    pipelined = {"true": ["yes"], "false": ["no"], "kHeadDim <= 32": ["yes", "no"]}
    expected = [
        [f"{rows} x {tiles}" + (f", keys divided by {splits}" if splits else ""), *numbers, answer]
        for rows, tiles, *numbers, word, splits in found
        for answer in pipelined[word.strip()]
    ]
    table = page.partition("| tier | rows n x query tiles |")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) > 4
    assert [row[1:] for row in rows] == expected


def test_the_sm90_backend_has_the_tiles_of_the_kernel_for_one_row():
    pytest.importorskip("torch")
    from deepspeed4science.backends.sm90 import CLUSTER_FUSED

    folder = KERNELS / "sm90" / "backward"
    sizes, plan = (folder / "tile_sizes.h").read_text(), (folder / "plan.h").read_text()
    found = re.search(r"WithSplitKeys<DqDkdvTiles<1, (\d), .*?>, /\*kQueries=\*/(\d+)>", sizes)
    assert found
    block_keys = int(found[1]) * constant(sizes, "kOwned")
    cluster_keys = block_keys * constant(plan, "kMostClusterBlocks")
    assert (int(found[2]), block_keys, cluster_keys) == CLUSTER_FUSED


def test_quoted_results_are_those_of_the_results_page():
    """If not: `python -m benchmarks results`."""
    for path, text in quoted.pages().items():
        assert path.read_text() == text, path


def test_a_figure_that_is_not_in_the_results_is_seen():
    page = (ROOT / "README.md").read_text()
    table = quoted.readme((ROOT / "benchmarks" / "RESULTS.md").read_text())
    figure = table.splitlines()[2].split(" | ")[1]
    assert page.count(figure) == 1
    assert quoted.updated(page.replace(figure, "0.001 / 0.002"), table) == page


def test_equations_are_numbered_once():
    numbers = re.findall(r"^ {4}\((\d+a?)\) ", MATH, re.M)
    assert len(numbers) > 17
    assert len(set(numbers)) == len(numbers)


def test_every_cited_equation_is_there():
    known = equations() | {"18"}  # many-gpus.md
    files = [
        *sources("."),
        *ROOT.rglob("deepspeed4science/**/*.py"),
        *ROOT.rglob("op_builder/**/*.py"),
    ]
    for file in files:
        unknown = cited(file.read_text()) - known
        assert not unknown, f"{file.relative_to(ROOT)} cites {unknown}"


@pytest.mark.parametrize("folder", ["cpu", "sm80", "sm90"])
def test_each_family_cites_every_equation_of_the_kernels(folder):
    """(17) is the error law."""
    found = set().union(*(cited(file.read_text()) for file in sources(folder)))
    assert equations() - found - {"17"} == set()


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "kernels").glob("*.md")), ids=lambda p: p.stem
)
def test_names_of_the_code_exist(page):
    """Names with an underscore, in backquotes."""
    folders = ("csrc", "deepspeed4science", "op_builder", "tests")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*") if f.is_file()]
    known = {f.stem for f in files}
    for file in files:
        if file.suffix in {".h", ".cu", ".cpp", ".py"}:
            known |= set(re.findall(r"\w+", file.read_text()))
    quoted = " ".join(re.findall(r"`([^`\n]+)`", page.read_text()))
    names = set(re.findall(r"\b[A-Za-z]\w*_\w+\b", quoted))
    assert names <= known


def test_citations_are_read():
    text = "// math.md (1) to (3) and (9), (11)\n# the sum, docs/math.md (6a)\n// (5)\n"
    assert cited(text) == {"1", "2", "3", "9", "11", "6a"}
