"""Rows of the record as the groups that they were, so that the training's own definitions apply to them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo.records import Problem, PromptGroup, Rollout, RolloutKey, SamplingPolicy, Score, ScoredRollout, ToolCall

Row = Mapping[str, Any]
Members = tuple[Row, ...]

# By round: its groups, of each its draws in order, of each its members' rows.
Rounds = dict[int, list[list[Members]]]


def by_round(rows: Iterable[Row]) -> Rounds:
    """Rows of the record's first table, put together again."""
    found: dict[int, dict[tuple[str, int], dict[int, list[Row]]]] = {}
    for row in rows:
        group = found.setdefault(row["round"], {}).setdefault((row["problem_id"], row["occurrence"]), {})
        group.setdefault(row["draw"], []).append(row)
    return {
        number: [[tuple(draws[draw]) for draw in sorted(draws)] for draws in found[number].values()]
        for number in sorted(found)
    }


def scored_members(rows: Members) -> tuple[ScoredRollout, ...]:
    """The members of one draw."""
    return tuple(map(scored_rollout, rows))


def first_draws(groups: Sequence[Sequence[Members]]) -> list[tuple[ScoredRollout, ...]]:
    """The first draw of each group: what is drawn again is no fair sample of the policy."""
    return [scored_members(draws[0]) for draws in groups]


def scored_rollout(row: Row) -> ScoredRollout:
    """A rollout with its scores; its log-probabilities and its prompt's tokens are left out."""
    problem = Problem(id=row["problem_id"], question=row["prompt_text"], answer="", slice=row["slice"])
    group = PromptGroup(problem, row["template_id"], row["prompt_text"], (), row["occurrence"])
    drawn = row["completion_drawn"]
    rollout = Rollout(
        key=rollout_key(row, seed=0),
        group=group,
        tokens=tuple(row["completion_tokens"]),
        text=row["completion_text"],
        logprobs=(),
        finish_reason=row["finish_reason"],
        drawn=None if drawn is None else tuple(drawn),
        tool_calls=tuple(ToolCall(**call) for call in row["tool_calls"]),
        sampling_policy=SamplingPolicy(tools=row["tools"]),
    )
    return ScoredRollout(rollout, component_scores(row), row["reward"], dict(row["reward_steps"]))


def component_scores(row: Row) -> dict[str, Score]:
    """Each component's score. In a scored rollout one without a value did not apply, or it would be unscored."""
    without = Score.unscorable(row["unscored_reason"] or "") if row["reward"] is None else Score.not_applicable("")
    parts = {name: json.loads(line) for name, line in row["reward_parts"]}
    return {
        name: replace(without if value is None else Score(value), parts=parts.get(name, {}))
        for name, value in row["reward_raw"]
    }


def rollout_key(row: Row, seed: int) -> RolloutKey:
    """What the rollout's random numbers depend on; the record keeps the seed in the configuration alone."""
    return RolloutKey(
        seed=seed,
        purpose=row["purpose"],
        round=row["round"],
        problem_id=row["problem_id"],
        template_id=row["template_id"],
        occurrence=row["occurrence"],
        member=row["member"],
        draw=row["draw"],
    )
