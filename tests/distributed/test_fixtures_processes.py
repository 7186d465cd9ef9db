"""The commands that the tests run are those of a user, whatever ran in the tests' own process before."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures_processes import train, written_config

from tests.distributed.train_each import train_each

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def test_a_killed_command_goes_on_after_a_training_in_this_process(tmp_path: Path) -> None:
    train_each([written_config(tmp_path / "here", "auto", 1)])
    dying = {"class_path": "fixtures_policy.DiesOnce", "init_args": {"marker": str(tmp_path / "died"), "calls": 32}}
    changes = {"rewards": {"lower_case": {"check": dying, "limit_seconds": None}}}
    assert "going on from" not in train(tmp_path / "run", "auto", 1, changes, fails=True)
    assert (tmp_path / "died").exists()
    assert "going on from" in train(tmp_path / "run", "auto", 1, changes)
