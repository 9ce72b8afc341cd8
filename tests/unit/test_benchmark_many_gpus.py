"""The benchmark of several processes says what it needs before it measures."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks import many_gpus


@pytest.mark.parametrize(("options", "length"), [(["--length", "1536"], 1536), ([], 96)])
def test_length_is_a_multiple_of_the_processes(options, length, monkeypatch, capsys):
    """By default a small one on a CPU, where 1536 would take hours."""
    monkeypatch.setattr("sys.argv", ["many_gpus", *options])
    monkeypatch.setattr(many_gpus.dist, "init_process_group", lambda backend: None)
    monkeypatch.setattr(many_gpus.dist, "get_world_size", lambda: 5)
    monkeypatch.setattr(many_gpus.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        many_gpus.main()
    assert f"expected a multiple of the 5 processes; got {length}" in capsys.readouterr().err
