"""Options of the benchmarks: names that there are not, masks in a name, files that are there."""

import argparse
import json
import os

import pytest

torch = pytest.importorskip("torch")

from benchmarks import alone_cli, archive, cli  # noqa: E402
from benchmarks.result_file import command_line, save  # noqa: E402


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("run --shapes nope", "no workload or group is called 'nope'"),
        ("run --shapes tri384/nope", "no mask is called 'nope'"),
        ("run --masks nope", "no mask is called 'nope'"),
        ("run --dtype int8", "no dtype is called 'int8'; there are: fp32, bf16, fp16"),
        ("replay --shapes nope", "no workload or group is called 'nope'"),
        ("replay --direction fwd+bwd", "no direction is called 'fwd+bwd'; there are: fwd, bwd"),
        ("beside . --direction fwd+bwd", "no direction is called 'fwd+bwd'; there are: fwd, bwd"),
        ("layers --modes bogus", "no mode is called 'bogus'; there are: eager, compiled"),
        ("run --runs 0", "expected a whole number of at least 1, got '0'"),
        ("beside . --rounds 0", "expected a whole number of at least 1, got '0'"),
        ("layers --lengths 384,", "expected a whole number of at least 1, got ''"),
        ("blocks --crops abc", "expected a whole number of at least 1, got 'abc'"),
    ],
)
def test_unknown_names_are_told(command, message, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(command.split())
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def chosen(shapes, masks, otherwise=""):
    options = argparse.Namespace(shapes=shapes, masks=masks)
    return [(one.id, one.mask.id) for one in alone_cli.under_masks(options, otherwise)]


def test_a_mask_in_a_name_is_the_one_that_is_measured(capsys):
    own = [("tri384/half", "half"), ("tri768/pair-1/9-rows", "pair-1/9-rows")]
    for masks, otherwise in ((None, ""), (None, "none"), ("none", "")):
        assert chosen("tri384/half,tri768/pair-1/9-rows", masks, otherwise) == own
    assert chosen("tri384", None, "none") == [("tri384/none", "none")]
    assert [mask for _, mask in chosen("tri384", "half,random")] == ["half", "random"]
    assert chosen("row512x384", "half,pair-1/9-rows") == [("row512x384/half", "half")]
    assert "row512x384: no pair map, left out under pair-1/9-rows" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "beside ."])
def test_masks_that_leave_no_workload_are_told(command, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main([*command.split(), "--shapes", "cpu64x384", "--masks", "pair-1/2"])
    assert error.value.code == 2
    assert "cpu64x384: no pair map, left out under pair-1/2" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the file's name has a GPU's in it")
def test_a_second_run_of_a_day_is_a_second_file(tmp_path):
    argv = "layers --lengths 5 --modes eager --seconds 0 --runs 1 --commit x --what t --json"
    for _ in range(2):
        assert cli.main([*argv.split(), str(tmp_path)]) == 0
    names = sorted(path.name.partition("core-")[2] for path in tmp_path.glob("*.json"))
    assert names == ["t-2.json", "t.json"]


@pytest.mark.parametrize("place", ["", "--json ."])
def test_rows_are_appended_to_a_named_file(place, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cli.main(f"replay --append {place}".split()) == 2
    assert "--append: expected --json FILE.json" in capsys.readouterr().out


def test_a_place_that_cannot_be_written_is_told_before_measuring(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cli, "describe", None)
    for place in ("file", "file/x.json"):
        assert cli.main(["run", "--json", str(tmp_path / place)]) == 2
        assert f"--json {tmp_path / place}: expected a place" in capsys.readouterr().out


def test_a_full_disk_leaves_what_was_written_before(tmp_path, monkeypatch):
    """`run` writes its file anew after each workload."""
    arguments = argparse.Namespace(json=tmp_path / "x.json", what=None, words=[])
    save(arguments, None, {"results": [1]})
    before = arguments.json.read_text()

    def full(handle, mode):
        os.close(handle)
        raise OSError("no space left on device")

    monkeypatch.setattr("op_builder.system.files.open", full, raising=False)
    with pytest.raises(OSError, match="no space"):
        save(arguments, None, {"results": [1, 2]})
    assert arguments.json.read_text() == before
    assert list(tmp_path.iterdir()) == [arguments.json]


def test_a_file_of_host_times_has_the_threads_that_were_used(tmp_path, monkeypatch):
    threads = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr("benchmarks.host.measure_overhead", lambda **_: threads.append(1) or [])
    assert cli.main(["host", "--json", str(tmp_path / "x.json")]) == 0
    assert json.loads((tmp_path / "x.json").read_text())["environment"]["num_threads"] == 1


def test_a_command_line_names_no_file():
    words = ["run", "--json=/home/me/x.json", "--what", "a", "--commit=b", "--seed", "1"]
    assert command_line(words) == "python -m benchmarks run --seed 1"


def test_newest_results_are_of_the_gpu_of_record(tmp_path):
    """Times of one card are divided by no other card's ceilings."""
    for number, gpu in enumerate([archive.GPU_OF_RECORD, "NVIDIA H100", None]):
        environment = {"gpu": gpu, "date": f"2026-11-0{number + 1}"}
        content = {"kind": "ceilings", "environment": environment}
        (tmp_path / f"{number}.json").write_text(json.dumps(content))
    for device, file in (("cuda", "0.json"), ("cpu", "2.json")):
        found = archive.latest("ceilings", tmp_path, device=device)
        assert found is not None and found[0] == file
