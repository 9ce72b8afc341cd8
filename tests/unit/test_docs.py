"""Links between the documents lead somewhere: files and headings."""

import re
from pathlib import Path

import pytest

from tests.documents import PAGES, ROOT, name


def headings(page: Path) -> set[str]:
    """As a viewer of Markdown makes anchors: lower case, hyphens for spaces, no punctuation."""
    titles = re.findall(r"^#+ +(.+?) *$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings_that_are_there(page):
    assert broken_links(page) == []


def test_every_document_is_in_the_index():
    docs = ROOT / "docs"
    for index in docs.rglob("README.md"):
        listed = set(re.findall(r"\]\(([^)#\s]+)", index.read_text()))
        pages = {page for page in index.parent.rglob("*.md") if page != index}
        if index.parent == docs:  # history has an index of its own
            pages = {p for p in pages if p.parent.name != "history" or p.name == "README.md"}
        names = {str(page.relative_to(index.parent)) for page in pages}
        assert names - listed == set(), index


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](#a-title) [b](#none) [c](none.md) [d](page.md#a-title)\n")
    assert broken_links(page) == ["#none", "none.md"]
