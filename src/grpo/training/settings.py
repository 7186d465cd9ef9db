"""What can be set about the method. Each field is a key of ``configs/train.yaml``, explained under itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from grpo.maths.group_advantages import Baseline, Scale, group_advantages
from grpo.maths.grpo_loss import KLEstimator, Ratio, Reduction, grpo_loss


@dataclass(frozen=True)
class AdvantageSettings:
    """How a group's rewards become advantages; see ``group_advantages``.

    Args:
        baseline: what is taken off a reward: the group's ``mean``, ``leave_one_out``, ``batch_mean``, ``none``.
        scale: what the rest is divided by: ``group_std``, ``batch_std`` or ``none``.
        std_correction: 0 for the population's standard deviation, 1 for the sample's.
        epsilon: added to the standard deviation.
    """

    baseline: Baseline = "mean"
    scale: Scale = "group_std"
    std_correction: int = 0
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _try_out("advantages", lambda: group_advantages(torch.zeros(1, 2), **asdict(self)))


@dataclass(frozen=True)
class LossSettings:
    """The objective; see ``grpo_loss``.

    Args:
        clip_low: how far below 1 the ratio counts.
        clip_high: how far above 1; null means clip_low.
        dual_clip: bound on a negative advantage's loss, in units of it; null for none.
        ratio: ``token`` or ``sequence`` (GSPO).
        reduction: ``response_mean``, ``token_mean``, ``group_mean`` or ``constant`` (Dr. GRPO).
        constant_length: the divisor's length, for ``constant``.
        kl_beta: weight of the KL term beside the loss; 0 loads no reference.
        kl_estimator: ``k1``, ``k2`` or ``k3``.
    """

    clip_low: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = None
    ratio: Ratio = "token"
    reduction: Reduction = "response_mean"
    constant_length: int | None = None
    kl_beta: float = 0.04
    kl_estimator: KLEstimator = "k3"

    def __post_init__(self) -> None:
        token = torch.zeros(1, 1)
        mask, ids = torch.ones(1, 1), torch.zeros(1, dtype=torch.long)
        _try_out(
            "loss",
            lambda: grpo_loss(token, token, token[0], mask, reference_logprobs=token, group_ids=ids, **asdict(self)),
        )


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, and how the gradient reaches it.

    Args:
        learning_rate: of the first round.
        end_factor: what it is multiplied by in the last round, linear in between; 1 keeps it constant.
        betas: decay of the gradient's mean and of its square.
        weight_decay: decoupled from the gradient.
        max_gradient_norm: longer gradients are scaled down to it.
        micro_batch_rows: completions run forward and backward at a time; less needs less memory, the
            gradient is the same.
    """

    learning_rate: float = 1e-5
    end_factor: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0
    micro_batch_rows: int = 32

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ValueError(f"optimizer.learning_rate is {self.learning_rate}: it must be positive")
        if not 0 <= self.end_factor <= 1:
            raise ValueError(
                f"optimizer.end_factor is {self.end_factor}: it must be from 0 to 1 (1 for a constant rate)"
            )
        if not self.max_gradient_norm > 0:
            raise ValueError(f"optimizer.max_gradient_norm is {self.max_gradient_norm}: it must be positive")
        if self.micro_batch_rows < 1:
            raise ValueError(f"optimizer.micro_batch_rows is {self.micro_batch_rows}: it must be at least 1")

    def learning_rate_of(self, round_index: int, rounds: int) -> float:
        """The learning rate of a round, counted from 0."""
        progress = round_index / max(1, rounds - 1)
        return self.learning_rate * (1.0 + (self.end_factor - 1.0) * progress)


@dataclass(frozen=True)
class RoundSettings:
    """What happens in a round: sample, reward, compare, update.

    Args:
        group_size: completions of each prompt, compared with one another.
        flat_groups: groups whose rewards are all equal are ``keep``-ed in the denominators with
            advantage 0 (the original objective), or ``skip``-ped.
        updates: optimiser steps on the same rollouts.
        max_failure_share: stop when more than this share of a round's rollouts could not be scored.
        validation_samples: completions of each validation problem.
    """

    group_size: int = 8
    flat_groups: Literal["keep", "skip"] = "skip"
    updates: int = 1
    max_failure_share: float = 0.1
    validation_samples: int = 2

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(
                f"round.group_size is {self.group_size}: an advantage compares the members of a group, so it needs "
                "at least 2 (8 is usual)"
            )
        if self.updates < 1:
            raise ValueError(f"round.updates is {self.updates}: it must be at least 1")
        if not 0 <= self.max_failure_share <= 1:
            raise ValueError(f"round.max_failure_share is {self.max_failure_share}: choose from 0 (none) to 1 (all)")
        if self.validation_samples < 1:
            raise ValueError(f"round.validation_samples is {self.validation_samples}: it must be at least 1")


def _try_out(section: str, use: Callable[[], object]) -> None:
    """Let the maths check their own options when the config is read, on numbers that stand for nothing."""
    try:
        use()
    except ValueError as error:
        raise ValueError(f"{section}.{error}") from None
