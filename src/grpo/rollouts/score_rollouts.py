"""Rewards: each rollout through every reward component, then their weighted sum.

A component that fails leaves its row unscored, with the reason in the record; it never becomes a number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from grpo.records import Rollout, Score, ScoredRollout
from grpo.rewards import RewardComponent, judge, validate_components

__all__ = ["RewardFailure", "refuse_failures", "score_rollouts", "transformed_reward", "validate_components"]


class RewardFailure(RuntimeError):
    """The rewards fail on too many rollouts to train on the rest; the message names the worst component."""


def score_rollouts(
    rollouts: Sequence[Rollout],
    components: Mapping[str, RewardComponent],
    *,
    max_failure_share: float = 0.1,
) -> list[ScoredRollout]:
    """Every rollout with the score of each component and the transformed reward, in the same order.

    Raises:
        ValueError: components that :func:`validate_components` refuses; a share outside 0 to 1.
        RewardFailure: components failed on more than ``max_failure_share`` of the rows (1 allows all: to
            record the rows first, pass 1 and call :func:`refuse_failures` afterwards).
    """
    validate_components(components)
    if not 0 <= max_failure_share <= 1:
        raise ValueError(f"max_failure_share is {max_failure_share}: choose from 0 (none) to 1 (all may fail)")
    scored = [_scored(rollout, components) for rollout in rollouts]
    refuse_failures(scored, max_failure_share)
    return scored


def transformed_reward(scores: Mapping[str, Score], components: Mapping[str, RewardComponent]) -> float | None:
    """Sum of weight times value over the components that apply; None if one failed or none applies.

    ``math.fsum`` rounds once, in float64, so that equal scores in any order give equal sums and a group
    of equal completions is an exact tie.

    Raises:
        ValueError: the sum is past the float64 range.
    """
    applicable = {name: score for name, score in scores.items() if score.applicable}
    terms: list[float] = []
    for name, score in applicable.items():
        if score.value is None:
            return None
        terms.append(components[name].weight * score.value)
    if not terms:
        return None
    try:
        total = math.fsum(terms)
    except (OverflowError, ValueError):  # intermediate overflow; infinities of both signs
        total = math.inf
    if not math.isfinite(total):
        raise ValueError(f"the reward {terms} of {list(applicable)} is past the float range: lower the weights")
    return total


def refuse_failures(scored: Sequence[ScoredRollout], max_failure_share: float) -> None:
    """Raise :class:`RewardFailure` if components failed on more than this share of the rows.

    A row counts once however many of its components failed; not applicable is no failure.
    """
    failures = [(name, score) for row in scored for name, score in row.components.items() if _failed(score)]
    rows = sum(any(map(_failed, row.components.values())) for row in scored)
    if not rows or rows <= max_failure_share * len(scored):
        return
    worst, count = Counter(name for name, _ in failures).most_common(1)[0]
    first = next(score.reason for name, score in failures if name == worst)
    raise RewardFailure(
        f"rewards failed on {rows} of {len(scored)} rollouts, more than max_failure_share = {max_failure_share}; "
        f"component {worst!r} failed on {count}, first with: {first}. Mend it, or allow a larger share"
    )


def _scored(rollout: Rollout, components: Mapping[str, RewardComponent]) -> ScoredRollout:
    problem = rollout.group.problem
    scores = {name: judge(component.check, problem, rollout.text) for name, component in components.items()}
    return ScoredRollout(rollout, scores, transformed_reward(scores, components))


def _failed(score: Score) -> bool:
    return score.applicable and score.value is None
