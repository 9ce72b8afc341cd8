"""Answers on disk: whole or absent, never in the way."""

import json
import os
import threading
from pathlib import Path

import pytest

from op_builder.toolchain import memo


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DS4S_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(memo, "_answers", {})
    return tmp_path / "cache"


def new_process(monkeypatch):
    monkeypatch.setattr(memo, "_answers", {})


def never():
    raise AssertionError("must not be asked again")


def test_asked_once_in_a_process_and_between_processes(monkeypatch):
    assert memo.remember("kind", "key", lambda: {"a": [1, None]}) == {"a": [1, None]}
    assert memo.remember("kind", "key", never) == {"a": [1, None]}
    new_process(monkeypatch)
    assert memo.remember("kind", "key", never) == {"a": [1, None]}


def test_kind_and_key_count():
    assert memo.remember("kind", "key", lambda: 1) == 1
    assert memo.remember("kind", "other", lambda: 2) == 2
    assert memo.remember("other", "key", lambda: 3) == 3


OF_ANOTHER_KEY = {"key": "no", "answer": 1, "digest": memo._digest("no", 1)}
CHANGED = {"key": "key", "answer": 3, "digest": memo._digest("key", 1)}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"key": "key"}', json.dumps(OF_ANOTHER_KEY), json.dumps(CHANGED)]
)
def test_damaged_answer_is_asked_for_again(cache, monkeypatch, text):
    memo.remember("kind", "key", lambda: 1)
    (path,) = (cache / "memo").iterdir()
    path.write_text(text)
    new_process(monkeypatch)
    assert memo.remember("kind", "key", lambda: 2) == 2
    assert json.loads(path.read_text())["answer"] == 2


def test_cache_that_cannot_be_written(cache):
    cache.write_text("a file, not a folder")
    assert memo.remember("kind", "key", lambda: 1) == 1


def test_answers_of_a_readonly_cache_are_used(cache, tmp_path, monkeypatch):
    """A pod that can write nowhere asks no slow question that the image has the answer to."""
    memo.remember("kind", "key", lambda: 1)
    memo.export(tmp_path / "image")
    memo.export(Path("/dev/null/nowhere"))  # cannot be written: no matter
    monkeypatch.setenv("DS4S_CACHE_PATH", f"{tmp_path}/absent:{tmp_path}/image")
    monkeypatch.setenv("DS4S_CACHE_DIR", "/dev/null/nowhere")
    new_process(monkeypatch)
    assert memo.remember("kind", "key", never) == 1
    assert memo.remember("kind", "other", lambda: 2) == 2


def test_answers_that_others_may_write_are_not_read(cache, tmp_path, monkeypatch):
    """They name programs that are then run."""
    memo.remember("kind", "key", lambda: 1)
    memo.export(tmp_path / "image")
    (tmp_path / "image").chmod(0o777)
    monkeypatch.setenv("DS4S_CACHE_PATH", str(tmp_path / "image"))
    monkeypatch.setenv("DS4S_CACHE_DIR", "/dev/null/nowhere")
    new_process(monkeypatch)
    assert memo.known("kind", "key") is None


def test_failure_is_not_remembered():
    with pytest.raises(ZeroDivisionError):
        memo.remember("kind", "key", lambda: 1 // 0)
    assert memo.remember("kind", "key", lambda: 1) == 1


def test_many_writers_leave_one_whole_answer(cache, monkeypatch):
    """No temporary file remains, and what is there can be read."""

    def write():
        memo._write(cache / "memo" / "kind-0.json", "key", "x" * 100_000)

    threads = [threading.Thread(target=write) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (path,) = (cache / "memo").iterdir()
    assert json.loads(path.read_text())["answer"] == "x" * 100_000


def test_stamp_changes_with_the_file(tmp_path):
    program = tmp_path / "c++"
    missing = memo.file_stamp(program)
    program.write_text("one")
    link = tmp_path / "link"
    link.symlink_to(program)
    first, through = memo.file_stamp(program), memo.file_stamp(link)
    assert first != through  # a program may behave by the name by which it is called
    program.write_text("three")
    assert len({missing, first, memo.file_stamp(program)}) == 3
    assert through != memo.file_stamp(link), "behind a link, too"
    same_size = memo.file_stamp(program)
    os.utime(program, (0, 0))  # written in place
    assert memo.file_stamp(program) != same_size
