"""What a round decided about each of its rollouts: the rows of the record's second table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from grpo.rollouts.flat_groups import DrawnGroup, GroupVerdict
from grpo.training.policy_update import UpdateRow


@dataclass(frozen=True)
class Decision:
    """What a round decided about one rollout.

    ``centred`` and ``advantage`` are None where nothing was compared: for a member without a score, and for a draw
    that another took the place of. ``old_logprobs`` are those that the training computed itself for the ratio, None
    where it took the sampler's or had no use for the rollout.
    """

    rollout_id: str
    verdict: GroupVerdict
    centred: float | None
    advantage: float | None
    old_logprobs: tuple[float, ...] | None
    reference_logprobs: tuple[float, ...] | None
    reference_version: int | None
    loss_tokens: int


def round_decisions(
    draws: Sequence[Sequence[DrawnGroup]],
    centred: Tensor,
    advantages: Tensor,
    rows: Sequence[UpdateRow],
    old: Mapping[str, tuple[float, ...]],
    reference: Mapping[str, tuple[float, ...]],
    reference_version: int,
) -> Iterator[Decision]:
    """One decision a rollout that this process drew, of every draw.

    Args:
        draws: of each group, in their order; the last is the one that was compared.
        centred: ``[P, G]``, rewards of the last draws minus their baseline.
        advantages: ``[P, G]``, the same scaled.
        rows: what took part in the updates.
        old: the training's own log-probabilities under the ratio, by rollout id.
        reference: the reference's.
        reference_version: optimiser steps behind the reference's weights.
    """
    tokens = {row.rollout_id: sum(row.counted_tokens) for row in rows}
    for i, group in enumerate(draws):
        for place, draw in enumerate(group):
            for j in draw.own:
                member = draw.members[j]
                compared = place == len(group) - 1 and member.scored
                name = member.rollout.key.rollout_id
                anchor = reference.get(name) if tokens.get(name) else None
                yield Decision(
                    rollout_id=name,
                    verdict=draw.verdict,
                    centred=float(centred[i, j]) if compared else None,
                    advantage=float(advantages[i, j]) if compared else None,
                    old_logprobs=old.get(name) if tokens.get(name) else None,
                    reference_logprobs=anchor,
                    reference_version=None if anchor is None else reference_version,
                    loss_tokens=tokens.get(name, 0),
                )
