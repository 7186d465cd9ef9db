"""What the record says of the groups that were compared: where the signal came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from grpo.reporting.inputs import drawn_tokens

Row = Mapping[str, Any]


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of the training's groups of one slice, or of all.

    Args:
        mixed: share of groups with unequal rewards, which alone teach anything.
        duplicates: share of completions whose tokens already stand in their group.
        distinct: distinct texts a group.
        advantage_share: these groups' part of the sum of absolute advantages.
    """

    slice: str
    groups: int
    rollouts: int
    reward: float | None
    mixed: float
    duplicates: float
    distinct: float
    length: float
    truncated: float
    advantage_share: float


def group_statistics(rollouts: Sequence[Row], updates: Mapping[str, Row]) -> list[GroupStatistics]:
    """Each slice's statistics, by name, and last those of all together.

    Args:
        rollouts: rows of the record's first table.
        updates: rows of its second table, by rollout id.
    """
    whole = _absolute_advantage(rollouts, updates)
    slices = sorted({row["slice"] for row in rollouts})
    parts = [(name, [row for row in rollouts if row["slice"] == name]) for name in slices]
    return [_statistics(name, rows, updates, whole) for name, rows in (*parts, ("all", list(rollouts)))]


def _statistics(name: str, rows: Sequence[Row], updates: Mapping[str, Row], whole: float) -> GroupStatistics:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["round"], row["problem_id"], row["occurrence"], row["draw"]), []).append(row)
    distinct_tokens = sum(len({tuple(row["completion_tokens"]) for row in group}) for group in groups.values())
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return GroupStatistics(
        slice=name,
        groups=len(groups),
        rollouts=len(rows),
        reward=fmean(rewards) if rewards else None,
        mixed=fmean(_is_mixed(group) for group in groups.values()),
        duplicates=1 - distinct_tokens / len(rows),
        distinct=fmean(len({row["completion_text"] for row in group}) for group in groups.values()),
        length=fmean(map(drawn_tokens, rows)),
        truncated=fmean(row["finish_reason"] == "length" for row in rows),
        advantage_share=_absolute_advantage(rows, updates) / whole if whole else 0.0,
    )


def _is_mixed(group: Sequence[Row]) -> bool:
    return len({row["reward"] for row in group if row["reward"] is not None}) > 1


def _absolute_advantage(rows: Sequence[Row], updates: Mapping[str, Row]) -> float:
    advantages = (updates.get(row["rollout_id"], {}).get("advantage") for row in rows)
    return sum(abs(float(advantage)) for advantage in advantages if advantage is not None)
