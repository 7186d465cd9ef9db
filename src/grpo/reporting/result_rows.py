"""The rows of the result's tables, how answers were read for them, and which answers they leave out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo.answer_metrics import UNSCORED
from grpo.answer_readings import READINGS, STRICT
from grpo.reporting.comparison import Compared, SliceComparison
from grpo.reporting.inputs import MODES
from grpo.reporting.markdown import code, difference, estimate, plain, table

METRIC_NAMES = {
    "accuracy": "Correct, strict reading",
    "lenient_accuracy": "Correct, lenient reading",
    "accuracy_among_answered": "Correct among those with an answer",
    "no_answer_rate": "No answer in the strict form",
    "truncated": "Cut off at the token budget",
    "other_invalid_endings": "Ended in another invalid way",
    "unscored": "Without a verdict of the scorer",
    "mean_length": "Length, tokens",
    "mean_finished_length": "Length of finished completions, tokens",
}


def place(named: tuple[str, Compared]) -> int:
    """As in ``METRIC_NAMES``, with pass@k right after the accuracies."""
    names = list(METRIC_NAMES)
    return names.index(named[0] if named[0] in names else "lenient_accuracy")


def metric_name(metric: str) -> str:
    """What a metric is called in a table."""
    return METRIC_NAMES.get(metric, metric.replace("pass_at_", "Pass@"))


def cells(one: Compared, metric: str) -> list[str]:
    """Base, trained and their difference."""
    is_share = not metric.endswith("length")
    return [
        estimate(one.base, is_share),
        estimate(one.trained, is_share),
        difference(one.difference, is_share),
    ]


def result_rows(overall: SliceComparison, mode: str) -> list[list[str]]:
    """A row a metric; pass@1 only where it is not the strict accuracy again, which it is if all have a verdict."""
    return [
        [metric_name(metric), *cells(one, metric)]
        for metric, one in sorted(overall.metrics[mode].items(), key=place)
        if metric != "pass_at_1" or mode in overall.paired
    ]


def readings_text(identity: Mapping[str, Any]) -> str:
    """How the evaluation read and judged the answers."""
    path, scorer = identity["reading"], code(identity["scorer"])
    reading = next((each for each in READINGS.values() if each.path == path), None)
    if reading is STRICT:
        strict = "is one line holding the answer alone"
    else:
        strict = f"its answer is {reading.called if reading else f'what {code(path)} finds'}"
    if reading is not None and not reading.lenient:
        return (
            f"*Strict*: the completion ended by itself and {strict}. There is no lenient reading of such answers. The "
            f"scorer judges them: {scorer}, apart from the training reward."
        )
    return (
        f"*Strict*: the completion ended by itself and {strict}. *Lenient*: the last number "
        "(or words) of the first line that has any, finished or not. The scorer judges both: "
        f"{scorer}, apart from the training reward."
    )


def paired_text(overall: SliceComparison) -> str:
    """Over which answers the values and the differences are; nothing where every answer has a verdict."""
    counts = [
        f"{mode} {count} ({metric_name(metric).lower()})"
        for mode, by_metric in overall.paired.items()
        for metric, count in by_metric.items()
        if overall.metrics[mode][metric].base.value is not None
    ]
    if not counts:
        return ""
    return (
        "Answers without a verdict count neither as right nor as wrong. Each policy's value is over its own answers "
        "that have one, pass@k over its problems with at least k of them; a difference is over the problems for which "
        f"both policies have enough. Of the {overall.problems} problems these are: {', '.join(counts)}."
    )


def unscored_by_slice(slices: Sequence[SliceComparison]) -> str:
    """The shares of answers without a verdict, of the slices that have any."""
    rows = [
        [plain(one.name), mode, *cells(one.metrics[mode][UNSCORED], UNSCORED)]
        for one in slices
        for mode in MODES
        if UNSCORED in one.metrics[mode]
    ]
    header = ["Slice", "Answers", "Base", "Trained", "Difference"]
    return "### Without a verdict\n\n" + table(header, rows, left=2) if rows else ""
