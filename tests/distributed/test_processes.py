"""Several processes on this machine make the updates that one makes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from fixtures_policy import train_config, write_config
from torch import Tensor

from grpo.rollouts.policies import load_policy

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

TESTS = Path(__file__).resolve().parents[1]
SECONDS = 400
STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "deepspeed": {"class_path": "grpo.training.strategies.CPUDeepSpeedStrategy"},
}


def train(folder: Path, strategy: Any, processes: int, **optimizer: Any) -> Path:
    """The train stage as a command, as a user runs it."""
    folder.mkdir()
    config = train_config(folder, rounds=2, groups_per_round=4, validation_problems=2)
    config["model"]["loss"] = {"reduction": "token_mean"}
    config["model"]["optimizer"] |= optimizer
    config["trainer"] |= {"devices": processes, "strategy": strategy}
    command = [sys.executable, "-m", "grpo", "train", "--config", write_config(folder / "train.yaml", config)]
    paths = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    environment = os.environ | {"PYTHONPATH": paths, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        finally:  # whatever the processes wait for, none outlives the test
            if process.poll() is None:
                os.killpg(process.pid, 9)
    assert process.returncode == 0, output[-3000:]
    return folder / "output"


def weights(output: Path) -> Tensor:
    return torch.cat([p.detach().flatten() for p in load_policy(output / "policy").model.parameters()])


def rollouts(output: Path) -> dict[str, dict[str, Any]]:
    files = sorted((output / "record" / "rollouts").iterdir())
    return {row["rollout_id"]: row for path in files for row in pq.read_table(path).to_pylist()}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("one") / "run", "auto", 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_make_the_updates_of_one(one: Path, tmp_path: Path, strategy: str) -> None:
    two = train(tmp_path / "run", STRATEGIES[strategy], 2)
    alone, together = rollouts(one), rollouts(two)
    assert together.keys() == alone.keys()
    for name, row in alone.items():
        assert together[name]["completion_tokens"] == row["completion_tokens"]
    # Adam's first steps divide a gradient by its own size, so where it is all rounding the steps may differ
    distance = (weights(two) - weights(one)).abs()
    moved = (weights(one) - weights(one.parent)).abs()
    assert distance.mean() < 1e-3 * moved.mean()
    assert distance.max() < 1e-4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_leave_one_run(tmp_path: Path, strategy: str) -> None:
    output = train(tmp_path / "run", STRATEGIES[strategy], 2)
    [_] = (output.parent / "runs").iterdir()
    names = sorted(path.name for path in (output / "record" / "updates").iterdir())
    assert names == [f"round-{r:05d}-rank-{rank}.parquet" for r in range(2) for rank in range(2)]
    drawn = list(rollouts(output).values())
    assert len(drawn) == 2 * 4 * 4
    assert len({tuple(row["completion_tokens"]) for row in drawn}) == len(drawn)  # no process draws another's
    assert [line.split(",")[0] for line in (output / "metrics.csv").read_text().splitlines()] == ["round", "0", "1"]


def test_the_comparison_can_fail(one: Path, tmp_path: Path) -> None:
    other = train(tmp_path / "run", "auto", 1, max_gradient_norm=0.01)
    assert (weights(other) - weights(one)).abs().mean() > 1e-6
