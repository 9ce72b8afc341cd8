"""The benchmark of several processes says what it needs before it measures."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks import many_gpus


def test_length_is_a_multiple_of_the_processes(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["many_gpus", "--length", "1536"])
    monkeypatch.setattr(many_gpus.dist, "init_process_group", lambda backend: None)
    monkeypatch.setattr(many_gpus.dist, "get_world_size", lambda: 5)
    monkeypatch.setattr(many_gpus.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        many_gpus.main()
    assert "expected a multiple of the 5 processes; got 1536" in capsys.readouterr().err
