"""Results: each table takes the rows it says from the files, and replays are measured and joined as
the files say.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from benchmarks import (  # noqa: E402
    archive,
    cli,
    limits,
    replay,
    results_padding,
    results_page,
    results_tables,
)

ROOT = Path(__file__).resolve().parents[2]


def test_results_page_is_what_the_result_files_say():
    page = results_page.page(archive.load())
    assert (ROOT / "benchmarks" / "RESULTS.md").read_text() == page, (
        "run `python -m benchmarks results`"
    )
    missing = [name for name in re.findall(r"\]\(([^)]+)\)", page) if not is_there(name)]
    assert not missing


def is_there(link):
    return (ROOT / "benchmarks" / link).exists()


def test_shares_of_limits_are_those_of_the_work():
    per_second = {"exponentials": 4e12, "tensor_flop": 8e14, "l2_shared_bytes": 6e12}
    per_second |= {"l2_sums": 1e12, "dram_bytes": 4e12}
    shape = (1, 768, 768, 4, 32)
    share = limits.shares(shape, "fwd", 1.0, per_second)
    assert share["exponentials"] == pytest.approx(768**3 * 4 / 4e9)
    assert share["tensor_flop"] == pytest.approx(4 * 768**3 * 4 * 32 / 8e11)
    back = limits.shares(shape, "bwd", 2.0, per_second)
    assert back["exponentials"] == pytest.approx(share["exponentials"] / 2)
    assert back["tensor_flop"] == pytest.approx(2.5 / 2 * share["tensor_flop"])
    assert back["l2_sums"] == pytest.approx(768**3 * 4 / 2 / 2e9)


def test_a_file_tells_the_command_that_gave_it(tmp_path, capsys):
    path = tmp_path / "m.json"
    words = "run --peers eager --dtype fp32 --direction fwd --runs 1 --seconds 0 --shapes small"
    with pytest.raises(SystemExit):
        cli.main([*words.split(), "--json", str(path)])
    assert "'small'" in capsys.readouterr().err
    words = words.replace("small", "trunk384")
    assert cli.main([*words.split(), "--commit", "x", "--json", str(path)]) == 0
    assert archive.command("m.json", tmp_path) == f"python -m benchmarks {words}"
    old = json.loads(path.read_text())
    del old["command"]
    path.write_text(json.dumps(old))
    told = "python -m benchmarks run --shapes trunk384 --dtype fp32 --direction fwd --peers eager"
    assert archive.command("m.json", tmp_path) == told


def of_tri384(file, date, peer, ms, machine=archive.GPU_OF_RECORD, family="sm90"):
    shape = (1, 384, 384, 4, 32)
    call = ("tri384", "random", shape, "bfloat16", "fwd", peer, ms)
    return archive.Measurement(file, date, machine, family, "c", *call)


def test_results_page_takes_each_row_from_the_newest_run_that_compares(monkeypatch):
    monkeypatch.setattr(results_page, "_files", lambda text: "")
    old = [of_tri384("old.json", "2026-01-01", p, ms) for p, ms in (("ours", 9), ("flex", 8))]
    new = [of_tri384("new.json", "2026-01-02", p, ms) for p, ms in (("ours", 7), ("flex", 6))]
    alone = [of_tri384("alone.json", "2026-01-03", "ours", 5)]
    page = results_page.page([*old, *new, *alone])
    assert "| 7.00 | 6.00 | [2026-01-02](results/new.json) |" in page
    assert "/old.json" not in page and "/alone.json" not in page


def test_other_gpus_have_tables_of_their_own(monkeypatch):
    monkeypatch.setattr(results_page, "_files", lambda text: "")
    runs = [
        of_tri384(f"{date}.json", date, peer, ms, machine, family)
        for machine, family, date, times in (
            (archive.GPU_OF_RECORD, "sm90", "2026-01-01", (9.0, 8.0)),
            ("NVIDIA A100", "sm80", "2026-01-02", (7.0, 6.0)),
            ("NVIDIA H100", "sm90", "2026-01-03", (5.0, 4.0)),
            ("NVIDIA H100", "sm80", "2026-01-04", (3.0, 2.0)),  # forced
        )
        for peer, ms in zip(("ours", "flex"), times, strict=True)
    ]
    page = results_page.page(runs)
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    assert "| 9.00 | 8.00 |" in sections["Training crops"]
    assert "NVIDIA" not in sections["Training crops"].replace(archive.GPU_OF_RECORD, "")
    assert "| 7.00 | 6.00 |" in sections["Crops on one NVIDIA A100, Sm80 kernels"]
    assert "| 5.00 | 4.00 |" in sections["Crops on one NVIDIA H100, Sm90 kernels"]
    assert "| 3.00 | 2.00 |" in sections["Crops on one NVIDIA H100, Sm80 kernels"]
    assert [page.count(f"{ms}.00") for ms in (9, 7, 5, 3)] == [1, 1, 1, 1]


def test_tables_that_name_no_dtype_are_of_bfloat16(monkeypatch):
    monkeypatch.setattr(results_page, "_files", lambda text: "")
    measured = [
        replace(
            of_tri384(f"{dtype}.json", date, peer, 1.0),
            dtype=dtype,
            direction="bwd",
            mask=mask,
            extra_bytes=num_mib * 2**20,
        )
        for dtype, date, num_mib in (
            ("bfloat16", "2026-01-01", 300),
            ("float32", "2026-01-02", 700),
        )
        for mask in ("random", "none", "half")
        for peer in ("ours", "flex")
    ]
    page = results_page.page(measured)
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    for title in ("Memory", "Padded batches", "Limits"):
        assert "bfloat16.json" in sections[title], title
        assert "float32.json" not in sections[title], title
    assert "float32.json" in sections["Training crops"]


def test_replays_of_this_op_take_no_row_from_peers():
    """A file of this op alone has no part in the table of padding beside other implementations."""

    def measured(file, peer, mask):
        shape, call = (1, 768, 768, 4, 32), ("bfloat16", "fwd", peer, 1.0)
        return archive.Measurement(
            file, "2026-01-01", "GPU", "sm90", "c", "tri768", mask, shape, *call
        )

    shares = ("none", "pair-1/8", "pair-1/4")
    compared = [measured("a.json", peer, mask) for peer in ("ours", "flex") for mask in shares]
    alone = [measured("b.json", "ours", m) for m in (*shares, "pair-1/8-inf", "pair-1/4-inf")]
    run = results_padding.padded_runs([*compared, *alone])
    assert {m.file for by_mask in run.values() for m in by_mask.values()} == {"a.json"}


def test_masks_of_four_lengths_are_compared_by_batch_item():
    def measured(mask, batches, ms):
        shape, call = (batches, 384, 384, 4, 32), ("bfloat16", "fwd", "ours", ms)
        return archive.Measurement(
            "a.json", "2026-01-01", "GPU", "sm90", "c", "tri384", mask, shape, *call
        )

    _, lines = results_padding.padded([measured("none", 1, 2.0), measured("ragged", 4, 6.0)])
    assert "| 0.75 | - | - | - |" in lines


def test_table_of_this_op_alone_has_the_newest_replay_of_one_commit():
    def measured(file, commit, mask, ms):
        call = ((1, 384, 384, 4, 32), "bfloat16", "fwd", "ours", ms)
        return archive.Measurement(
            file, file[:10], "GPU", "sm90", commit, "tri384", mask, *call, replayed=True
        )

    _, lines = results_tables.alone(
        [
            measured("2026-01-01.json", "before", "none", 9.0),
            measured("2026-01-02.json", "now", "none", 7.0),
            measured("2026-01-02.json", "now", "half", 6.0),
            measured("2026-01-03.json", "now", "none", 8.0),
            measured("2026-01-03.json", "before", "none", 5.0),
        ]
    )
    assert "| 7.00 | - | [2026-01-02](results/2026-01-02.json) |" in lines
    assert len(lines.splitlines()) == 3


def test_a_row_from_two_files_links_both():
    def measured(date, direction, mask="none"):
        call = ((1, 384, 384, 4, 32), "bfloat16", direction, "ours", 1.0)
        return archive.Measurement(
            f"{date}.json", date, "GPU", "sm90", "c", "tri384", mask, *call, replayed=True
        )

    both = "| [2026-01-02](results/2026-01-02.json), [2026-01-01](results/2026-01-01.json) |"
    one, other = ("2026-01-01", "bwd"), ("2026-01-02", "fwd")
    _, lines = results_tables.alone([measured(*one), measured(*other)])
    assert both in lines
    masked = [measured(*call, mask) for call in (one, other) for mask in ("none", "half")]
    _, lines = results_padding.padded(masked)
    assert both in lines


def test_pictures_are_drawn_and_the_same_each_time(tmp_path):
    pictures = pytest.importorskip("benchmarks.pictures", exc_type=ImportError)
    for folder in ("a", "b"):
        pictures.draw(archive.load(), tmp_path / folder)
    shown = re.findall(r"\]\(pictures/([^)]+)\.svg\)", results_page.page(archive.load()))
    assert {path.stem for path in (tmp_path / "a").iterdir()} == set(shown)
    for name in shown:
        drawn = (tmp_path / "a" / f"{name}.svg").read_bytes()
        assert drawn == (tmp_path / "b" / f"{name}.svg").read_bytes()
        assert (b"exponentials" if "limits" in name else b"this op") in drawn


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 4), (0.0025, 5.5)])
def test_replays_are_measured_in_bursts_after_pauses(monkeypatch, seconds, expected):
    """Each replay takes a millisecond and tells its number in its burst, times that of the burst:
    without the first, the median of each, and of all seven.
    """
    replays, bursts = [], []

    def replay_ms(graph):
        replays.append(len(replays) - bursts[-1] + 0.75 * len(bursts))
        return replays[-1]

    clock = SimpleNamespace(
        perf_counter=lambda: 1e-3 * len(replays), sleep=lambda _: bursts.append(len(replays))
    )
    monkeypatch.setattr(replay, "time", clock)
    monkeypatch.setattr(replay, "BURST_SECONDS", seconds)
    monkeypatch.setattr(replay, "replay_ms", replay_ms)
    assert replay._steady_ms(None) == expected
    assert len(bursts) == replay.NUM_BURSTS


def test_replays_of_several_processes_join():
    first = replay.ReplayRow("sm90", "c", (1, 2), "fwd", "none", (3.0,))
    other = replay.ReplayRow("sm90", "c", (1, 2), "fwd", "none", (4.0,))
    rows = replay.read_rows({"results": json.loads(json.dumps([asdict(first)]))})
    assert rows == {first.key: first}
    assert other.joined(rows.get(other.key)).median_us == (3.0, 4.0)
