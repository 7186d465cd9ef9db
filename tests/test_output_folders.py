import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo import output_folders
from grpo.output_folders import require_writable
from grpo.whole_files import NotAFileError, write_whole


def test_a_folder_that_can_be_made_is_taken_and_not_made(tmp_path: Path) -> None:
    require_writable(tmp_path / "a" / "b", "output")
    require_writable(tmp_path, "output")
    assert list(tmp_path.iterdir()) == []


def test_a_relative_folder_is_looked_for_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    require_writable(Path("build/policy"), "output")
    Path("build").write_text("a file")
    with pytest.raises(ValueError, match=r"output is build/policy, but build is not a folder"):
        require_writable(Path("build/policy"), "output")


def test_a_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"output is .*link is not a folder"):
        require_writable(tmp_path / "link" / "policy", "output")


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason, and for root too, who passes every permission."""

    def refuse(dir: Path) -> Iterator[Any]:
        raise OSError(30, "Read-only file system", str(dir))

    monkeypatch.setattr(output_folders, "TemporaryFile", refuse)
    with pytest.raises(
        ValueError, match=r"output is .* cannot be written to \(Read-only file system\): choose another"
    ):
        require_writable(tmp_path / "policy", "output")


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "link"])
def test_no_file_takes_the_place_of_what_is_none(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "out"
    with socket.socket(socket.AF_UNIX) as made:
        if kind == "socket":
            made.bind(os.fspath(path))
        elif kind == "folder":
            path.mkdir()
        else:
            os.mkfifo(tmp_path / "pipe" if kind == "link" else path)
        if kind == "link":
            path.symlink_to(tmp_path / "pipe")
        before = path.lstat()
        with pytest.raises(NotAFileError, match=r"out' is a .*name a file"):
            write_whole(path, b"new")
        after = path.lstat()
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)


def test_a_file_takes_the_place_of_a_file(tmp_path: Path) -> None:
    write_whole(tmp_path / "a" / "out", b"old")
    write_whole(tmp_path / "a" / "out", b"new")
    assert [path.read_bytes() for path in (tmp_path / "a").iterdir()] == [b"new"]
