"""From a round's compared groups to micro-batches whose gradients sum to those of whole updates."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby

import torch
from torch import Tensor

from grpo.maths.grpo_loss import Reduction, token_weights
from grpo.records import ScoredRollout
from grpo.rollouts.collate import PassLimits, RolloutBatch, collate, micro_batches, pad
from grpo.rollouts.flat_groups import DrawnGroup
from grpo.training.settings import LossSettings, RoundSettings
from grpo.training.strategies import all_processes


@dataclass(frozen=True)
class UpdateRow:
    """A rollout of a group that takes part in a round's updates.

    Args:
        member: the rollout.
        advantage: from the comparison with its whole group, whatever update it ends up in.
        group: name of its group, the same in every process, for what tells groups apart.
        counted: whether its tokens are in the loss; not where it is unscored, or masked for truncation.
        feels_kl: whether the KL term reaches it.
    """

    member: ScoredRollout
    advantage: float
    group: str
    counted: bool = True
    feels_kl: bool = True

    @property
    def rollout_id(self) -> str:
        return self.member.rollout.key.rollout_id

    @property
    def counted_tokens(self) -> tuple[bool, ...]:
        """A bool a token: whether it is in the loss."""
        return tuple(drawn and self.counted for drawn in self.member.rollout.drawn_mask)

    def teaches(self, loss: LossSettings) -> bool:
        """Whether any term of the loss has a gradient on it."""
        moved = self.advantage != 0 or loss.entropy_bonus > 0 or (loss.kl_beta > 0 and self.feels_kl)
        return moved and any(self.counted_tokens)


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go forward and backward together.

    Args:
        batch: ``N`` rows of ``T`` tokens.
        rollout_ids: ``N`` names, in the order of the rows; none where the batch is idle: run only because another
            process has one more.
        slices: of the rows' problems.
        advantages: ``[N]``.
        weights: ``[N, T]``: what each token counts in the whole update, of all processes.
        counted: ``[N, T]`` bool: the tokens that take part in the loss.
        kl_counted: ``[N, T]`` bool: those of them that the KL term reaches.
    """

    batch: RolloutBatch
    rollout_ids: list[str]
    slices: list[str]
    advantages: Tensor
    weights: Tensor
    counted: Tensor
    kl_counted: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        tensors = [f.name for f in fields(self) if f.name not in ("rollout_ids", "slices")]
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})

    def rows(self, values: Tensor) -> dict[str, tuple[float, ...]]:
        """Rows of ``[N, T]`` values by rollout id, without their padding; nothing of an idle batch."""
        if not self.rollout_ids:
            return {}
        lengths = self.batch.mask.sum(1).tolist()
        parts = zip(self.rollout_ids, values.tolist(), lengths, strict=True)
        return {name: tuple(row[:length]) for name, row, length in parts}

    def tensor(self, rows: dict[str, tuple[float, ...]]) -> Tensor:
        """``[N, T]`` float32 of what :meth:`rows` gave; zeros at padding, and in an idle batch.

        Raises:
            KeyError: a rollout that nothing is known of; a stand-in would be learnt from.
        """
        if not self.rollout_ids:
            return torch.zeros(self.batch.mask.shape, device=self.batch.mask.device)
        width = self.batch.mask.shape[1]
        padded = [rows[name] + (0.0,) * (width - len(rows[name])) for name in self.rollout_ids]
        return torch.tensor(padded, dtype=torch.float32, device=self.batch.mask.device)


def update_rows(groups: Sequence[DrawnGroup], advantages: Tensor, loss: LossSettings) -> list[UpdateRow]:
    """This process's rollouts of the groups that their verdicts let into the update, in order.

    Args:
        groups: one draw of each group.
        advantages: ``[P, G]``, of the same groups.
        loss: says what is masked.
    """
    values = advantages.tolist()
    return [
        UpdateRow(
            group.members[j],
            values[i][j],
            group=group.members[0].rollout.key.rollout_id,
            counted=is_counted(group.members[j], loss),
            feels_kl=loss.kl_on_flat_groups or not group.verdict.flat,
        )
        for i, group in enumerate(groups)
        if group.verdict.in_update
        for j in group.own
    ]


def is_counted(member: ScoredRollout, loss: LossSettings) -> bool:
    """Whether a member of a group that takes part has tokens in the loss."""
    return member.scored and not (loss.mask_truncated and member.rollout.truncated)


def split_minibatches(rows: Sequence[UpdateRow], settings: RoundSettings, key: str) -> list[list[UpdateRow]]:
    """This process's rows of each optimiser step of a pass; a row keeps the advantage of its whole group.

    The parts are dealt out over the rows of all processes together, in keyed order, so that a step is made of the
    same rollouts however many processes share them.

    Args:
        rows: of the round, this process's.
        settings: how many parts, and whether a group may be cut.
        key: what the order depends on: seed, round and pass.
    """
    if settings.minibatches == 1:
        return [list(rows)]
    names = [row.group if settings.minibatch_split == "groups" else row.rollout_id for row in rows]
    everywhere = {name for part in all_processes(names) for name in part}
    order = sorted(everywhere, key=lambda name: hashlib.blake2b(f"{key}/{name}".encode(), digest_size=16).digest())
    part_of = {name: place % settings.minibatches for place, name in enumerate(order)}
    return [
        [row for row, name in zip(rows, names, strict=True) if part_of[name] == part]
        for part in range(settings.minibatches)
    ]


def plan_update(
    rows: Sequence[UpdateRow], spare: Sequence[ScoredRollout], loss: LossSettings, limits: PassLimits
) -> list[MicroBatch]:
    """The micro-batches of one optimiser step, the same number in every process; none where no row has a gradient.

    Rows without a gradient are in every denominator and go through no model. A step of them alone would still move
    the weights, by the optimiser's momentum. A process that has fewer micro-batches than another runs a spare rollout
    with weight 0 instead: collective calls would otherwise wait for each other forever.

    Args:
        rows: this process's rows of the update.
        spare: any rollouts of this process.
        loss: names the reduction, and what has a gradient.
        limits: of a micro-batch.
    """
    taught = [i for i, row in enumerate(rows) if row.teaches(loss)]
    if not any(all_processes(bool(taught))):
        return []
    counted, _ = pad([row.counted_tokens for row in rows] or [()], torch.bool, "right")
    groups = [row.group for row in rows]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(groups))}
    group_ids = torch.tensor([numbers[name] for name in groups] or [0])
    weights = _share_of_update(counted, groups, loss.reduction) * token_weights(
        counted, reduction=loss.reduction, group_ids=group_ids, constant_length=loss.constant_length
    )
    blocks = [list(block) for _, block in groupby(taught, key=lambda i: _block(rows[i]))]
    planned = []
    for pieces in micro_batches([[rows[i].member.rollout for i in block] for block in blocks], limits):
        indices = [taught[i] for piece in pieces for i in piece]
        planned.append(_micro_batch([rows[i] for i in indices], weights[indices], [len(piece) for piece in pieces]))
    missing = max(all_processes(len(planned))) - len(planned)
    return planned + [_idle_batch(spare[:1]) for _ in range(missing)]


def _block(row: UpdateRow) -> tuple[str, tuple[int, ...]]:
    """What rows share a pass over the prompt by."""
    return row.group, row.member.rollout.group.prompt_tokens


def _idle_batch(members: Sequence[ScoredRollout]) -> MicroBatch:
    """Nameless, or what it gives for nothing would stand for the rollout's own."""
    rows = [UpdateRow(member, 0.0, "", counted=False) for member in members]
    return replace(_micro_batch(rows, torch.zeros(len(rows), 1), [1] * len(rows)), rollout_ids=[], slices=[])


def _micro_batch(rows: Sequence[UpdateRow], weights: Tensor, rows_per_prompt: Sequence[int]) -> MicroBatch:
    batch = collate([row.member.rollout for row in rows], rows_per_prompt)
    width = batch.mask.shape[1]
    weights = torch.nn.functional.pad(weights, (0, max(0, width - weights.shape[1])))[:, :width]
    counted = batch.drawn & torch.tensor([row.counted for row in rows]).unsqueeze(1)
    return MicroBatch(
        batch=batch,
        rollout_ids=[row.rollout_id for row in rows],
        slices=[row.member.rollout.group.problem.slice for row in rows],
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float64),
        weights=weights,
        counted=counted,
        kl_counted=counted & torch.tensor([row.feels_kl for row in rows]).unsqueeze(1),
    )


def _share_of_update(counted: Tensor, groups: Sequence[str], reduction: Reduction) -> Tensor:
    """What turns this process's weights into its part of the whole update's, ``[N, 1]`` or one number for all rows.

    Its share of what the reduction divides by, times the number of processes, because data-parallel
    strategies average the processes' gradients where the update is their sum.
    """
    if reduction == "group_mean":
        return _share_of_groups(counted, groups)
    mine = int(counted.sum()) if reduction == "token_mean" else int(counted.any(dim=1).sum())
    counts = all_processes(mine)
    return torch.tensor(len(counts) * mine / max(1, sum(counts)), dtype=torch.float64)


def _share_of_groups(counted: Tensor, groups: Sequence[str]) -> Tensor:
    """For the mean within each group: its rows may stand in several processes, and it is one group all the same."""
    mine: Counter[str] = Counter()
    for name, tokens in zip(groups, counted.sum(dim=1).tolist(), strict=False):  # an empty update has one empty row
        mine[name] += tokens
    parts = all_processes(+mine)
    whole = sum(parts, Counter())
    shares = [mine[name] / max(1, whole[name]) for name in groups] or [0.0]
    return len(parts) * len(+mine) / max(1, len(whole)) * torch.tensor(shares, dtype=torch.float64).unsqueeze(1)
