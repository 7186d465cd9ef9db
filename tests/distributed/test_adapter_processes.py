"""Several processes train one adapter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_policy import train_config, write_config
from safetensors.torch import load_file
from torch import Tensor

from grpo.export import ExportSettings, adapter_form, export, policy_weights

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

TESTS = Path(__file__).resolve().parents[1]
STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    **{
        f"deepspeed_{stage}": {
            "class_path": "grpo.training.strategies.CPUDeepSpeedStrategy",
            "init_args": {"stage": stage},
        }
        for stage in (1, 2, 3)
    },
}


def train(folder: Path, strategy: Any, processes: int, dies: bool = False) -> str:
    """The train stage as a command, its reference renewed after every second round; gives what it printed."""
    folder.mkdir(exist_ok=True)
    config = train_config(folder, rounds=4, groups_per_round=4, validation_problems=0)
    config["checkpoint_every_n_updates"] = 1
    config["model"] |= {
        "adapter": {"rank": 4, "alpha": 8.0},
        "loss": {"reduction": "token_mean", "reference_refresh_rounds": 2},
        "optimizer": {"learning_rate": 1e-2, "micro_batch_rows": 3},
    }
    dying = {"class_path": "fixtures_policy.DiesOnce", "init_args": {"marker": str(folder / "died"), "calls": 28}}
    check = dying if dies else "fixtures_policy.share_of_lower_case"
    config["model"]["rewards"] = {"lower_case": {"check": check, "limit_seconds": None}}
    keeps = {"class_path": "fixtures_policy.KeepsState", "init_args": {"to": str(folder / "kept")}}
    config["trainer"] |= {"devices": processes, "strategy": strategy, "callbacks": [keeps]}
    command = [sys.executable, "-m", "grpo", "train", "--config", write_config(folder / "train.yaml", config)]
    paths = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    environment = os.environ | {"PYTHONPATH": paths, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=400)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    failed = dies and not (folder / "output").exists()
    assert (process.returncode != 0) is failed, output[-3000:]
    return output


def adapter(folder: Path) -> Tensor:
    tensors = load_file(folder / "adapter" / "adapter_model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    train(folder, "auto", 1)
    return folder


@pytest.fixture(scope="module", params=STRATEGIES)
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / request.param
    train(folder, STRATEGIES[request.param], 2)
    return folder


def test_two_processes_train_the_adapter_of_one(one: Path, two: Path) -> None:
    alone, together = (adapter(folder / "output" / "policy") for folder in (one, two))
    distance = (together - alone).abs()
    assert alone.abs().mean() > 1e-2
    assert distance.mean() < 1e-3 * alone.abs().mean()


def test_a_killed_run_of_two_ends_as_the_straight_one(two: Path, tmp_path: Path) -> None:
    """It dies in the last round, when the reference has been renewed."""
    strategy = STRATEGIES[two.name]
    train(tmp_path / "run", strategy, 2, dies=True)
    assert (tmp_path / "run" / "died").exists()
    assert "going on from" in train(tmp_path / "run", strategy, 2, dies=True)
    assert torch.equal(*(adapter(folder / "output" / "policy") for folder in (tmp_path / "run", two)))


def test_their_kept_state_exports_to_what_they_published(two: Path, tmp_path: Path) -> None:
    form = adapter_form(two / "kept")
    assert form is not None
    assert (form["rank"], form["alpha"], form["target_modules"]) == (4, 8.0, None)
    assert any(".lora_A." in name for name in policy_weights(two / "kept"))
    export(ExportSettings(two / "kept", two / "policy", tmp_path / "exported"))
    one, other = (load_file(f / "model.safetensors") for f in (tmp_path / "exported", two / "output" / "policy"))
    base = load_file(two / "policy" / "model.safetensors")
    assert one.keys() == other.keys() == base.keys()
    for name, weight in one.items():
        assert torch.equal(weight, other[name]), name
        assert torch.equal(weight, base[name]) is not name.endswith("_proj.weight"), name
