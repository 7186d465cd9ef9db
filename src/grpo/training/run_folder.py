"""A run's own folder: one process at a time trains in it, and it can be asked how the rounds went."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from grpo.training.run_loggers import METRICS_FILE


class RunInUse(RuntimeError):
    """Another process trains in this run's folder; the two would write over each other."""


@contextmanager
def only_trainer(run_folder: Path) -> Iterator[None]:
    """Keep every other training of this run out; the system opens the lock again however this process ends.

    Raises:
        RunInUse: another one is at work.
    """
    run_folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run_folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunInUse(
            f"this very run is being trained by another process, in {run_folder}: wait for it to finish, or end it "
            "and start again to go on from its state"
        ) from None
    try:
        yield
    finally:
        lock.release()


def rounds_without_update(run_folder: Path) -> list[int]:
    """The rounds that left the policy as it was."""
    with (run_folder / METRICS_FILE).open(newline="", encoding="utf-8") as file:
        return [int(row["round"]) for row in csv.DictReader(file) if not row.get("loss/updates")]
