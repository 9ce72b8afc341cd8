"""The demo's alignment is what its README says, and its parser refuses what is not an alignment."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed4science.demo.alignment import GAP, load_ubiquitin, parse_a3m

DATA = Path(__file__).parents[2] / "deepspeed4science" / "data"
UBIQUITIN = "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG"


def test_query_is_human_ubiquitin():
    """The first record is the query: the 76 residues everybody knows, and no gap."""
    query = load_ubiquitin().query
    assert query.columns == UBIQUITIN
    assert query.accession == "P62979/1-76"


def test_family_has_the_promised_size():
    alignment = load_ubiquitin()
    assert 16 <= len(alignment.records) <= 64
    assert len({record.columns for record in alignment.records}) == len(alignment.records)


def test_rows_are_relatives_of_the_query():
    """Every row covers half of the columns or more, so that no mask hides a whole row or column."""
    for tokens in load_ubiquitin().tokens:
        assert sum(token != GAP for token in tokens) >= len(tokens) // 2


def test_range_in_header_counts_the_residues():
    """A row without its gaps, insertions included, is exactly residues FIRST to LAST."""
    text = (DATA / "ubiquitin.a3m").read_text()
    for block in text.split(">")[1:]:
        header, body = block.split("\n", 1)
        first, last = header.split()[0].split("/")[1].split("-")
        assert len(body.replace("-", "").strip()) == int(last) - int(first) + 1, header


def test_readme_names_the_source_of_every_record():
    readme = (DATA / "README.md").read_text()
    for record in load_ubiquitin().records:
        assert record.accession.split("/")[0] in readme


def test_insertions_have_no_column():
    alignment = parse_a3m(">q/1-3 Q Homo sapiens\nACD\n>r/1-5 R x\nAksC-\n")
    assert [record.columns for record in alignment.records] == ["ACD", "AC-"]
    assert alignment.query.organism == "Homo sapiens"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line that starts with"),
        (">q\nA-D\n", "has a gap"),
        (">q\nACD\n>r\nAC\n", "2 columns, the query has 3"),
        (">q\nA1D\n", "not amino acids"),
    ],
    ids=["empty", "gap-in-query", "short-row", "strange-letter"],
)
def test_what_is_not_an_alignment_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_a3m(text)
