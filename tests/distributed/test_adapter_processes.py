"""Several processes train one adapter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_processes import STRATEGIES, train
from safetensors.torch import load_file
from torch import Tensor

from grpo.export import ExportSettings, adapter_form, export, policy_weights

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

TRIED = ("ddp", "fsdp2", "deepspeed_1", "deepspeed_2", "deepspeed_3")
DATA = {"rounds": 4, "validation_problems": 0}


def changes(**rewards: Any) -> dict[str, Any]:
    """An adapter is trained, and its reference renewed after every second round."""
    return {
        "adapter": {"rank": 4, "alpha": 8.0},
        "loss": {"reference_refresh_rounds": 2},
        "optimizer": {"learning_rate": 1e-2, "micro_batch_rows": 3},
        "rewards": rewards,
    }


def adapter(folder: Path) -> Tensor:
    tensors = load_file(folder / "adapter" / "adapter_model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    train(folder, "auto", 1, changes(), data=DATA)
    return folder


@pytest.fixture(scope="module", params=TRIED)
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / request.param
    train(folder, STRATEGIES[request.param], 2, changes(), data=DATA)
    return folder


def test_two_processes_train_the_adapter_of_one(one: Path, two: Path) -> None:
    alone, together = (adapter(folder / "output" / "policy") for folder in (one, two))
    distance = (together - alone).abs()
    assert alone.abs().mean() > 1e-2
    assert distance.mean() < 1e-3 * alone.abs().mean()


def test_a_killed_run_of_two_ends_as_the_straight_one(two: Path, tmp_path: Path) -> None:
    """It dies in the last round; the state it goes on from holds a reference that was renewed before."""
    strategy = STRATEGIES[two.name]
    dying = {"class_path": "fixtures_policy.DiesOnce", "init_args": {"marker": str(tmp_path / "died"), "calls": 34}}
    model = changes(lower_case={"check": dying, "limit_seconds": None})
    assert "going on from" not in train(tmp_path / "run", strategy, 2, model, fails=True, data=DATA)
    assert (tmp_path / "died").exists()
    output = train(tmp_path / "run", strategy, 2, model, data=DATA)
    assert re.search(r"going on from \S+/update-3\.ckpt", output), output
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
