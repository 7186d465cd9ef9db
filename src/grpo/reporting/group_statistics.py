"""What the record says of the groups that were compared: where the signal came from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo.reporting.recorded_groups import Members, Row, by_round, first_draws
from grpo.rewards import RewardComponent
from grpo.training.round_metrics import rollout_metrics

Group = Sequence[Members]


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of the training's groups of one slice, or with None of all.

    They are those of ``docs/metrics.md``, over all rounds, of the first draws: a flat draw that is drawn again would
    count its problem twice.

    Args:
        draws: draws a group; above 1 only where flat groups are drawn again.
        deviation: standard deviation of the rewards within groups, on average: what advantages are made of.
        accepted: share of rollouts with full marks.
        mixed: share of groups with unequal rewards, which alone teach anything.
        duplicates: share of completions whose tokens already stand in their group.
        distinct: distinct texts a group.
        distinct_answers: distinct answers a group, where a component of the reward says what it read.
        finished: share of completions that drew an end token.
        truncated: share that was cut off at the budget.
        other_endings: the rest.
        advantage_share: these groups' part of the sum of absolute advantages.
    """

    slice: str | None
    groups: int
    draws: float
    reward: float | None
    deviation: float | None
    accepted: float | None
    mixed: float | None
    duplicates: float
    distinct: float
    distinct_answers: float | None
    length: float
    finished: float
    truncated: float
    other_endings: float
    advantage_share: float


@dataclass(frozen=True)
class ProblemSignal:
    """How much of what the training was told came from one problem.

    Args:
        groups: of the problem, over all rounds.
        share: its part of the sum of absolute advantages.
    """

    problem_id: str
    slice: str
    prompt: str
    groups: int
    share: float


def signal_by_problem(rollouts: Sequence[Row], updates: Mapping[str, Row]) -> list[ProblemSignal]:
    """Every problem of the training, the one with the largest share first."""
    groups = [group for groups in by_round(rollouts).values() for group in groups]
    whole = _absolute_advantage(groups, updates)
    of_problem: dict[str, list[Group]] = {}
    for group in groups:
        of_problem.setdefault(group[0][0]["problem_id"], []).append(group)
    found = []
    for problem_id, own in of_problem.items():
        first = own[0][0][0]
        share = _absolute_advantage(own, updates) / whole if whole else 0.0
        found.append(ProblemSignal(problem_id, first["slice"], first["prompt_text"], len(own), share))
    return sorted(found, key=lambda one: (-one.share, one.problem_id))


def group_statistics(
    rollouts: Sequence[Row], updates: Mapping[str, Row], components: Mapping[str, RewardComponent]
) -> list[GroupStatistics]:
    """Each slice's statistics, by name, and last those of all together.

    Args:
        rollouts: rows of the record's first table.
        updates: rows of its second table, by rollout id.
        components: the reward's, for their weights.
    """
    groups = [group for groups in by_round(rollouts).values() for group in groups]
    whole = _absolute_advantage(groups, updates)
    slices = sorted({group[0][0]["slice"] for group in groups})
    parts = [(name, [group for group in groups if group[0][0]["slice"] == name]) for name in slices]
    return [
        _statistics(name, part, components, _absolute_advantage(part, updates) / whole if whole else 0.0)
        for name, part in (*parts, (None, groups))
    ]


def _statistics(
    name: str | None, groups: Sequence[Group], components: Mapping[str, RewardComponent], advantage_share: float
) -> GroupStatistics:
    metrics = rollout_metrics(first_draws(groups), components)
    finished, truncated = (
        metrics["endings/end_token"] + metrics.get("endings/stop_string", 0.0),
        metrics["endings/length"],
    )
    return GroupStatistics(
        slice=name,
        groups=len(groups),
        draws=sum(map(len, groups)) / len(groups),
        reward=metrics.get("reward/mean"),
        deviation=metrics.get("reward/std_within_groups"),
        accepted=metrics.get("reward/acceptance"),
        mixed=metrics.get("groups/mixed"),
        duplicates=metrics["groups/duplicates"],
        distinct=metrics["groups/distinct"],
        distinct_answers=metrics.get("groups/distinct_answers"),
        length=metrics["length/mean"],
        finished=finished,
        truncated=truncated,
        other_endings=max(0.0, 1.0 - finished - truncated),
        advantage_share=advantage_share,
    )


def _absolute_advantage(groups: Sequence[Group], updates: Mapping[str, Row]) -> float:
    rows = [row for group in groups for row in group[-1]]
    return math.fsum(abs(updates[row["rollout_id"]]["advantage"] or 0.0) for row in rows)
