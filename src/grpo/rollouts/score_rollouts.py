"""Rewards: each rollout through every reward component, then through the transform to one number.

A component that fails leaves its row unscored, with the reason in the record; it never becomes a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from grpo.records import Rollout, Score, ScoredRollout
from grpo.rewards import RewardComponent, validate_components
from grpo.rewards.judging import Judges, judge_here
from grpo.rollouts.reward_transform import RewardTransform, reward_of

__all__ = ["RewardFailure", "refuse_failures", "score_rollouts", "validate_components"]


class RewardFailure(RuntimeError):
    """The rewards fail on too many rollouts to train on the rest; the message names the worst component."""


def score_rollouts(
    rollouts: Sequence[Rollout],
    components: Mapping[str, RewardComponent],
    *,
    transform: RewardTransform = RewardTransform(),
    max_failure_share: float = 0.1,
    judges: Judges | None = None,
) -> list[ScoredRollout]:
    """Every rollout with the score of each component and the transformed reward, in the same order.

    Args:
        rollouts: of any number of groups.
        components: the reward's, by name.
        transform: of their weighted sum.
        max_failure_share: of the rows, on which components may fail.
        judges: made for the components, to run them side by side within their limits; without, they run one
            after the other in this process, without a limit.

    The default transform leaves the weighted sum of the components as it is. An unscored rollout has
    neither reward nor steps, whatever the transform.

    Raises:
        ValueError: components that :func:`validate_components` or the transform refuses; a share outside
            0 to 1; a reward past the float64 range.
        RewardFailure: components failed on more than ``max_failure_share`` of the rows (1 allows all: to
            record the rows first, pass 1 and call :func:`refuse_failures` afterwards).
    """
    validate_components(components)
    transform.check_components(components)
    if not 0 <= max_failure_share <= 1:
        raise ValueError(f"max_failure_share is {max_failure_share}: choose from 0 (none) to 1 (all may fail)")
    items = [(rollout.group.problem, rollout.text) for rollout in rollouts]
    everyone = judge_here(components, items) if judges is None else judges.judge(items)
    scored = [
        _transformed(rollout, scores, components, transform) for rollout, scores in zip(rollouts, everyone, strict=True)
    ]
    refuse_failures(scored, max_failure_share)
    return scored


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


def _transformed(
    rollout: Rollout,
    scores: Mapping[str, Score],
    components: Mapping[str, RewardComponent],
    transform: RewardTransform,
) -> ScoredRollout:
    steps = transform.steps(
        scores, components, length=sum(rollout.drawn_mask), invalid_tool_calls=rollout.invalid_tool_calls
    )
    return ScoredRollout(rollout, scores, reward_of(steps), steps)


def _failed(score: Score) -> bool:
    return score.applicable and score.value is None
