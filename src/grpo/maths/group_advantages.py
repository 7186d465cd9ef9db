"""Group-relative advantages: how much better a completion did than its siblings.

For rewards ``r_1 … r_G`` of one prompt group, GRPO uses no value network; the group is the baseline
(Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1):

    A_i = (r_i - mean(r)) / (std(r) + epsilon)

Everything is float64 whatever comes in, and nothing here carries a gradient. Rewards keep their own
unit; scaled advantages have none.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["mean", "leave_one_out", "batch_mean", "none"]
Scale = Literal["group_std", "batch_std", "none"]


def group_advantages(
    rewards: Tensor,
    *,
    scored: Tensor | None = None,
    baseline: Baseline = "mean",
    scale: Scale = "group_std",
    std_correction: int = 0,
    epsilon: float = 1e-8,
) -> Tensor:
    """Advantages ``[P, G]`` float64 of the rewards ``[P, G]`` of a round: P prompt groups of G rollouts.

    ``[0, 1, 1, 0]`` gives ``[-1, 1, 1, -1]``. A tied group has nothing to compare, so it gives exact
    zeros at any magnitude wherever its own mean or its own std is asked for; rounding in the mean is
    never blown up by ``1 / epsilon``. A group whose std is not far above ``epsilon`` is shrunk by it.

    Args:
        rewards: ``[P, G]``, the transformed rewards of *all* processes if a batch statistic is used.
        scored: ``[P, G]`` bool, default all. The others take no part in any statistic and get 0, as
            does the only scored member of a group; their rewards may be NaN.
        baseline: what is subtracted; see :func:`centred_rewards`.
        scale: what divides: the std of the group, or of all scored rewards (``batch_std``), or nothing
            (Dr. GRPO, arXiv:2503.20783, because the division favours questions that are nearly
            always or nearly never solved).
        std_correction: 0 divides the squares by n (population), 1 by n - 1 (sample).
        epsilon: added to the std, in units of reward.

    Raises:
        ValueError: an option outside the above; fewer than 2 rollouts a group; wrong rank, empty or
            non-finite rewards; statistics past the float64 range.
    """
    if scale not in ("group_std", "batch_std", "none"):
        raise ValueError(f"scale is {scale!r}: choose 'group_std', 'batch_std' or 'none'")
    if not 0.0 < epsilon < math.inf:
        raise ValueError(f"epsilon is {epsilon}: it must be positive and finite, for example 1e-8")
    _check_correction(std_correction)
    centred = centred_rewards(rewards, scored=scored, baseline=baseline)
    if scale == "none":
        return centred
    if scale == "batch_std":  # the whole batch as one group
        rewards, scored = rewards.reshape(1, -1), None if scored is None else scored.reshape(1, -1)
    std = group_std(rewards, scored=scored, std_correction=std_correction)
    tied = tied_groups(rewards, scored=scored)
    return torch.where(tied.unsqueeze(1), 0.0, centred / (std + epsilon).unsqueeze(1))


def centred_rewards(rewards: Tensor, *, scored: Tensor | None = None, baseline: Baseline = "mean") -> Tensor:
    """Rewards minus their baseline, ``[P, G]`` float64: the advantages before any scaling.

    Args:
        rewards: ``[P, G]``.
        scored: ``[P, G]`` bool, as in :func:`group_advantages`.
        baseline: ``mean`` of the group; ``leave_one_out``, the mean of the *other* members, which is
            independent of the rollout itself and so unbiased (RLOO, arXiv:2402.14740);
            ``batch_mean``, one threshold for all prompts; ``none``. With the last two a tied group
            has a signal of its own.
    """
    rewards, scored = _checked(rewards, scored)
    members = scored.sum(dim=1, keepdim=True, dtype=torch.float64)
    if baseline == "mean":
        centred = _deviations(rewards, scored)
    elif baseline == "leave_one_out":
        # r_i - mean of the others = (r_i - mean of all) * n / (n - 1)
        centred = _deviations(rewards, scored) * (members / (members - 1).clamp(min=1))
    elif baseline == "batch_mean":
        centred = _deviations(rewards.reshape(1, -1), scored.reshape(1, -1)).reshape(rewards.shape)
    elif baseline == "none":
        centred = rewards
    else:
        raise ValueError(f"baseline is {baseline!r}: choose 'mean', 'leave_one_out', 'batch_mean' or 'none'")
    return _in_range(torch.where(scored & (members > 1), centred, 0.0))


def group_std(rewards: Tensor, *, scored: Tensor | None = None, std_correction: int = 0) -> Tensor:
    """Standard deviation of the scored rewards of each group, ``[P]`` float64; 0 where fewer than two are scored.

    Log it beside the std of the batch, which is ``group_std(rewards.reshape(1, -1))``: the groups
    ``[5, 5]`` and ``[-5, -5]`` teach nothing, yet the std of the batch is 5.
    """
    _check_correction(std_correction)
    rewards, scored = _checked(rewards, scored)
    squares = _deviations(rewards, scored).square().sum(dim=1)
    return _in_range((squares / (scored.sum(dim=1) - std_correction).clamp(min=1)).sqrt())


def tied_groups(rewards: Tensor, *, scored: Tensor | None = None) -> Tensor:
    """Which groups are flat, ``[P]`` bool: all scored rewards equal, or fewer than two of them scored.

    The test is on the rewards as they are, not on a rounded std.
    """
    rewards, scored = _checked(rewards, scored)
    return ((rewards == _lowest(rewards, scored)) | ~scored).all(dim=1)


def _deviations(rewards: Tensor, scored: Tensor) -> Tensor:
    """Scored rewards minus their row's mean, 0 elsewhere.

    The lowest reward is taken off first: equal rewards then are exact zeros before they are summed,
    where the mean of three times 0.1 is not 0.1.
    """
    above_lowest = torch.where(scored, rewards - _lowest(rewards, scored), 0.0)
    mean = above_lowest.sum(dim=1, keepdim=True) / scored.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(scored, above_lowest - mean, 0.0)


def _lowest(rewards: Tensor, scored: Tensor) -> Tensor:
    """``[P, 1]``: each row's lowest scored reward (infinite where none is scored; no one reads it there)."""
    return rewards.masked_fill(~scored, math.inf).amin(dim=1, keepdim=True)


def _checked(rewards: Tensor, scored: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both as float64 and bool of one shape, unscored rewards replaced by 0."""
    if rewards.ndim != 2:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}: it must be [prompts, group size]")
    if rewards.shape[0] == 0:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}: it is empty, give at least one group")
    if rewards.shape[1] < 2:
        raise ValueError(f"rewards has group size {rewards.shape[1]}: a group needs at least 2 rollouts to compare")
    if scored is None:
        scored = torch.ones_like(rewards, dtype=torch.bool)
    if scored.dtype != torch.bool or scored.shape != rewards.shape:
        raise ValueError(
            f"scored is {scored.dtype} of shape {tuple(scored.shape)}: it must be bool of shape {tuple(rewards.shape)}"
        )
    rewards = torch.where(scored, rewards.detach().to(torch.float64), 0.0)
    if not rewards.isfinite().all():
        culprit = rewards[~rewards.isfinite()][0].item()
        raise ValueError(f"rewards holds {culprit}: mark what could not be scored as False in scored")
    return rewards, scored


def _check_correction(std_correction: int) -> None:
    if std_correction not in (0, 1):
        raise ValueError(f"std_correction is {std_correction}: choose 0 (population) or 1 (sample)")


def _in_range(statistics: Tensor) -> Tensor:
    if not statistics.isfinite().all():
        raise ValueError("rewards have a mean or a std past the float64 range: scale the rewards down")
    return statistics
