import hashlib
from pathlib import Path

import pytest

from grpo import run_identity
from grpo.run_identity import (
    code_digest,
    code_revision,
    file_digest,
    fingerprint,
    folder_digest,
    policy_digest,
    problems_digests,
    versions,
    weights_digest,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    (made / "sub").mkdir(parents=True)
    (made / "a.txt").write_bytes(b"one")
    (made / "sub" / "b.txt").write_bytes(b"two")
    return made


def test_a_file_is_its_bytes(folder: Path) -> None:
    assert file_digest(folder / "a.txt") == hashlib.sha256(b"one").hexdigest()


def test_a_folder_is_its_names_and_bytes_wherever_it_stands(folder: Path, tmp_path: Path) -> None:
    before = folder_digest(folder)
    folder = folder.rename(tmp_path / "moved")
    assert folder_digest(folder) == before
    (folder / "a.txt").write_bytes(b"One")
    changed = folder_digest(folder)
    (folder / "a.txt").write_bytes(b"one")
    assert folder_digest(folder) == before != changed
    (folder / "a.txt").rename(folder / "c.txt")
    assert folder_digest(folder) != before


def test_what_one_file_loses_another_cannot_win_back(tmp_path: Path) -> None:
    for name, contents in (("one", (b"ab", b"c")), ("two", (b"a", b"bc"))):
        (tmp_path / name).mkdir()
        for i, content in enumerate(contents):
            (tmp_path / name / str(i)).write_bytes(content)
    assert folder_digest(tmp_path / "one") != folder_digest(tmp_path / "two")


def test_a_missing_folder_is_an_error_and_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the stage that makes it has not run here"):
        folder_digest(tmp_path / "none")


def test_weights_are_told_apart_from_what_stands_beside_them(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")
    before = weights_digest(folder)
    (folder / "a.txt").write_bytes(b"other provenance")
    assert weights_digest(folder) == before
    (folder / "model.safetensors").write_bytes(b"Weights")
    assert weights_digest(folder) != before


def test_a_policy_is_what_it_answers_with_and_not_where_it_came_from(folder: Path) -> None:
    before = policy_digest(folder)
    for name in ("provenance.json", "resolved_config.yaml", "README.md"):
        (folder / name).write_text("another story")
    assert policy_digest(folder) == before
    (folder / "prompt_template.json").write_text("another way to ask")
    assert policy_digest(folder) != before
    with pytest.raises(ValueError, match="the stage that makes it has not run here"):
        policy_digest(folder / "none")


def test_problem_files_are_told_apart_by_split(folder: Path) -> None:
    (folder / "train.jsonl").write_bytes(b"one")
    (folder / "heldout.jsonl").write_bytes(b"two")
    (folder / "summary.json").write_bytes(b"{}")
    assert problems_digests(folder) == {
        "heldout": hashlib.sha256(b"two").hexdigest(),
        "train": hashlib.sha256(b"one").hexdigest(),
    }


def test_equal_parts_have_one_name_in_any_order() -> None:
    assert fingerprint({"a": 1, "b": {"x": 1, "y": 2}}) == fingerprint({"b": {"y": 2, "x": 1}, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
    assert len(fingerprint({})) == 16


def test_the_code_is_told_by_its_source_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_identity, "SOURCE", tmp_path)
    (tmp_path / "a.py").write_text("x = 1\n")
    before = code_digest()
    (tmp_path / "a.pyc").write_bytes(b"compiled")
    assert code_digest() == before
    (tmp_path / "a.py").write_text("x = 2\n")
    assert code_digest() != before


def test_the_code_of_some_rooms_is_deaf_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_identity, "SOURCE", tmp_path)
    (tmp_path / "room").mkdir()
    for name in ("a.py", "b.py", "room/c.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    before = code_digest(("a.py", "room"))
    (tmp_path / "b.py").write_text("x = 2\n")
    assert code_digest(("a.py", "room")) == before
    (tmp_path / "room" / "c.py").write_text("x = 2\n")
    assert code_digest(("a.py", "room")) != before


def test_outside_a_checkout_the_revision_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_identity, "SOURCE", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert code_revision() == "unknown"


def test_versions_name_what_the_numbers_depend_on() -> None:
    assert {"python", "torch", "transformers", "lightning", "numpy"} <= versions().keys()
    assert all(version[0].isdigit() for version in versions().values())
