"""What a process says of others that are gone, and how long it waits for them; real ones are in tests/distributed."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from fixtures_policy import share_of_lower_case
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from grpo.rewards import RewardComponent
from grpo.training.checkpoints import require_processes
from grpo.training.processes import LostProcess, others_needed, require_patience, wait_at_most
from grpo.training.strategies import NonFiniteGradient

GONE = [
    RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7564. This is typically"),
    RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 12000ms for recv operation to complete"),
    torch.distributed.DistNetworkError("The client socket has timed out after 60000ms"),
]


@pytest.mark.parametrize("error", GONE, ids=lambda error: str(error)[:30])
def test_a_message_that_nobody_answers_is_told_as_a_lost_process(error: RuntimeError) -> None:
    expected = "did not come within longest_wait_minutes = 2: what it printed"
    with pytest.raises(LostProcess, match=expected) as told, others_needed(2.0, 2):
        raise error
    assert told.value.__cause__ is error
    assert told.value.exit_status == 75


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes do not match"),
        RuntimeError("CUDA error: the launch timed out and was terminated"),
        NonFiniteGradient("timed out"),
        ValueError("broken pipe"),
    ],
)
def test_other_faults_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as same, others_needed(2.0, 2):
        raise error
    assert same.value is error


def test_one_process_has_lost_nobody() -> None:
    with pytest.raises(RuntimeError, match="closed by peer") as same, others_needed(2.0, 1):
        raise GONE[0]
    assert same.value is GONE[0]


def test_the_longest_wait_is_the_strategy_s() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False)
    wait_at_most(trainer, 1.5)
    assert trainer.strategy._timeout == timedelta(seconds=90)  # type: ignore[attr-defined]
    for minutes in (0.0, float("inf"), float("nan"), 1e15):
        with pytest.raises(ValueError, match=r"longest_wait_minutes is .*: give minutes above 0"):
            wait_at_most(trainer, minutes)


def test_a_divided_state_names_both_numbers_and_a_whole_one_is_for_any(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    require_processes(tmp_path, 2)
    with pytest.raises(ValueError, match=r"trainer.devices \(by trainer.num_nodes\) makes 4 processes, but 2 wrote"):
        require_processes(tmp_path, 4)
    whole = tmp_path / "update-1.ckpt"
    whole.touch()
    require_processes(whole, 4)


def test_a_check_may_not_take_longer_than_the_others_wait() -> None:
    several: Any = SimpleNamespace(strategy=DDPStrategy())
    alone: Any = SimpleNamespace(strategy=SingleDeviceStrategy("cpu"))
    slow = {"slow": RewardComponent(share_of_lower_case, limit_seconds=121.0)}
    with pytest.raises(ValueError, match=r"model\.rewards\.slow\.limit_seconds is 121, longer than longest_wait_min"):
        require_patience(several, 2.0, slow)
    require_patience(several, 3.0, slow)
    require_patience(several, 2.0, {"slow": RewardComponent(share_of_lower_case, limit_seconds=120.0)})
    require_patience(alone, 2.0, slow)
