"""Read a multiple sequence alignment (a3m) into integers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

ALPHABET = "ACDEFGHIKLMNPQRSTVWY-"
GAP = ALPHABET.index("-")


@dataclass(frozen=True)
class Record:
    """One aligned domain."""

    accession: str  # "P62979/1-76"
    name: str  # "RS27A_HUMAN"
    organism: str
    columns: str  # one letter or "-" for each residue of the query


@dataclass(frozen=True)
class Alignment:
    """Records of equal width; the first is the query and has no gap."""

    records: tuple[Record, ...]

    @property
    def query(self) -> Record:
        return self.records[0]

    @property
    def tokens(self) -> list[list[int]]:
        """Index of every letter in `ALPHABET`, [records][columns]."""
        return [[ALPHABET.index(letter) for letter in r.columns] for r in self.records]


def parse_a3m(text: str) -> Alignment:
    """Parse a3m text.

    Lower-case letters are insertions between two columns of the query; they have no column and are
    dropped.

    Raises:
        ValueError: no record, a gap in the query, rows of different widths, or a letter outside
        `ALPHABET`.
    """
    records = []
    for block in text.split(">")[1:]:
        header, _, body = block.partition("\n")
        accession, name, organism = [*header.split(maxsplit=2), "", ""][:3]
        columns = "".join(c for c in body if not c.islower() and not c.isspace())
        if unknown := set(columns) - set(ALPHABET):
            raise ValueError(f"{accession}: letters {sorted(unknown)} are not amino acids")
        records.append(Record(accession, name, organism.strip(), columns))
    if not records:
        raise ValueError("expected an a3m alignment, found no line that starts with '>'")
    width = len(records[0].columns)
    if "-" in records[0].columns:
        raise ValueError(
            f"the query {records[0].accession} has a gap; a3m columns are the query's residues"
        )
    for record in records:
        if len(record.columns) != width:
            raise ValueError(
                f"{record.accession}: {len(record.columns)} columns, the query has {width}"
            )
    return Alignment(tuple(records))


def load_ubiquitin() -> Alignment:
    """The alignment that ships with the package; `deepspeed4science/data/README.md` names its
    sources.
    """
    path = files("deepspeed4science") / "data" / "ubiquitin.a3m"
    return parse_a3m(path.read_text(encoding="utf-8"))
