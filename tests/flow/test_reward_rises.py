"""Training teaches: the mean reward of a toy task rises, and only because of the advantages."""

from pathlib import Path
from statistics import fmean

import pytest
import torch
from fixtures_policy import fit, policy_folder, problem_folder, share_of_lower_case
from torch import Tensor

from grpo.rewards import RewardComponent
from grpo.rollouts.sampling import SamplingSettings
from grpo.training import grpo_module
from grpo.training.grpo_module import GRPOModule
from grpo.training.prompt_group_datamodule import PromptGroupDataModule
from grpo.training.run_loggers import RoundCSVLogger
from grpo.training.settings import LossSettings, OptimizerSettings

ROUNDS = 20


def rewards_by_round(folder: Path, loss: LossSettings) -> list[float]:
    policy, problems = policy_folder(folder / "policy"), problem_folder(folder / "problems")
    module = GRPOModule(
        policy,
        {"lower_case": RewardComponent(share_of_lower_case, limit_seconds=None)},
        SamplingSettings(max_new_tokens=6),
        loss=loss,
        optimizer=OptimizerSettings(learning_rate=6e-3),
    )
    data = PromptGroupDataModule(policy, problems, ROUNDS, groups_per_round=4, validation_problems=0)
    logger = fit(module, data, folder).logger
    assert isinstance(logger, RoundCSVLogger)
    return [row["reward/mean"] for row in logger.rows.values()]


def rise(rewards: list[float]) -> float:
    return fmean(rewards[-3:]) - fmean(rewards[:3])


@pytest.mark.parametrize("loss", [LossSettings(), LossSettings(kl_beta=0.0, ratio="sequence", reduction="token_mean")])
def test_the_mean_reward_rises(tmp_path: Path, loss: LossSettings) -> None:
    assert rise(rewards_by_round(tmp_path, loss)) > 0.3


def test_it_does_not_rise_with_advantages_that_know_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = grpo_module.group_advantages
    generator = torch.Generator().manual_seed(0)

    def shuffled(rewards: Tensor, **settings: object) -> Tensor:
        advantages = real(rewards, **settings)  # type: ignore[arg-type]
        order = torch.rand(advantages.shape, generator=generator).argsort(dim=1)
        return advantages.gather(1, order)

    monkeypatch.setattr(grpo_module, "group_advantages", shuffled)
    assert abs(rise(rewards_by_round(tmp_path, LossSettings()))) < 0.15
