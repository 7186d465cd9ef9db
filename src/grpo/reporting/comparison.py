"""Base against trained: the values of both evaluations and their difference, paired by problem."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo.answer_metrics import UNSCORED, Attempt, Estimate, IntervalSettings, compare, paired_problems
from grpo.held_out_answers import TRAINED_ROLE
from grpo.reporting.files import ReportError
from grpo.reporting.inputs import MODES, RELATIONS, Evaluated


@dataclass(frozen=True)
class Compared:
    """One metric before and after training, each with its interval."""

    base: Estimate
    trained: Estimate
    difference: Estimate

    def flat(self) -> dict[str, float]:
        """For a metrics file; what has no value is absent."""
        parts = {
            "base": self.base.value,
            "trained": self.trained.value,
            "difference": self.difference.value,
            "low": self.difference.low,
            "high": self.difference.high,
        }
        return {name: round(value, 6) + 0.0 for name, value in parts.items() if value is not None}


@dataclass(frozen=True)
class SliceComparison:
    """All metrics of some problems, by mode and metric.

    ``relation`` says how they stand to the training. ``unscored`` is among the metrics only where it is not 0;
    ``paired`` then says by mode and metric over how many of the problems a difference is, otherwise it is over all.
    """

    name: str
    relation: str
    problems: int
    metrics: Mapping[str, Mapping[str, Compared]]
    paired: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def compare_evaluations(base: Evaluated, trained: Evaluated) -> tuple[SliceComparison, list[SliceComparison]]:
    """All trained-on slices together, and each slice alone, those trained on first.

    Raises:
        ReportError: completions and numbers of an evaluation do not belong together.
    """
    slices = [_compare(base, trained, name) for name in base.numbers["by_slice"]]
    order = list(RELATIONS)
    return _compare(base, trained, None), sorted(slices, key=lambda one: (order.index(one.relation), one.name))


def _compare(base: Evaluated, trained: Evaluated, slice_name: str | None) -> SliceComparison:
    """One slice, or with None all trained-on slices together."""
    name = slice_name or "all trained-on slices"
    before, after = _numbers(base, slice_name), _numbers(trained, slice_name)
    identity = base.identity
    metrics, paired = {}, {}
    for mode in MODES:
        attempts = _attempts(base, mode, slice_name), _attempts(trained, mode, slice_name)
        pass_ks = identity["pass_at_k"] if mode == "sampled" else ()
        differences = compare(*attempts, IntervalSettings(**identity["intervals"]), pass_ks)
        metrics[mode] = _compared(before[mode], after[mode], differences)
        if any(attempt.unscored for each in attempts for attempt in each):
            paired[mode] = paired_problems(*attempts, pass_ks)
        _check_agreement(name, mode, metrics[mode], paired.get(mode, {}))
    return SliceComparison(name, before.get("relation", "trained_on"), before["problems"], metrics, paired)


def _compared(
    before: Mapping[str, Any], after: Mapping[str, Any], differences: Mapping[str, Estimate]
) -> dict[str, Compared]:
    """Every metric that says something; a difference of what has no value has none either."""
    found = {}
    for metric, difference in differences.items():
        if metric == UNSCORED and not any(side.get(UNSCORED, {}).get("value") for side in (before, after)):
            continue
        values = Estimate(**before[metric]), Estimate(**after[metric])
        found[metric] = Compared(*values, Estimate(None) if None in (values[0].value, values[1].value) else difference)
    return found


def _numbers(one: Evaluated, slice_name: str | None) -> Mapping[str, Any]:
    found: Mapping[str, Any] = one.numbers["overall"] if slice_name is None else one.numbers["by_slice"][slice_name]
    return found


def _attempts(one: Evaluated, mode: str, slice_name: str | None) -> list[Attempt]:
    return [
        answer.attempt
        for answer in one.answers
        if answer.mode == mode and (answer.role == TRAINED_ROLE if slice_name is None else answer.slice == slice_name)
    ]


def _check_agreement(name: str, mode: str, metrics: Mapping[str, Compared], own_problems: Collection[str]) -> None:
    """The differences come from the completions, the values from the JSON files: they must tell the same.

    Not so where a difference is over problems of its own, those with enough verdicts of both policies.
    """
    for metric, one in metrics.items():
        if one.difference.value is None or one.base.value is None or one.trained.value is None:
            continue
        if metric not in own_problems and abs(one.trained.value - one.base.value - one.difference.value) > 5e-6:
            raise ReportError(
                f"{mode} {metric} of {name} is {one.base.value} and {one.trained.value} in the evaluations' files, but "
                f"their completions differ by {one.difference.value:.6f}: evaluate both policies again"
            )


def comparison_json(overall: SliceComparison, slices: list[SliceComparison]) -> bytes:
    """Flat numbers such as ``sampled.accuracy.difference``, and accuracy alone for each slice."""
    flat: dict[str, float] = {}
    for mode in MODES:
        for metric, compared in overall.metrics[mode].items():
            flat |= {f"{mode}.{metric}.{part}": value for part, value in compared.flat().items()}
        for one in slices:
            parts = one.metrics[mode]["accuracy"].flat()
            flat |= {f"by_slice.{one.name}.{mode}.accuracy.{part}": value for part, value in parts.items()}
    return (json.dumps(flat, indent=2, sort_keys=True) + "\n").encode()


def headline_json(overall: SliceComparison) -> bytes:
    """The few numbers that an experiment is told by: accuracy on held-out problems of the slices trained on."""
    chosen = {
        "sampled": overall.metrics["sampled"]["accuracy"],
        "sampled_lenient": overall.metrics["sampled"]["lenient_accuracy"],
        "greedy": overall.metrics["greedy"]["accuracy"],
    }
    numbers = {name: compared.flat() for name, compared in chosen.items()}
    return (json.dumps(numbers, indent=2, sort_keys=True) + "\n").encode()
