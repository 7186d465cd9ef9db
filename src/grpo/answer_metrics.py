"""What judged answers say: rates and pass@k, each a ratio of two sums over problems, of one policy or of two.

How their intervals are made stands in ``answer_intervals``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb

import numpy as np

from grpo.answer_intervals import (
    Estimate,
    IntervalSettings,
    Ratio,
    estimate,
    estimate_difference,
    unanimous_interval,
)

__all__ = [
    "METRICS",
    "UNSCORED",
    "Attempt",
    "Estimate",
    "IntervalSettings",
    "Metric",
    "Ratio",
    "compare",
    "estimate",
    "estimate_difference",
    "paired_problems",
    "pass_at_k",
    "ratios",
    "summarise",
    "unanimous_interval",
]

# Endings that leave a completion whole; "length" is reported as truncated, the rest as otherwise invalid.
WHOLE_ENDINGS = frozenset({"end_token", "stop_string"})


@dataclass(frozen=True)
class Attempt:
    """One judged completion of a held-out problem.

    Args:
        answered: the completion holds an answer of the strict form.
        correct: that answer is right; never true where ``answered`` is not. None: the scorer has no verdict.
        lenient_correct: the answer found by the lenient reading is right; None: no verdict.
        unscored: one of the two verdicts is missing.
        length: tokens drawn, the end token included.
    """

    problem_id: str
    answered: bool
    correct: bool | None
    lenient_correct: bool | None
    finish_reason: str
    length: int
    unscored: bool = False

    @property
    def whole(self) -> bool:
        return self.finish_reason in WHOLE_ENDINGS

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True)
class Metric:
    """A ratio of sums over attempts: what is counted, and among what.

    ``judged`` is the verdict that the metric hangs on, ``correct`` or ``lenient_correct``, and None where it hangs on
    none: an attempt without that verdict is in neither sum. ``highest`` is 1 for a share; None where the metric has
    no bound, as a length.
    """

    counted: Callable[[Attempt], float]
    among: Callable[[Attempt], float] = lambda _: 1.0
    highest: float | None = 1.0
    judged: Callable[[Attempt], bool | None] | None = None


def _correct(attempt: Attempt) -> bool | None:
    return attempt.correct


def _lenient_correct(attempt: Attempt) -> bool | None:
    return attempt.lenient_correct


# The share of attempts that lack a verdict. Evaluations written before there was any such share do not hold it.
UNSCORED = "unscored"
METRICS: Mapping[str, Metric] = {
    "accuracy": Metric(lambda attempt: bool(attempt.correct), judged=_correct),
    "lenient_accuracy": Metric(lambda attempt: bool(attempt.lenient_correct), judged=_lenient_correct),
    "accuracy_among_answered": Metric(
        lambda attempt: bool(attempt.correct), lambda attempt: attempt.answered, judged=_correct
    ),
    "no_answer_rate": Metric(lambda attempt: not attempt.answered),
    "truncated": Metric(lambda attempt: attempt.truncated),
    "other_invalid_endings": Metric(lambda attempt: not attempt.whole and not attempt.truncated),
    "mean_length": Metric(lambda attempt: attempt.length, highest=None),
    "mean_finished_length": Metric(
        lambda attempt: attempt.length * attempt.whole, lambda attempt: attempt.whole, highest=None
    ),
    UNSCORED: Metric(lambda attempt: attempt.unscored),
}


def pass_at_k(attempts: int, correct: int, k: int) -> float:
    """Chance that at least one of ``k`` completions drawn from ``attempts`` is correct, without bias.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, equation 1).

    Raises:
        ValueError: ``k`` is below 1 or above ``attempts``, or ``correct`` does not fit.
    """
    if not 1 <= k <= attempts:
        raise ValueError(f"pass_at_k is {k} with {attempts} attempts: it must be from 1 to samples_per_problem")
    if not 0 <= correct <= attempts:
        raise ValueError(f"correct is {correct} of {attempts} attempts: it must be from 0 to the number of attempts")
    return 1.0 - comb(attempts - correct, k) / comb(attempts, k)


def ratios(attempts: Sequence[Attempt], pass_ks: Sequence[int] = ()) -> dict[str, Ratio]:
    """Every metric of these attempts as sums by problem, ``pass_at_<k>`` for each of ``pass_ks`` among them.

    Raises:
        ValueError: a k is more than the attempts at a problem.
    """
    problems: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        problems.setdefault(attempt.problem_id, []).append(attempt)
    ordered = [problems[name] for name in sorted(problems)]
    found = {name: _metric_ratio(ordered, metric) for name, metric in METRICS.items()}
    return found | {f"pass_at_{k}": _pass_ratio(ordered, k) for k in pass_ks}


def _metric_ratio(problems: Sequence[Sequence[Attempt]], metric: Metric) -> Ratio:
    judged = metric.judged
    chosen = [[each for each in tries if judged is None or judged(each) is not None] for tries in problems]
    counted = [sum(float(metric.counted(attempt)) for attempt in tries) for tries in chosen]
    among = [sum(float(metric.among(attempt)) for attempt in tries) for tries in chosen]
    with_verdict = None if judged is None else np.array([len(tries) for tries in chosen], dtype=np.float64)
    return Ratio(np.array(counted, dtype=np.float64), np.array(among, dtype=np.float64), metric.highest, with_verdict)


def _pass_ratio(problems: Sequence[Sequence[Attempt]], k: int) -> Ratio:
    """Pass@k of each problem from its attempts with a verdict; one with fewer than ``k`` of them does not take part."""
    passed, among = [], []
    for tries in problems:
        scored = [attempt for attempt in tries if attempt.correct is not None]
        enough = len(scored) >= k
        drawn_from = len(scored) if enough else len(tries)
        chance = pass_at_k(drawn_from, sum(bool(attempt.correct) for attempt in scored), k)
        passed.append(chance if enough else 0.0)
        among.append(float(enough))
    part = np.array(among, dtype=np.float64)
    return Ratio(np.array(passed, dtype=np.float64), part, judged=part)


def summarise(
    attempts: Sequence[Attempt], settings: IntervalSettings, pass_ks: Sequence[int] = ()
) -> dict[str, Estimate]:
    """Each metric of one policy with its interval.

    Attempts without a verdict are in no accuracy. Pass@k of a problem comes from its attempts with one, and a problem
    with fewer than k of them takes no part in it.

    Args:
        attempts: every attempt at every problem; the same number a problem.
        settings: how intervals are made.
        pass_ks: the k of pass@k; each at most the attempts a problem has.
    """
    return {name: estimate(ratio, settings) for name, ratio in ratios(attempts, pass_ks).items()}


def compare(
    base: Sequence[Attempt], trained: Sequence[Attempt], settings: IntervalSettings, pass_ks: Sequence[int] = ()
) -> dict[str, Estimate]:
    """Each metric's difference, trained minus base, paired by problem.

    Where a metric hangs on verdicts, only the problems count for which both policies have enough of them: one
    attempt, for pass@k k of them (:func:`paired_problems`).

    Raises:
        ValueError: the two were not asked the same problems.
    """
    before, after = _asked_alike(base, trained, pass_ks)
    return {name: estimate_difference(*_paired(before[name], after[name]), settings) for name in before}


def paired_problems(base: Sequence[Attempt], trained: Sequence[Attempt], pass_ks: Sequence[int] = ()) -> dict[str, int]:
    """Over how many problems :func:`compare` takes the difference, by metric; those alone that hang on verdicts.

    Raises:
        ValueError: the two were not asked the same problems.
    """
    before, after = _asked_alike(base, trained, pass_ks)
    pairs = {name: (one.judged, after[name].judged) for name, one in before.items()}
    return {
        name: int(np.count_nonzero((judged > 0) & (judged_after > 0)))
        for name, (judged, judged_after) in pairs.items()
        if judged is not None and judged_after is not None
    }


def _asked_alike(
    base: Sequence[Attempt], trained: Sequence[Attempt], pass_ks: Sequence[int]
) -> tuple[dict[str, Ratio], dict[str, Ratio]]:
    unpaired = {attempt.problem_id for attempt in base} ^ {attempt.problem_id for attempt in trained}
    if unpaired:
        raise ValueError(
            f"{len(unpaired)} problems, such as {min(unpaired)!r}, were asked of one policy only: "
            "evaluate both on the same problem file"
        )
    return ratios(base, pass_ks), ratios(trained, pass_ks)


def _paired(before: Ratio, after: Ratio) -> tuple[Ratio, Ratio]:
    """Both without the problems for which one of them has no verdict."""
    if before.judged is None or after.judged is None:
        return before, after
    both = ((before.judged > 0) & (after.judged > 0)).astype(np.float64)
    kept = [replace(one, counted=one.counted * both, among=one.among * both) for one in (before, after)]
    return kept[0], kept[1]
