"""What can be set about the method. Each field is a key of ``configs/train.yaml``, explained under itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from grpo.maths.group_advantages import Baseline, Scale, group_advantages
from grpo.maths.grpo_loss import KLEstimator, Ratio, Reduction, grpo_loss
from grpo.rollouts.collate import PassLimits
from grpo.rollouts.flat_groups import AtLimit, FlatGroups
from grpo.rollouts.group_keys import GroupUnit
from grpo.rollouts.reward_transform import RewardTransform
from grpo.rollouts.sampling import SamplingSettings


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
        _try_out("advantages", lambda: group_advantages(torch.zeros(1, 2), **self.options()))

    def options(self) -> dict[str, Any]:
        """What ``group_advantages`` takes by the same name."""
        return asdict(self)


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
        kl_on_flat_groups: whether flat groups that are kept feel the KL term.
        reference_refresh_rounds: the reference becomes the policy after every so many rounds; null keeps
            it as it was at the start.
        entropy_bonus: weight of the entropy, taken off the loss.
        old_logprobs: what stands under the ratio: ``recomputed`` by the training pass at the weights that
            sampled (which costs a pass only where round.minibatches is above 1), or ``recorded`` by the sampler.
        mismatch_cap: bound on the weight that makes up for a difference between the distribution that was sampled
            from and the policy (truncated importance sampling); null for no correction.
        mask_truncated: take completions that were cut off out of the loss; they stay in the baseline.
    """

    clip_low: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = None
    ratio: Ratio = "token"
    reduction: Reduction = "response_mean"
    constant_length: int | None = None
    kl_beta: float = 0.04
    kl_estimator: KLEstimator = "k3"
    kl_on_flat_groups: bool = True
    reference_refresh_rounds: int | None = None
    entropy_bonus: float = 0.0
    old_logprobs: Literal["recomputed", "recorded"] = "recomputed"
    mismatch_cap: float | None = None
    mask_truncated: bool = False

    def __post_init__(self) -> None:
        token = torch.zeros(1, 1)
        mask, ids = torch.ones(1, 1), torch.zeros(1, dtype=torch.long)
        options = self.options() | {"reduction": self.reduction, "constant_length": self.constant_length}
        options |= {"reference_logprobs": token, "entropy": token, "sampling_logprobs": token, "group_ids": ids}
        _try_out("loss", lambda: grpo_loss(token, token, token[0], mask, **options))
        refresh = self.reference_refresh_rounds
        if refresh is not None and refresh < 1:
            raise ValueError(
                f"loss.reference_refresh_rounds is {refresh}: give a number of rounds, or null to keep the reference"
            )
        if refresh is not None and self.kl_beta == 0:
            raise ValueError(
                f"loss.reference_refresh_rounds is {refresh}, but loss.kl_beta is 0 and no reference is loaded: "
                "set one of them otherwise"
            )

    def options(self) -> dict[str, Any]:
        """What ``grpo_loss`` takes by the same name; the reduction goes into the token weights instead."""
        names = ("clip_low", "clip_high", "dual_clip", "ratio", "kl_beta", "kl_estimator", "entropy_bonus")
        return {name: getattr(self, name) for name in (*names, "mismatch_cap")}


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, and how the gradient reaches it.

    Args:
        learning_rate: of the first round; an update moves each weight by about as much, so at most 1.
        end_factor: what it is multiplied by in the last round, linear in between; 1 keeps it constant.
        betas: decay of the gradient's mean and of its square.
        weight_decay: decoupled from the gradient.
        max_gradient_norm: longer gradients are scaled down to it; inf leaves them as they are.
        micro_batch_rows: completions run forward and backward at a time, at most; null for any number. Less needs
            less memory, the gradient is the same.
        micro_batch_tokens: tokens run forward and backward at a time, at most, padding included; null for any number.
            Where both are given, both hold. A group that does not fit is cut, and its prompt runs once for each part.
        shared_prompt: whether the completions of a group share one pass over their prompt; the gradient is the same.
        gradient_checkpointing: keep the activations of no layer, and compute them again in the backward pass: less
            memory for about a third more time. The gradient is the same, and so is what is sampled.
    """

    learning_rate: float = 1e-5
    end_factor: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0
    micro_batch_rows: int | None = 32
    micro_batch_tokens: int | None = None
    shared_prompt: bool = True
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate <= 1:
            raise ValueError(
                f"optimizer.learning_rate is {self.learning_rate}: it must be positive and at most 1, which AdamW "
                "moves a weight by in one update (1e-6 to 1e-4 is usual)"
            )
        if not 0 <= self.end_factor <= 1:
            raise ValueError(
                f"optimizer.end_factor is {self.end_factor}: it must be from 0 to 1 (1 for a constant rate)"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas are {list(self.betas)}: each must be from 0 to below 1")
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(f"optimizer.weight_decay is {self.weight_decay}: it must be finite and at least 0 (none)")
        if not self.max_gradient_norm > 0:
            raise ValueError(
                f"optimizer.max_gradient_norm is {self.max_gradient_norm}: it must be positive, or inf to clip nothing"
            )
        for name in ("micro_batch_rows", "micro_batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"optimizer.{name} is {value}: it must be at least 1, or null for no such limit")

    def limits(self, width: int) -> PassLimits:
        """Of a micro-batch, for a model whose hidden states are so wide."""
        return PassLimits(self.micro_batch_rows, self.micro_batch_tokens, self.shared_prompt, width)

    def learning_rate_of(self, round_index: int, rounds: int) -> float:
        """The learning rate of a round, counted from 0."""
        progress = round_index / max(1, rounds - 1)
        return self.learning_rate * (1.0 + (self.end_factor - 1.0) * progress)


@dataclass(frozen=True)
class RoundSettings:
    """What happens in a round: sample, reward, compare, update.

    Args:
        group_size: completions of each problem, compared with one another.
        group_unit: what a group is: a ``problem`` under one prompt, or a ``problem_over_variants`` of the
            prompt, which share the group's completions evenly.
        split_groups: whether the processes share the completions of every group, which is put together before it is
            judged; otherwise each process draws whole groups. The method is the same.
        flat_groups: groups whose rewards are all equal are ``keep``-ed in the denominators with
            advantage 0 (the original objective), ``skip``-ped, or ``resample``-d.
        max_draws: draws of a group in all, under ``resample``.
        at_limit: what becomes of a group whose last draw is flat: ``keep``, ``skip``, or ``fail`` the run.
        epochs: passes over a round's rollouts.
        minibatches: optimiser steps a pass, each on its own part of the rollouts.
        minibatch_split: whether those parts are of whole ``groups`` or of ``rows``; advantages are those of
            the whole groups in both.
        reward_workers: processes that rewards run in, beside each training process.
        max_failure_share: stop when more than this share of a round's rollouts could not be scored.
        validation_samples: completions of each validation problem.
    """

    group_size: int = 8
    group_unit: GroupUnit = "problem"
    split_groups: bool = False
    flat_groups: FlatGroups = "skip"
    max_draws: int = 4
    at_limit: AtLimit = "skip"
    epochs: int = 1
    minibatches: int = 1
    minibatch_split: Literal["groups", "rows"] = "groups"
    reward_workers: int = 2
    max_failure_share: float = 0.1
    validation_samples: int = 2

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(
                f"round.group_size is {self.group_size}: an advantage compares the members of a group, so it needs "
                "at least 2 (8 is usual)"
            )
        for name in ("max_draws", "epochs", "minibatches", "reward_workers", "validation_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"round.{name} is {getattr(self, name)}: it must be at least 1")
        if self.flat_groups == "resample" and self.max_draws < 2:
            raise ValueError(
                f"round.max_draws is {self.max_draws}, which leaves no draw to resample: raise it, or set "
                "round.flat_groups to keep or skip"
            )
        if not 0 <= self.max_failure_share <= 1:
            raise ValueError(f"round.max_failure_share is {self.max_failure_share}: choose from 0 (none) to 1 (all)")


def check_together(
    sampling: SamplingSettings,
    round: RoundSettings,
    advantages: AdvantageSettings,
    loss: LossSettings,
    transform: RewardTransform,
) -> None:
    """Refuse settings that are each sound and do not go together.

    Raises:
        ValueError: naming the keys, their values and what to change.
    """
    if sampling.temperature == 0:
        raise ValueError(
            "sampling.temperature is 0: a greedy group is G copies of one completion, with nothing to compare; "
            "train at a positive temperature (1 is usual)"
        )
    if advantages.baseline in ("batch_mean", "none") and round.flat_groups != "keep":
        raise ValueError(
            f"round.flat_groups is {round.flat_groups} with advantages.baseline {advantages.baseline}: without a "
            "baseline of its own a flat group has a signal, so set round.flat_groups to keep"
        )
    if advantages.baseline in ("batch_mean", "none") and advantages.scale == "group_std":
        raise ValueError(
            f"advantages.scale is group_std with advantages.baseline {advantages.baseline}: a flat group has no "
            "standard deviation to divide by, so its signal would be lost; set advantages.scale to none or batch_std"
        )
    _refuse_idle(sampling, round, loss)
    if transform.invalid_tool_penalty and sampling.tools is None:
        raise ValueError(
            f"reward_transform.invalid_tool_penalty is {transform.invalid_tool_penalty}, but sampling.tools is null "
            "and no call can be made: set it to 0, or name the tools"
        )
    if sampling.max_rows < round.group_size and not round.split_groups:
        raise ValueError(
            f"sampling.max_rows is {sampling.max_rows}, less than round.group_size = {round.group_size}: a group is "
            f"sampled together, so raise it to {round.group_size} or lower the group size"
        )


def _refuse_idle(sampling: SamplingSettings, round: RoundSettings, loss: LossSettings) -> None:
    """Refuse what is set and could have no effect: the run would be taken for one in which it had."""
    kept = round.flat_groups == "keep" or (round.flat_groups == "resample" and round.at_limit == "keep")
    idle = {
        "round.at_limit": (round.at_limit != "skip" and round.flat_groups != "resample", "flat groups are resampled"),
        "round.max_draws": (round.max_draws != 4 and round.flat_groups != "resample", "flat groups are resampled"),
        "loss.kl_on_flat_groups": (not loss.kl_on_flat_groups and not kept, "flat groups are kept"),
        "loss.mismatch_cap": (
            loss.mismatch_cap is not None and loss.old_logprobs == "recorded" and not sampling.cuts(),
            "loss.old_logprobs is recomputed, or the distribution is cut (sampling.top_p, top_k, min_p)",
        ),
    }
    for name, (has_no_effect, where) in idle.items():
        if has_no_effect:
            section, field = name.split(".")
            value = getattr({"round": round, "loss": loss}[section], field)
            raise ValueError(f"{name} is {value}, which has an effect only where {where}: set one of them otherwise")


def _try_out(section: str, use: Callable[[], object]) -> None:
    """Let the maths check their own options when the config is read, on numbers that stand for nothing."""
    try:
        use()
    except ValueError as error:
        raise ValueError(f"{section}.{error}") from None
