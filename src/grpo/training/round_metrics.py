"""What a round looked like, in numbers. ``docs/metrics.md`` explains each with its estimator."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, pstdev

from grpo.records import ScoredRollout
from grpo.rollouts.flat_groups import GroupVerdict, is_flat


class PhaseClock:
    """Wall-clock seconds of the phases of a round."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Seconds of each phase, and of the round since the clock was made."""
        whole = time.perf_counter() - self._start
        return {f"seconds/{name}": value for name, value in (*self.seconds.items(), ("round", whole))}


def rollout_metrics(groups: Sequence[Sequence[ScoredRollout]]) -> dict[str, float]:
    """Statistics of a round's rollouts and of their groups; a metric without data is absent, never NaN."""
    members = [member for group in groups for member in group]
    finished = [len(m.rollout.tokens) for m in members if not m.rollout.truncated]
    duplicates = sum(len(group) - len({m.rollout.tokens for m in group}) for group in groups)
    metrics = {
        "length/mean": fmean(len(m.rollout.tokens) for m in members),
        "length/truncated": fmean(m.rollout.truncated for m in members),
        "groups/duplicates": duplicates / len(members),
        "groups/distinct": fmean(len({m.rollout.text for m in group}) for group in groups),
        "reward/unscored": fmean(not m.scored for m in members),
    }
    if finished:
        metrics["length/finished_mean"] = fmean(finished)
    return metrics | _reward_metrics(groups)


def round_counts(groups: Sequence[Sequence[ScoredRollout]], verdicts: Sequence[GroupVerdict]) -> dict[str, int]:
    """What a round adds to the run's ledger, counted here and not from the record, so that the two can be compared."""
    counts = Counter(f"groups_{verdict.verdict}" for verdict in verdicts)
    members = [member for group in groups for member in group]
    trained = [
        m for group, verdict in zip(groups, verdicts, strict=True) if verdict.in_update for m in group if m.scored
    ]
    return dict(counts) | {
        "rounds": 1,
        "groups": len(groups),
        "rollouts": len(members),
        "tokens_sampled": sum(len(member.rollout.tokens) for member in members),
        "tokens_in_loss": sum(len(member.rollout.tokens) for member in trained),
    }


def _reward_metrics(groups: Sequence[Sequence[ScoredRollout]]) -> dict[str, float]:
    rewards = [[m.reward for m in group if m.reward is not None] for group in groups]
    scored = [group for group in rewards if group]
    if not scored:
        return {}
    metrics = {
        "reward/mean": fmean(reward for group in scored for reward in group),
        "reward/std_within_groups": fmean(pstdev(group) for group in scored),
        "reward/std_batch": pstdev([reward for group in scored for reward in group]),
        "groups/mixed": fmean(not is_flat(group) for group in groups if any(m.scored for m in group)),
    }
    components: dict[str, list[float]] = {}
    for member in (member for group in groups for member in group):
        for name, score in member.components.items():
            if score.value is not None:
                components.setdefault(name, []).append(score.value)
    return metrics | {f"reward/{name}": fmean(values) for name, values in components.items()}
