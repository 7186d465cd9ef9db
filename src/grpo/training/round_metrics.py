"""What a round looked like, in numbers. ``docs/metrics.md`` explains each with its estimator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import get_args

from grpo.records import FinishReason, SamplingPolicy, ScoredRollout
from grpo.rewards import RewardComponent
from grpo.rollouts.flat_groups import DrawnGroup, is_flat
from grpo.rollouts.reward_transform import FULL_MARKS

Groups = Sequence[Sequence[ScoredRollout]]


def rollout_metrics(groups: Groups, components: Mapping[str, RewardComponent] | None = None) -> dict[str, float]:
    """Statistics of a round's rollouts and of their groups, over all and, where there are several, by slice.

    A metric without data is absent, never NaN; without groups there is none.

    Args:
        groups: of all processes; unscored members count where no reward is asked for.
        components: those that scored the rollouts; their weights tell what acceptance asks for, which is
            absent without them.
    """
    groups = [group for group in groups if group]
    if not groups:
        return {}
    metrics = _metrics(groups, components)
    slices = by_slice(groups)
    for name, part in slices.items() if len(slices) > 1 else ():
        own = _metrics(part, components)
        metrics |= {f"slice/{name}/{metric}": value for metric, value in own.items()}
    return metrics


def round_counts(groups: Sequence[Sequence[DrawnGroup]], tokens_in_loss: int) -> dict[str, int]:
    """What a round adds to the run's ledger, counted here and not from the record, so that the two can be compared.

    Args:
        groups: of all processes, every draw of each.
        tokens_in_loss: of all processes.
    """
    draws = [draw for group in groups for draw in group]
    members = [member for draw in draws for member in draw.members]
    return dict(Counter(f"groups_{draw.verdict.verdict}" for draw in draws)) | {
        "rounds": 1,
        "groups": len(draws),
        "rollouts": len(members),
        "tokens_sampled": sum(map(_length, members)),
        "tokens_in_loss": tokens_in_loss,
    }


def is_accepted(member: ScoredRollout, components: Mapping[str, RewardComponent]) -> bool | None:
    """Whether each component with a positive weight that applies gave full marks.

    None where the rollout is unscored or no such component applies: there is nothing to accept.
    """
    if not member.scored:
        return None
    scores = [score for name, score in member.components.items() if components[name].weight > 0]
    values = [score.value for score in scores if score.value is not None]
    return all(value >= FULL_MARKS for value in values) if values else None


def by_slice(groups: Groups) -> dict[str, list[Sequence[ScoredRollout]]]:
    """The groups of each slice, in the order of the slices' names."""
    slices: dict[str, list[Sequence[ScoredRollout]]] = {}
    for group in groups:
        if group:
            slices.setdefault(group[0].rollout.group.problem.slice, []).append(group)
    return dict(sorted(slices.items()))


def _metrics(groups: Groups, components: Mapping[str, RewardComponent] | None) -> dict[str, float]:
    members = [member for group in groups for member in group]
    scored = [group for group in groups if any(member.scored for member in group)]
    copies = sum(len(group) - len({m.rollout.tokens for m in group}) for group in groups)
    metrics = {
        "groups/duplicates": copies / len(members),
        "groups/distinct": fmean(len({m.rollout.text for m in group}) for group in groups),
        "reward/unscored": fmean(not m.scored for m in members),
    }
    metrics |= _answer_metrics(groups) | _length_metrics(members) | _tool_metrics(members) | _mean_scores(members)
    if scored:
        metrics |= _reward_metrics(scored)
        metrics |= {} if components is None else _acceptance_metrics(scored, components)
    return metrics


def _answer_metrics(groups: Groups) -> dict[str, float]:
    """Of the groups in which a component says what answer it read."""
    answers = [{m.answer for m in group} - {None} for group in groups if any(m.reads_answers for m in group)]
    return {"groups/distinct_answers": fmean(map(len, answers))} if answers else {}


def _length_metrics(members: Sequence[ScoredRollout]) -> dict[str, float]:
    lengths = [_length(member) for member in members]
    whole = ("end_token", "stop_string")
    finished = [n for n, m in zip(lengths, members, strict=True) if m.rollout.finish_reason in whole]
    endings = Counter(member.rollout.finish_reason for member in members)
    metrics = {
        "length/mean": fmean(lengths),
        "length/max": float(max(lengths)),
        "length/truncated": fmean(member.rollout.truncated for member in members),
        "tokens/sampled": float(sum(lengths)),
    }
    metrics |= {f"endings/{reason}": endings[reason] / len(members) for reason in get_args(FinishReason)}
    return metrics | ({"length/finished_mean": fmean(finished)} if finished else {})


def _tool_metrics(members: Sequence[ScoredRollout]) -> dict[str, float]:
    """Tool calls, where there were tools to call."""
    rollouts = [member.rollout for member in members]
    if all(not r.tool_calls and r.sampling_policy.tools == SamplingPolicy.tools for r in rollouts):
        return {}
    return {
        "tools/calls": fmean(len(r.tool_calls) for r in rollouts),
        "tools/invalid_calls": fmean(r.invalid_tool_calls for r in rollouts),
    }


def _mean_scores(members: Sequence[ScoredRollout]) -> dict[str, float]:
    """Mean of each component's raw value and of each step of the transform, over the rollouts that have it."""
    values: dict[str, list[float]] = {}
    for member in members:
        for name, score in member.components.items():
            if score.value is not None:
                values.setdefault(f"reward/{name}", []).append(score.value)
        for name, value in member.steps.items():
            values.setdefault(f"reward/steps/{name}", []).append(value)
    return {name: fmean(column) for name, column in values.items()}


def _reward_metrics(groups: Groups) -> dict[str, float]:
    """Of groups that have at least one scored member each."""
    rewards = [[m.reward for m in group if m.reward is not None] for group in groups]
    return {
        "reward/mean": fmean(reward for group in rewards for reward in group),
        "reward/std_within_groups": fmean(pstdev(group) for group in rewards),
        "reward/std_between_groups": pstdev([fmean(group) for group in rewards]),
        "reward/std_batch": pstdev([reward for group in rewards for reward in group]),
        "groups/mixed": fmean(not is_flat(group) for group in groups),
    }


def _acceptance_metrics(groups: Groups, components: Mapping[str, RewardComponent]) -> dict[str, float]:
    """Of groups that have at least one scored member each."""
    accepted = [[is_accepted(member, components) for member in group if member.scored] for group in groups]
    judged = [verdict for group in accepted for verdict in group if verdict is not None]
    if not judged:
        return {}
    flat = [set(verdicts) for group, verdicts in zip(groups, accepted, strict=True) if is_flat(group)]
    return {
        "reward/acceptance": fmean(judged),
        "groups/flat_accepted": sum(verdicts == {True} for verdicts in flat) / len(groups),
        "groups/flat_rejected": sum(verdicts == {False} for verdicts in flat) / len(groups),
    }


def _length(member: ScoredRollout) -> int:
    """Tokens that the policy drew: those that a tool put into its context are not its own."""
    return sum(member.rollout.drawn_mask)
