"""From a round's scored groups to micro-batches whose gradients sum to the whole update's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from grpo.maths.grpo_loss import Reduction, token_weights
from grpo.records import ScoredRollout
from grpo.rollouts.collate import RolloutBatch, collate, micro_batches
from grpo.training.settings import LossSettings
from grpo.training.strategies import all_processes


@dataclass(frozen=True)
class MicroBatch:
    """Whole groups that go forward and backward together.

    Args:
        batch: ``N`` rows of ``T`` tokens.
        rollout_ids: ``N`` names, in the order of the rows.
        advantages: ``[N]``.
        weights: ``[N, T]``: what each token counts in the whole update, of all processes.
        counted: ``[N, T]`` bool: the tokens that take part in the loss.
    """

    batch: RolloutBatch
    rollout_ids: list[str]
    advantages: Tensor
    weights: Tensor
    counted: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        values = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "rollout_ids"}
        return replace(self, **values)


def plan_update(
    groups: Sequence[Sequence[ScoredRollout]],
    advantages: Tensor,
    spare: Sequence[ScoredRollout],
    loss: LossSettings,
    max_rows: int,
) -> list[MicroBatch]:
    """The micro-batches of an update, the same number in every process.

    A process that has fewer than another runs ``spare`` with weight 0 instead: collective calls would
    otherwise wait for each other forever.

    Args:
        groups: this process's groups that enter the update.
        advantages: ``[P, G]``.
        spare: any group of this process.
        loss: names the reduction.
        max_rows: completions in a micro-batch.
    """
    batches = _micro_batches(groups, advantages, loss, max_rows)
    most = max(all_processes(len(batches)))
    if len(batches) < most:
        idle = _micro_batch([spare], torch.zeros(1, len(spare)), torch.zeros(len(spare), 1))
        idle = replace(idle, counted=torch.zeros_like(idle.counted))  # in no metric either
        batches += [idle] * (most - len(batches))
    return batches


def _micro_batches(
    groups: Sequence[Sequence[ScoredRollout]], advantages: Tensor, loss: LossSettings, max_rows: int
) -> list[MicroBatch]:
    lengths = torch.tensor([len(m.rollout.tokens) if m.scored else 0 for group in groups for m in group])
    group_ids = torch.arange(len(groups)).repeat_interleave(len(groups[0]) if groups else 1)
    longest = int(lengths.max()) if groups else 0
    mask = torch.arange(longest) < lengths.reshape(-1, 1)
    share = _share_of_update(mask, group_ids, loss.reduction)
    if not groups:
        return []
    weights = share * token_weights(
        mask, reduction=loss.reduction, group_ids=group_ids, constant_length=loss.constant_length
    )
    planned = []
    for indices in micro_batches([[m.rollout for m in group] for group in groups], max_rows):
        size = len(groups[0])
        rows = [i * size + member for i in indices for member in range(size)]
        planned.append(_micro_batch([groups[i] for i in indices], advantages[indices], weights[rows]))
    return planned


def _micro_batch(groups: Sequence[Sequence[ScoredRollout]], advantages: Tensor, weights: Tensor) -> MicroBatch:
    batch = collate([[member.rollout for member in group] for group in groups])
    members = [member for group in groups for member in group]
    scored = torch.tensor([member.scored for member in members])
    width = batch.mask.shape[1]
    weights = torch.nn.functional.pad(weights, (0, max(0, width - weights.shape[1])))[:, :width]
    ids = [member.rollout.key.rollout_id for member in members]
    return MicroBatch(batch, ids, advantages.flatten(), weights, batch.mask & scored.unsqueeze(1))


def _share_of_update(mask: Tensor, group_ids: Tensor, reduction: Reduction) -> float:
    """What turns this process's weights into its part of the whole update's.

    Its share of what the reduction divides by, times the number of processes, because data-parallel
    strategies average the processes' gradients where the update is their sum.
    """
    if reduction == "token_mean":
        mine = int(mask.sum())
    elif reduction == "group_mean":
        mine = len(group_ids[mask.any(dim=1)].unique()) if mask.numel() else 0
    else:
        mine = int(mask.any(dim=1).sum()) if mask.numel() else 0
    counts = all_processes(mine)
    return len(counts) * mine / max(1, sum(counts))
