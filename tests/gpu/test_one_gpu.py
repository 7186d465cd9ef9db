"""A round on a GPU, by the profile that is shipped for one."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from fixtures_policy import policy_folder, problem_folder

from grpo import train

pytestmark = pytest.mark.gpu
PROFILE = Path(__file__).parents[2] / "configs" / "profiles" / "one_gpu.yaml"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")
def test_sampler_and_update_agree_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probabilities of the drawn tokens are the same by the sampler and by the update, up to rounding."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    arguments = ["--config", str(PROFILE), "--trainer.log_every_n_steps", "1", "--trainer.num_sanity_val_steps", "0"]
    train.main(
        [
            *arguments,
            f"--data.policy={policy_folder(tmp_path / 'policy')}",
            f"--data.problems={problem_folder(tmp_path / 'problems')}",
            "--data.rounds=2",
            "--data.groups_per_round=2",
            "--model.round.group_size=4",
            '--model.rewards={"answer": {"check": "grpo.rewards.exact_answer.exact_answer"}, '
            '"form": {"check": "grpo.rewards.answer_format.answer_format"}}',
            "--model.round.flat_groups=keep",
            f"--output={tmp_path / 'output'}",
            f"--runs={tmp_path / 'runs'}",
        ]
    )
    with (tmp_path / "output" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    assert all(float(row["loss/mismatch_max"]) < 1e-3 for row in rows)
