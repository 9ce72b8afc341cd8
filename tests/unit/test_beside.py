"""Versions in turn: what a version is, the order of bursts, a run of two versions on the CPU."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from benchmarks import beside, cli  # noqa: E402
from benchmarks.beside import Version  # noqa: E402


def test_names_places_and_flags():
    assert Version.of("HEAD~1") == Version("HEAD~1", "HEAD~1")
    assert Version.of("wide=.@-DTILE=128 -DX") == Version("wide", ".", "-DTILE=128 -DX")
    assert Version.of(".@-DX") == Version(".@-DX", ".", "-DX")


def test_a_version_is_nothing_but_its_parts(tmp_path):
    here = Version.of(str(beside.ROOT)).unpack(tmp_path / "here")
    assert sorted(path.name for path in here.iterdir()) == sorted(beside.PARTS)
    assert (here / "csrc").resolve() == beside.ROOT / "csrc"
    with pytest.raises(ValueError, match="no-such-revision: neither a folder nor a revision"):
        Version.of("no-such-revision").unpack(tmp_path / "none")
    with pytest.raises(ValueError, match="no version of this package: no op_builder"):
        Version.of(str(tmp_path / "none")).unpack(tmp_path / "empty")


def test_one_name_is_one_version(capsys):
    assert cli.main(["beside", ".", "."]) == 2
    assert "two versions have the same name" in capsys.readouterr().out


class Clock:
    """A worker whose calls take so long; all of them twice as long from the second round on."""

    def __init__(self, name, seconds, log):
        self.name, self._seconds, self._log = name, seconds, log

    def seconds(self, num_calls):
        self._log.append((self.name, num_calls))
        return self._seconds * (2 if len(self._log) > 4 else 1)


def test_bursts_alternate_and_ratios_are_of_one_round(monkeypatch):
    monkeypatch.setattr(beside, "PAUSE_SECONDS", 0)
    log = []
    figures = beside.in_turn([Clock("a", 0.001, log), Clock("b", 0.0015, log)], rounds=4)
    bursts = log[2:]
    assert [name for name, _ in bursts] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert {num_calls for _, num_calls in bursts} == {8}  # 12 ms of the slowest
    assert figures["b"] == pytest.approx(1.5 * figures["a"])
    assert figures["a"] == pytest.approx(2000)


def test_two_versions_on_the_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(beside, "BURST_SECONDS", 0.001)
    file = tmp_path / "beside.json"
    here = str(beside.ROOT)
    words = ["beside", here, f"again={here}", "--shapes", "cpu64x384/half", "--direction", "fwd"]
    assert cli.main([*words, "--dtype", "fp32", "--rounds", "1", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["results"]
    assert [row["commit"] for row in rows] == [here, "again"]
    assert {row["mask"] for row in rows} == {"half"} and rows[0]["median_us"] > [0]
    assert "again" in capsys.readouterr().out


def test_a_version_that_fails_says_so(tmp_path, capsys):
    """Its package raises when it is imported."""
    for part in beside.PARTS:
        (tmp_path / part).mkdir()
    (tmp_path / "deepspeed4science" / "__init__.py").write_text("raise ImportError('broken')\n")
    words = ["beside", f"broken={tmp_path}", "--shapes", "cpu64x384", "--dtype", "fp32"]
    assert cli.main(words) == 2
    assert "broken has failed" in capsys.readouterr().out
