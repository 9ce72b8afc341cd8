"""The project's documents as tests read them: their pages, their Python and their commands."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("docs", "benchmarks", "csrc", "deepspeed4science", "tests")
PAGES = (
    *sorted(ROOT.glob("*.md")),
    *sorted(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")),
)
PROGRAMS = r"(?:[A-Z][A-Z0-9_]*=\S+ )*(?:python|pip|scripts/\w+|torchrun|ds_report)(?: |$)"


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def snippets(text: str, language: str = "python") -> list[str]:
    """The text of each block between a fence of that language and the next fence."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


def commands(text: str) -> list[str]:
    """Lines that begin with a program, in fences, indented blocks and backticks; a comment behind
    two blanks or a # is dropped, and a line that ends with a backslash is joined with the next one.
    """
    text = re.sub(r" *\\\n *", " ", text)
    fenced = [line for block in snippets(text, "bash") for line in block.splitlines()]
    indented = re.findall(r"^ {4}(\S.*)$", text, re.M)
    quoted = re.findall(r"`([^`\n]+ [^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    lines = [re.split(r" {2,}| # ", line.strip())[0] for line in (*fenced, *indented)]
    lines = [re.sub(r" +", " ", line) for line in lines] + quoted
    return [line for line in lines if re.match(PROGRAMS, line)]
