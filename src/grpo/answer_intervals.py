"""Ratios of sums over problems, and their 95% intervals, always by problem.

Completions of one problem are not independent, so a problem is what is resampled: an interval comes from drawing
problems with replacement (percentile bootstrap; Efron and Tibshirani, "An Introduction to the Bootstrap", 1993,
chapter 13). It speaks of other problems of the same kind, not of other seeds of the training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import DegenerateDataWarning, binomtest, bootstrap

Array = NDArray[np.float64]


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
class Ratio:
    """A metric's two sums for each problem, ``[problems]``, in the order of the problems' ids.

    ``judged`` is how many attempts at each problem have the verdict that the metric hangs on; None: it needs none.
    """

    counted: Array
    among: Array
    highest: float | None = 1.0
    judged: Array | None = None


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
