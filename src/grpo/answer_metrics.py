"""What judged answers say: rates, pass@k and their 95% intervals, always by problem.

Completions of one problem are not independent, so a problem is what is resampled: every metric is a
ratio of two sums over problems, and its interval comes from drawing problems with replacement
(percentile bootstrap; Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13).
The interval speaks of other problems of the same kind, not of other seeds of the training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray
from scipy.stats import DegenerateDataWarning, binomtest, bootstrap

Array = NDArray[np.float64]

# Endings that leave a completion whole; "length" is reported as truncated, the rest as otherwise invalid.
WHOLE_ENDINGS = frozenset({"end_token"})


@dataclass(frozen=True)
class Attempt:
    """One judged completion of a held-out problem.

    Args:
        answered: the completion holds an answer of the strict form.
        correct: that answer is right; never true where ``answered`` is not.
        lenient_correct: the answer found by the lenient reading is right.
        length: tokens drawn, the end token included.
    """

    problem_id: str
    answered: bool
    correct: bool
    lenient_correct: bool
    finish_reason: str
    length: int

    @property
    def whole(self) -> bool:
        return self.finish_reason in WHOLE_ENDINGS

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True)
class Estimate:
    """A value with its interval. All None where nothing was counted; no interval where none is claimed."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def rounded(self, places: int = 6) -> dict[str, float | None]:
        """For a file: ``places`` decimals, so that float noise of another machine does not show."""
        parts = {"value": self.value, "low": self.low, "high": self.high}
        return {name: None if part is None else round(part, places) + 0.0 for name, part in parts.items()}


@dataclass(frozen=True)
class IntervalSettings:
    """How intervals are made.

    Args:
        confidence: the share of repetitions in which the interval should cover the true value.
        resamples: bootstrap draws of the problems.
        seed: of the draws, so that the same answers give the same interval.
    """

    confidence: float = 0.95
    resamples: int = 5_000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.confidence < 1.0:
            raise ValueError(f"intervals.confidence is {self.confidence}: it must lie between 0 and 1, such as 0.95")
        if self.resamples < 100:
            raise ValueError(f"intervals.resamples is {self.resamples}: it must be at least 100")


@dataclass(frozen=True)
class Metric:
    """A ratio of sums over attempts: what is counted, and among what.

    ``highest`` is 1 for a share; None where the metric has no bound, as a length.
    """

    counted: Callable[[Attempt], float]
    among: Callable[[Attempt], float] = lambda _: 1.0
    highest: float | None = 1.0


METRICS: Mapping[str, Metric] = {
    "accuracy": Metric(lambda attempt: attempt.correct),
    "lenient_accuracy": Metric(lambda attempt: attempt.lenient_correct),
    "accuracy_among_answered": Metric(lambda attempt: attempt.correct, lambda attempt: attempt.answered),
    "no_answer_rate": Metric(lambda attempt: not attempt.answered),
    "truncated": Metric(lambda attempt: attempt.truncated),
    "other_invalid_endings": Metric(lambda attempt: not attempt.whole and not attempt.truncated),
    "mean_length": Metric(lambda attempt: attempt.length, highest=None),
    "mean_finished_length": Metric(
        lambda attempt: attempt.length * attempt.whole, lambda attempt: attempt.whole, highest=None
    ),
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


@dataclass(frozen=True)
class Ratio:
    """A metric's two sums for each problem, ``[problems]``, in the order of the problems' ids."""

    counted: Array
    among: Array
    highest: float | None = 1.0


def ratios(attempts: Sequence[Attempt], pass_ks: Sequence[int] = ()) -> dict[str, Ratio]:
    """Every metric of these attempts as sums by problem, ``pass_at_<k>`` for each of ``pass_ks`` among them."""
    problems: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        problems.setdefault(attempt.problem_id, []).append(attempt)
    ordered = [problems[name] for name in sorted(problems)]
    found = {name: _metric_ratio(ordered, metric) for name, metric in METRICS.items()}
    for k in pass_ks:
        passed = [pass_at_k(len(tries), sum(attempt.correct for attempt in tries), k) for tries in ordered]
        found[f"pass_at_{k}"] = Ratio(np.array(passed, dtype=np.float64), np.ones(len(ordered)))
    return found


def _metric_ratio(problems: Sequence[Sequence[Attempt]], metric: Metric) -> Ratio:
    counted = [sum(float(metric.counted(attempt)) for attempt in tries) for tries in problems]
    among = [sum(float(metric.among(attempt)) for attempt in tries) for tries in problems]
    return Ratio(np.array(counted, dtype=np.float64), np.array(among, dtype=np.float64), metric.highest)


def summarise(
    attempts: Sequence[Attempt], settings: IntervalSettings, pass_ks: Sequence[int] = ()
) -> dict[str, Estimate]:
    """Each metric of one policy with its interval.

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

    Raises:
        ValueError: the two were not asked the same problems.
    """
    unpaired = {attempt.problem_id for attempt in base} ^ {attempt.problem_id for attempt in trained}
    if unpaired:
        raise ValueError(
            f"{len(unpaired)} problems, such as {min(unpaired)!r}, were asked of one policy only: "
            "evaluate both on the same problem file"
        )
    before, after = ratios(base, pass_ks), ratios(trained, pass_ks)
    return {name: estimate_difference(before[name], after[name], settings) for name in before}


def estimate(ratio: Ratio, settings: IntervalSettings) -> Estimate:
    """The ratio of the two sums with its interval.

    Where every resample gives the same value (all problems alike, or one problem), the bootstrap would
    claim certainty; see ``unanimous_interval`` for what stands there instead.
    """
    bounds = None if ratio.highest is None else (0.0, ratio.highest)
    counting = int(np.count_nonzero(ratio.among))
    return _bootstrapped((ratio.counted, ratio.among), _quotient, counting, bounds, settings)


def estimate_difference(before: Ratio, after: Ratio, settings: IntervalSettings) -> Estimate:
    """``after`` minus ``before`` with its interval, both drawn from the same resampled problems."""

    def difference(
        counted: Array, among: Array, counted_after: Array, among_after: Array, axis: int = -1
    ) -> Array | np.float64:
        return _quotient(counted_after, among_after, axis) - _quotient(counted, among, axis)

    bounds = None if after.highest is None else (-after.highest, after.highest)
    counting = min(int(np.count_nonzero(before.among)), int(np.count_nonzero(after.among)))
    arrays = (before.counted, before.among, after.counted, after.among)
    return _bootstrapped(arrays, difference, counting, bounds, settings)


def unanimous_interval(
    value: float, problems: int, bounds: tuple[float, float], confidence: float
) -> tuple[float, float]:
    """An interval where all ``problems`` gave ``value``.

    With 0 of n problems seen to differ, the share of all problems that do is at most the exact upper
    bound u of Clopper and Pearson (1934); those could lie at either end of ``bounds``. For a share of 0
    or 1 this is the Clopper-Pearson interval itself.
    """
    share = float(binomtest(0, problems).proportion_ci(confidence, method="exact").high)
    lowest, highest = bounds
    return value - share * (value - lowest), value + share * (highest - value)


def _quotient(counted: Array, among: Array, axis: int = -1) -> Array | np.float64:
    with np.errstate(invalid="ignore"):
        return np.asarray(counted.sum(axis=axis) / among.sum(axis=axis), dtype=np.float64)


def _bootstrapped(
    arrays: Sequence[Array],
    statistic: Callable[..., Array | np.float64],
    counting: int,
    bounds: tuple[float, float] | None,
    settings: IntervalSettings,
) -> Estimate:
    """``counting`` is how many problems take part in the value at all: fewer than one, no value."""
    if counting == 0:
        return Estimate(None)
    value = float(statistic(*arrays))
    drawn = _resampled(arrays, statistic, settings)
    if np.ptp(drawn) > 1e-12:
        outside = (1.0 - settings.confidence) / 2.0
        low, high = np.quantile(drawn, [outside, 1.0 - outside])
        return Estimate(value, float(low), float(high))
    if bounds is None:
        return Estimate(value)
    return Estimate(value, *unanimous_interval(value, counting, bounds, settings.confidence))


def _resampled(arrays: Sequence[Array], statistic: Callable[..., object], settings: IntervalSettings) -> Array:
    """The statistic of each resample of the problems; resamples in which nothing counts are left out."""
    if len(arrays[0]) < 2:
        return np.zeros(1)
    with warnings.catch_warnings():
        # Resamples in which nothing counts are NaN; scipy warns of its own interval, which is not used.
        warnings.simplefilter("ignore", DegenerateDataWarning)
        result = bootstrap(
            tuple(arrays),
            statistic,
            paired=True,
            vectorized=True,
            method="percentile",
            n_resamples=settings.resamples,
            batch=1000,
            confidence_level=settings.confidence,
            rng=np.random.default_rng(settings.seed),
        )
    distribution = np.asarray(result.bootstrap_distribution, dtype=np.float64)
    return distribution[np.isfinite(distribution)]
