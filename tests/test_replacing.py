"""Files that are written whole or not at all, whatever is there already."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from fsdptrace.replacing import replaced


def put(path: Path, content: bytes = b"new") -> None:
    with replaced(path) as stream:
        stream.write(content)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_is_as_any_other(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        put(tmp_path / "page.html")
    finally:
        os.umask(old)
    assert (tmp_path / "page.html").read_bytes() == b"new"
    assert mode(tmp_path / "page.html") == 0o640
    assert os.listdir(tmp_path) == ["page.html"]


def test_what_is_there_stays_until_all_is_written_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_bytes(b"old")
    path.chmod(0o604)
    with pytest.raises(TypeError):
        put(path, "no bytes")  # type: ignore[arg-type]
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", ["page.html"])
    put(path)
    assert (path.read_bytes(), mode(path), os.listdir(tmp_path)) == (b"new", 0o604, ["page.html"])


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "latest.html"
    link.symlink_to("there/page.html")
    put(link)
    assert link.is_symlink()
    assert (tmp_path / "there" / "page.html").read_bytes() == b"new"


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    """Nothing takes its place, as nothing may take that of /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    put(pipe)
    reader.join(10)
    assert read == [b"new"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    for path, said in (
        (Path("/dev/full"), "No space left on device"), (tmp_path / "no" / "page.html", "No such file or directory"),
        (tmp_path, "Is a directory"), (tmp_path / ("long" * 80), "File name too long"),
    ):  # fmt: skip
        with pytest.raises(OSError, match=said) as failed:
            put(path)
        assert failed.value.filename == str(path)
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)
    assert os.listdir(tmp_path) == []
