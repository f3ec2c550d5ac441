"""Text in, and text out that is written whole or not at all."""

import os
import subprocess
import sys

import pytest

from ddtree_check.base.errors import UsageError
from ddtree_check.base.files import check_writable, json_lines, write_text
from ddtree_check.base.journal import append_journal


def test_lines_end_at_newlines_only(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes('\ufeff{"a": "x\u2028y"}\r\n\n[1]'.encode())
    assert list(json_lines(path)) == [(1, {"a": "x\u2028y"}), (3, [1])]


def test_a_write_replaces_the_old_file_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "out.json"
    write_text(path, "old")
    with path.open() as old:
        write_text(path, "new")
        assert old.read() == "old"  # another file took its place
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["out.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    write_text(path, "old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ValueError, match="No space left"):
        write_text(path, "new" * 1000)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["out.json"]


def test_a_full_disk_is_named_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    for write in (write_text, lambda path, text: append_journal(path, {"text": text})):
        with pytest.raises((ValueError, UsageError), match="make room there or name a file on another disk"):
            write(tmp_path / "out", "new")


def test_what_a_kill_left_goes_with_the_next_write(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = [tmp_path / f".out.json.{pid}.ddtree-check-part" for pid in (ended.pid, os.getppid())]
    for part in left:
        part.write_text("x")
    write_text(tmp_path / "out.json", "new")
    assert sorted(os.listdir(tmp_path)) == [left[1].name, "out.json"]  # that of a process that runs stays


@pytest.mark.parametrize("name", ["nowhere/out.json", "."])
def test_places_that_cannot_be_written_are_refused_beforehand(tmp_path, name):
    for call in (check_writable, lambda path: write_text(path, "x")):
        with pytest.raises(ValueError, match=r"cannot be written|not a regular file"):
            call(tmp_path / name)
    check_writable(tmp_path / "fine.json")
    assert os.listdir(tmp_path) == []
