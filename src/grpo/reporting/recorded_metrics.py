"""The metrics of a round, from its record: what ``metrics.csv`` must say of it.

The training measures its rounds as they go. Here the same definitions are applied to what it wrote down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpo.reporting.recorded_groups import Members, Row, first_draws, scored_members
from grpo.rewards import RewardComponent
from grpo.rollouts.flat_groups import GroupVerdict
from grpo.training.round_metrics import rollout_metrics
from grpo.training.update_metrics import advantage_metrics


def round_values(
    groups: Sequence[Sequence[Members]], updates: Mapping[str, Row], components: Mapping[str, RewardComponent]
) -> dict[str, float]:
    """What a round's record determines of its metrics: all but losses and times.

    Args:
        groups: of each group its draws, of each the rows of its members.
        updates: decisions by rollout id.
        components: the reward's, for their weights.
    """
    last = [draws[-1] for draws in groups]
    inside = [GroupVerdict(updates[draw[0]["rollout_id"]]["verdict"]).in_update for draw in last]
    advantages = [[_counted_advantage(updates[row["rollout_id"]]) for row in draw] for draw in last]
    everyone = [row for draws in groups for draw in draws for row in draw]
    sampled = sum(sum(member.rollout.drawn_mask) for member in scored_members(tuple(everyone)))
    return (
        rollout_metrics(first_draws(groups), components)
        | advantage_metrics([scored_members(draw) for draw in last], advantages, inside)
        | {"groups/in_update": float(sum(inside)), "groups/draws": sum(map(len, groups)) / len(groups)}
        | {"tokens/sampled": float(sampled)}
        | {"tokens/in_loss": float(sum(updates[row["rollout_id"]]["loss_tokens"] for row in everyone))}
    )


def validation_values(
    groups: Sequence[Sequence[Members]], components: Mapping[str, RewardComponent]
) -> dict[str, float]:
    """The same of a validation, whose rollouts were compared with nothing."""
    metrics = rollout_metrics(first_draws(groups), components)
    return {f"validation/{name}": value for name, value in metrics.items() if "groups/" not in name}


def _counted_advantage(decided: Row) -> float:
    """What a rollout asked of the update: nothing where none of its tokens took part."""
    return (decided["advantage"] or 0.0) if decided["loss_tokens"] else 0.0
