"""A stage takes its whole config file as parameters, so that no change of it goes unnoticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
STAGES = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text(encoding="utf-8"))["stages"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_tracks_each_config_that_it_reads_whole(stage: str) -> None:
    definition = STAGES[stage].get("do", STAGES[stage])
    whole = [name for entry in definition["params"] for name, keys in entry.items() if keys is None]
    for word in definition["cmd"].split():
        if word.endswith(".yaml"):
            assert word in whole


@pytest.mark.parametrize("line", ["rounds: 3", "  beta: 0.1"])
def test_a_parameter_that_is_taken_out_is_a_change(line: str, tmp_path: Path) -> None:
    """At the top and further down: reported against DVC where a stage names its parameters one by one."""

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout

    config = tmp_path / "train.yaml"
    config.write_text("rounds: 3\nloss:\n  beta: 0.1\n  clip: 0.2\n")
    (tmp_path / "dvc.yaml").write_text(
        "stages:\n  train:\n    cmd: echo done > out\n    params:\n      - train.yaml:\n    outs:\n      - out\n"
    )
    dvc = [sys.executable, "-m", "dvc"]
    run("git", "init", "--quiet")
    run(*dvc, "init", "--quiet")
    run(*dvc, "repro", "--quiet")
    assert "up to date" in run(*dvc, "status")
    config.write_text(config.read_text().replace(f"{line}\n", ""))
    assert "train:" in run(*dvc, "status")
