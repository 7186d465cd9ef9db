"""Advantages, losses and gradients of runs of TRL's ``GRPOTrainer``, worked out again here from what went into them.

Which options are the same stands in ``test_against_trl.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo.maths.group_advantages import group_advantages
from grpo.maths.grpo_loss import Reduction, token_weights

# TRL reads settings of transformers by names that have since changed.
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning")
pytest.importorskip("trl", reason="TRL is not installed: pip install -c constraints.txt -e '.[peers]'")

from maths.trl_trainer import (  # noqa: E402 - after the skip
    GROUP,
    LONGEST,
    ROWS,
    SAME_REDUCTION,
    GRPOTrainer,
    make_trainer,
    our_loss,
)

# Advantages


class Rewards:
    """The rewards that a test asks for, instead of a judgement of the completions."""

    __name__ = "rewards"

    def __init__(self) -> None:
        self.values: list[float | None] = []

    def __call__(self, completions: list[str], **_: Any) -> list[float | None]:
        return self.values[: len(completions)]


@pytest.fixture(scope="module")
def rewards() -> Rewards:
    return Rewards()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, rewards: Rewards) -> GRPOTrainer:
    made = make_trainer(tmp_path_factory.mktemp("trl"), rewards)
    made.model.train()
    return made


@pytest.mark.parametrize(("scale_rewards", "scale"), [("group", "group_std"), ("batch", "batch_std"), ("none", "none")])
@pytest.mark.parametrize(
    "values",
    [
        [[1, 0, 0], [1, 1, 0]],
        [[0.3, -2.5, 7.0], [1.5, 1.25, 1.0], [0, 0, 1]],
        [[1, 1, 1], [0, 0, 1]],  # a flat group
        [[1, None, 0], [0, 1, 1]],  # what could not be judged
        [[None, 1, None], [0, 1, 1], [None, None, None]],
    ],
)
def test_advantages(
    trainer: GRPOTrainer,
    rewards: Rewards,
    monkeypatch: pytest.MonkeyPatch,
    scale_rewards: str,
    scale: Any,
    values: list[list[float | None]],
) -> None:
    flat = [value for group in values for value in group]
    monkeypatch.setattr(trainer, "rollout_func", completions_of_one_token)
    monkeypatch.setattr(trainer, "scale_rewards", scale_rewards)
    monkeypatch.setattr(rewards, "values", flat)
    theirs = trainer._generate_and_score_completions([{"prompt": "1 2"}] * len(flat))["advantages"]
    table = torch.tensor([[math.nan if value is None else value for value in group] for group in values])
    ours = group_advantages(table, scored=~table.isnan(), scale=scale, std_correction=1, epsilon=1e-4)
    # theirs is float32
    torch.testing.assert_close(ours.flatten(), theirs.double(), rtol=1e-5, atol=1e-6)


def completions_of_one_token(prompts: list[str], _: GRPOTrainer) -> dict[str, list[list[float]]]:
    return {
        "prompt_ids": [[3, 4]] * len(prompts),
        "completion_ids": [[5]] * len(prompts),
        "logprobs": [[0.0]] * len(prompts),
    }


# A real run: its own model, samples and optimiser


@dataclass(frozen=True)
class Recorded:
    """A micro-batch of TRL's: what went into its loss, the loss, and its gradient in the log-probabilities."""

    tensors: dict[str, Tensor]
    loss: float
    gradient: Tensor


@pytest.mark.parametrize(("loss_type", "reduction"), [pair for pair in SAME_REDUCTION if pair[0] != "bnpo"])
def test_a_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_type: str, reduction: Reduction) -> None:
    """Two rounds of two updates of two micro-batches: ratios off 1, a policy off its reference."""
    recorded = record_losses(monkeypatch)
    rewards: list[list[float]] = []

    def distinct_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
        rewards.append([float(len(set(ids))) for ids in completion_ids])
        return rewards[-1]

    trainer = make_trainer(
        tmp_path,
        distinct_tokens,
        loss_type=loss_type,
        beta=0.04,
        per_device_train_batch_size=ROWS // 2,
        gradient_accumulation_steps=2,
        num_iterations=2,
        max_steps=4,
        learning_rate=0.02,
    )
    trainer.train()
    assert len(recorded) == 8
    for update in range(4):
        assert_same_update(recorded[2 * update : 2 * update + 2], rewards[update // 2], reduction)
    assert max((part.tensors["policy"] - part.tensors["old"]).abs().max() for part in recorded) > 0.2


def record_losses(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Filled while a trainer runs; its own methods do the work."""
    recorded: list[Recorded] = []
    scored: list[Tensor] = []
    score, compute_loss = GRPOTrainer._get_per_token_logps_and_entropies, GRPOTrainer._compute_loss

    def listening_score(self: GRPOTrainer, *args: Any, **options: Any) -> Any:
        outputs = score(self, *args, **options)
        scored.append(outputs[0])
        return outputs

    def listening_loss(self: GRPOTrainer, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        loss = compute_loss(self, model, inputs)
        (gradient,) = torch.autograd.grad(loss, scored[-1], retain_graph=True)
        tensors = {
            "policy": scored[-1].detach(),
            "old": inputs["old_per_token_logps"],
            "reference": inputs["ref_per_token_logps"],
            "entropy": torch.zeros_like(gradient),
            "advantages": inputs["advantages"],
            "mask": inputs["completion_mask"].bool(),
        }
        recorded.append(Recorded(tensors, loss.item(), gradient))
        return loss

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", listening_score)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", listening_loss)
    return recorded


def assert_same_update(parts: list[Recorded], rewards: list[float], reduction: Reduction) -> None:
    groups = torch.tensor(rewards).reshape(-1, GROUP)
    advantages = group_advantages(groups, std_correction=1, epsilon=1e-4).flatten()
    theirs = torch.cat([part.tensors["advantages"] for part in parts])
    # TRL shuffles the rows of a round before it cuts them
    torch.testing.assert_close(theirs.sort().values.double(), advantages.sort().values, rtol=1e-5, atol=1e-6)
    mask = torch.cat([part.tensors["mask"] for part in parts])
    weights = token_weights(mask, reduction=reduction, constant_length=LONGEST)
    for part, share in zip(parts, weights.split(ROWS // 2), strict=True):
        loss, (gradient, _), _ = our_loss(part.tensors, token_weights=share, kl_beta=0.04)
        assert loss == pytest.approx(part.loss, rel=1e-5, abs=1e-6)
        assert (gradient - part.gradient).norm() <= 1e-5 * part.gradient.norm()
