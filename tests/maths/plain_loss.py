"""The loss, its gradient and its metrics, one token at a time: the second opinion of the tests.

Slow and obvious on purpose, and with nothing of the package in it: plain floats, cases instead of clamps
and minima, and derivatives worked out by hand.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

Rows = list[list[float]]
Flags = list[list[bool]]

LARGEST_EXPONENT = 20.0


@dataclass(frozen=True)
class Update:
    """What goes into the loss: ``[N][T]``, but for ``advantages`` and ``groups``, ``[N]``."""

    policy: Rows
    old: Rows
    reference: Rows
    sampling: Rows
    entropy: Rows
    weights: Rows
    mask: Flags
    kl_mask: Flags
    advantages: list[float]
    groups: list[int]


@dataclass(frozen=True)
class Options:
    """How it is combined. ``given`` names those of an update's optional inputs that are handed over."""

    ratio: str = "token"
    reduction: str = "response_mean"
    constant_length: int = 8
    clip_low: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = None
    kl_beta: float = 0.0
    kl_estimator: str = "k3"
    entropy_bonus: float = 0.0
    mismatch_cap: float | None = None
    given: frozenset[str] = frozenset()


@dataclass
class PlainLoss:
    """What comes out.

    Args:
        terms: of the loss, which is their sum.
        policy_gradient, entropy_gradient: ``[N][T]``.
        tally: what there is to average: a list of numbers for each metric.
        clearance: how near any ratio or weight comes to a kink, where a derivative has no one value.
    """

    policy_gradient: Rows
    entropy_gradient: Rows
    terms: list[float] = field(default_factory=list)
    tally: dict[str, list[float]] = field(default_factory=dict)
    clearance: float = math.inf

    @property
    def loss(self) -> float:
        return math.fsum(self.terms)

    def count(self, **values: float) -> None:
        for name, value in values.items():
            self.tally.setdefault(name, []).append(value)

    def keep_clear(self, value: float, *kinks: float | None) -> None:
        distances = [abs(value - kink) for kink in kinks if kink is not None]
        self.clearance = min(self.clearance, *distances)


def plain_loss(update: Update, options: Options) -> PlainLoss:
    shape = [[0.0] * len(row) for row in update.mask]
    result = PlainLoss([list(row) for row in shape], [list(row) for row in shape])
    for i, row in enumerate(update.mask):
        counted = [t for t, counts in enumerate(row) if counts]
        for t in counted:
            weight = plain_weight(update, options, i, t)
            _add_policy_term(result, update, options, weight, i, t, counted)
            _add_kl(result, update, options, weight, i, t)
            _add_entropy(result, update, options, weight, i, t)
    return result


def plain_metrics(result: PlainLoss, update: Update) -> dict[str, float]:
    lengths = Counter(i for i, row in enumerate(update.mask) for counts in row if counts)
    metrics = {"tokens": float(lengths.total()), "rows": float(len(lengths))}
    for name, values in result.tally.items():
        if name.endswith("_max"):
            metrics[name] = max(values)
        elif name.endswith("_min"):
            metrics[name] = min(values)
        else:
            metrics[name] = math.fsum(values) / len(values)
    return metrics


def plain_weight(update: Update, options: Options, i: int, t: int) -> float:
    """What a counted token counts."""
    if "weights" in options.given:
        return update.weights[i][t]
    length = [sum(row) for row in update.mask]
    rows = [j for j in range(len(length)) if length[j] > 0]
    if options.reduction == "response_mean":
        return 1 / (len(rows) * length[i])
    if options.reduction == "token_mean":
        return 1 / sum(length)
    if options.reduction == "constant":
        return 1 / (len(rows) * options.constant_length)
    assert options.reduction == "group_mean"
    family = [j for j in rows if update.groups[j] == update.groups[i]]
    groups = {update.groups[j] for j in rows}
    return 1 / (len(groups) * sum(length[j] for j in family))


def exponential(x: float) -> tuple[float, float]:
    """exp and its slope; past the bound a straight line."""
    if x <= LARGEST_EXPONENT:
        return math.exp(x), math.exp(x)
    top = math.exp(LARGEST_EXPONENT)
    return top + top * (x - LARGEST_EXPONENT), top


def _add_policy_term(
    result: PlainLoss, update: Update, options: Options, weight: float, i: int, t: int, counted: list[int]
) -> None:
    log_ratios = {u: update.policy[i][u] - update.old[i][u] for u in counted}
    # which tokens the ratio is made of, and what each of them moves it by
    parts = {t: 1.0} if options.ratio == "token" else dict.fromkeys(counted, 1 / len(counted))
    log_ratio = math.fsum(log_ratios[u] * part for u, part in parts.items())
    term, slope, held = _policy_term(result, options, log_ratio, update.advantages[i])
    if options.ratio == "token" or t == counted[0]:
        _count_ratio(result, options, log_ratio, held)
    if "sampling" in options.given:
        weight *= _correction(result, options, update.old[i][t] - update.sampling[i][t])
    result.terms.append(weight * term)
    for u, part in parts.items():
        result.policy_gradient[i][u] += weight * slope * part


def _policy_term(
    result: PlainLoss, options: Options, log_ratio: float, advantage: float
) -> tuple[float, float, str | None]:
    """The term, its slope in the log-ratio, and which bound holds it."""
    ratio, slope = exponential(log_ratio)
    lowest = 1 - options.clip_low
    highest = 1 + (options.clip_low if options.clip_high is None else options.clip_high)
    result.keep_clear(ratio, lowest, highest, options.dual_clip)
    if advantage > 0 and ratio > highest:
        return -highest * advantage, 0.0, "high"
    if advantage < 0 and ratio < lowest:
        return -lowest * advantage, 0.0, "low"
    if advantage < 0 and options.dual_clip is not None and ratio > options.dual_clip:
        return -options.dual_clip * advantage, 0.0, "dual"
    return -ratio * advantage, -slope * advantage, None


def _count_ratio(result: PlainLoss, options: Options, log_ratio: float, held: str | None) -> None:
    ratio, _ = exponential(log_ratio)
    result.count(
        ratio_mean=ratio,
        ratio_min=ratio,
        ratio_max=ratio,
        clip_fraction_low=held == "low",
        clip_fraction_high=held == "high",
        ratio_bounded_fraction=log_ratio > LARGEST_EXPONENT,
    )
    if options.dual_clip is not None:
        result.count(dual_clip_fraction=held == "dual")


def _correction(result: PlainLoss, options: Options, log_mismatch: float) -> float:
    result.count(mismatch=abs(log_mismatch), mismatch_max=abs(log_mismatch))
    if options.mismatch_cap is None:
        return 1.0
    weight = math.exp(min(log_mismatch, LARGEST_EXPONENT))
    result.keep_clear(weight, options.mismatch_cap)
    result.count(mismatch_capped_fraction=weight > options.mismatch_cap)
    return options.mismatch_cap if weight > options.mismatch_cap else weight


def _add_kl(result: PlainLoss, update: Update, options: Options, weight: float, i: int, t: int) -> None:
    if "reference" not in options.given or ("kl_mask" in options.given and not update.kl_mask[i][t]):
        return
    d = update.reference[i][t] - update.policy[i][t]
    power, power_slope = exponential(d)
    kl, slope_in_d = {
        "k1": (-d, -1.0),
        "k2": (d * d / 2, d),
        "k3": (power - d - 1, power_slope - 1),
    }[options.kl_estimator]
    result.count(kl=kl, kl_bounded_fraction=d > LARGEST_EXPONENT)
    result.terms.append(weight * options.kl_beta * kl)
    result.policy_gradient[i][t] -= weight * options.kl_beta * slope_in_d


def _add_entropy(result: PlainLoss, update: Update, options: Options, weight: float, i: int, t: int) -> None:
    if "entropy" not in options.given:
        return
    result.count(entropy=update.entropy[i][t])
    result.terms.append(-weight * options.entropy_bonus * update.entropy[i][t])
    result.entropy_gradient[i][t] -= weight * options.entropy_bonus
