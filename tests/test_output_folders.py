from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo import output_folders
from grpo.output_folders import require_writable


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
