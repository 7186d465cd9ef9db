"""What a run is made of, and the one name that follows from it."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "tokenizers", "lightning", "deepspeed", "numpy", "scipy", "reasoning-gym")
# Stands in a policy folder that a training made: what it was trained with.
CONFIG_FILE = "resolved_config.yaml"
# Stands in every policy folder: where the policy came from.
PROVENANCE_FILE = "provenance.json"
# They say where a policy came from, not what it answers, so they stay out of its hash.
_NOT_THE_POLICY = frozenset({PROVENANCE_FILE, CONFIG_FILE, "README.md"})
SOURCE = Path(__file__).parent


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_digest(folder: Path, names: Iterable[Path] | None = None) -> str:
    """SHA-256 over the relative names and the bytes of a folder's files, in the order of their names.

    Args:
        folder: where the names start.
        names: which files; all of them by default.

    Raises:
        ValueError: the folder is not there.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: the stage that makes it has not run here")
    digest = hashlib.sha256()
    for path in sorted(names if names is not None else (p for p in folder.rglob("*") if p.is_file())):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{file_digest(path)}\n".encode())
    return digest.hexdigest()


def weights_digest(policy_folder: Path) -> str:
    """SHA-256 over a policy folder's weight files alone."""
    return folder_digest(policy_folder, policy_folder.glob("*.safetensors"))


def policy_digest(policy_folder: Path) -> str:
    """SHA-256 over the files of a policy folder that decide what it answers.

    The training writes it into ``run.json`` and an evaluation into its numbers, so that the report can tell
    whether the one evaluated the policy of the other.
    """
    return folder_digest(
        policy_folder, (p for p in policy_folder.glob("*") if p.is_file() and p.name not in _NOT_THE_POLICY)
    )


def problems_digests(problems_folder: Path) -> dict[str, str]:
    """SHA-256 of each problem file of a folder by split, such as ``heldout``."""
    return {path.stem: file_digest(path) for path in sorted(problems_folder.glob("*.jsonl"))}


def code_digest(names: Iterable[str] = (".",)) -> str:
    """SHA-256 over the package's own source.

    Args:
        names: files and folders of the package; all of it by default.
    """
    chosen = [SOURCE / name for name in names]
    files = {file for path in chosen for file in (path.rglob("*.py") if path.is_dir() else (path,))}
    return folder_digest(SOURCE, files)


def code_revision() -> str:
    """The commit that the source stands at, ``+changes`` where it differs, ``unknown`` outside a git checkout."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(SOURCE), *arguments], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return "unknown"
    return commit + ("+changes" if git("status", "--porcelain", "--", ".") else "")


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def fingerprint(parts: Mapping[str, Any]) -> str:
    """A short name for config, data, code and versions together: the same parts, the same name."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
