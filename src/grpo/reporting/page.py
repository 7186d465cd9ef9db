"""The report as a Markdown page: the result first, then where it came from, then what it cannot say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo.reporting.comparison import Compared, SliceComparison
from grpo.reporting.group_statistics import GroupStatistics
from grpo.reporting.inputs import ReportInputs
from grpo.reporting.markdown import code, difference, estimate, number, share, table
from grpo.reporting.provenance import LIMITS_SECTION, counts_section, identity_section, method_section
from grpo.reporting.samples import Changed, best_and_worst, changed_answers

METRIC_NAMES = {
    "accuracy": "Correct, strict reading",
    "lenient_accuracy": "Correct, lenient reading",
    "accuracy_among_answered": "Correct among those with an answer",
    "no_answer_rate": "No answer in the strict form",
    "truncated": "Cut off at the token budget",
    "other_invalid_endings": "Ended in another invalid way",
    "mean_length": "Length, tokens",
    "mean_finished_length": "Length of finished completions, tokens",
}
RELATIONS = {"trained_on": "trained on", "other_setting": "same task, not trained on", "other_task": "other task"}
PICTURE_TEXTS = {
    "held_out.png": "Sampled accuracy of base and trained policy by slice, with intervals",
    "learning.png": "Reward and its components by round",
    "groups.png": "Share of mixed groups by round, and the part of the absolute advantage by slice",
    "update.png": "KL, gradient norm, length and truncation by round",
}


@dataclass(frozen=True)
class PageParts:
    """What the page is written from."""

    inputs: ReportInputs
    overall: SliceComparison
    slices: Sequence[SliceComparison]
    groups: Sequence[GroupStatistics]
    pictures: Sequence[str]
    samples: int


def write_page(parts: PageParts) -> str:
    """The whole page."""
    sections = [
        "# What training changed",
        headline(parts.overall),
        _result(parts),
        _slices(parts),
        _training(parts),
        _groups(parts),
        _changed(parts),
        _rollouts(parts),
        method_section(parts.inputs.config),
        counts_section(parts.inputs),
        LIMITS_SECTION,
        identity_section(parts.inputs),
    ]
    return "\n\n".join(sections) + "\n"


def headline(overall: SliceComparison) -> str:
    """The result in a sentence, and what the other readings add."""
    strict = overall.metrics["sampled"]["accuracy"]
    low, high = strict.difference.low, strict.difference.high
    verb = "did not clearly change"
    if low is not None and low > 0:
        verb = "raised"
    if high is not None and high < 0:
        verb = "lowered"
    return (
        f"**Training {verb} the share of correct sampled answers on {overall.problems} held-out problems: "
        f"{share(strict.base.value)} before, {share(strict.trained.value)} after, "
        f"{difference(strict.difference, unit=' points')}.** "
        f"Greedy: {_before_after(overall.metrics['greedy']['accuracy'])}. "
        f"Sampled, read leniently: {_before_after(overall.metrics['sampled']['lenient_accuracy'])}. "
        "Brackets hold intervals over problems. These are new problems of the slices that were trained on; the others "
        "follow below."
    )


def _before_after(one: Compared) -> str:
    change = difference(one.difference, unit=" points")
    return f"{share(one.base.value)} before, {share(one.trained.value)} after, {change}"


def _result(parts: PageParts) -> str:
    identity = parts.inputs.base.numbers["identity"]
    intro = (
        f"{parts.overall.problems} held-out problems of the slices trained on; sampled: "
        f"{identity['samples_per_problem']} completions of each at temperature {identity['temperature']:g}; greedy: "
        f"one. Both policies have {identity['max_new_tokens']} new tokens. Differences are in points (in tokens for "
        f"lengths), paired by problem; brackets hold {identity['intervals']['confidence']:.0%} intervals (bootstrap "
        "over problems)."
    )
    texts = [f"## Result\n\n{intro}"]
    for mode in ("sampled", "greedy"):
        rows = [
            [_metric_name(metric), *_cells(one, metric)]
            for metric, one in sorted(parts.overall.metrics[mode].items(), key=_place)
            if metric != "pass_at_1"  # the same number as the strict accuracy
        ]
        texts.append(f"### {mode.capitalize()}\n\n" + table(["", "Base", "Trained", "Difference"], rows))
    texts.append(
        "*Strict*: the completion ended by itself and is one line holding the answer alone. *Lenient*: the last number "
        "(or words) of the first line that has any, finished or not. The scorer judges both: "
        f"`{identity['scorer']}`, apart from the training reward."
    )
    return "\n\n".join(texts)


def _place(named: tuple[str, Compared]) -> int:
    """As in ``METRIC_NAMES``, with pass@k right after the accuracies."""
    names = list(METRIC_NAMES)
    return names.index(named[0] if named[0] in names else "lenient_accuracy")


def _metric_name(metric: str) -> str:
    return METRIC_NAMES.get(metric, metric.replace("pass_at_", "Pass@"))


def _cells(one: Compared, metric: str) -> list[str]:
    is_share = not metric.endswith("length")
    return [
        estimate(one.base, is_share),
        estimate(one.trained, is_share),
        difference(one.difference, is_share),
    ]


def _slices(parts: PageParts) -> str:
    texts = ["## By slice", _picture("held_out.png", parts)]
    for title, mode, metric in (
        ("Sampled, strict", "sampled", "accuracy"),
        ("Sampled, lenient", "sampled", "lenient_accuracy"),
        ("Greedy, strict", "greedy", "accuracy"),
    ):
        rows = [
            [one.name, RELATIONS[one.relation], str(one.problems), *_cells(one.metrics[mode][metric], metric)]
            for one in parts.slices
        ]
        header = ["Slice", "Relation to training", "Problems", "Base", "Trained", "Difference"]
        texts.append(f"### {title}\n\n" + table(header, rows, left=2))
    return _joined(texts)


def _training(parts: PageParts) -> str:
    texts = ["## Learning curves", _picture("learning.png", parts), _picture("update.png", parts)]
    return _joined([*texts, "All metrics by round: `curves.csv`."])


def _groups(parts: PageParts) -> str:
    rows = [
        [
            one.slice,
            str(one.groups),
            number(one.reward, 3),
            share(one.mixed),
            share(one.duplicates),
            number(one.distinct),
            number(one.length),
            share(one.truncated),
            share(one.advantage_share),
        ]
        for one in parts.groups
    ]
    header = ["Slice", "Groups", "Reward", "Mixed", "Repeated", "Distinct texts", "Length", "Cut off", "Of the signal"]
    text = (
        "Of the training's rollouts, from the record. Only *mixed* groups (unequal rewards) teach anything; *repeated* "
        "completions stand in their group already; *of the signal* is the part of the sum of absolute advantages."
    )
    return _joined(["## Groups: where the signal came from", text, _picture("groups.png", parts), table(header, rows)])


def _changed(parts: PageParts) -> str:
    gained, lost = changed_answers(parts.inputs.base.answers, parts.inputs.trained.answers)
    texts = [
        "## Held-out answers that changed",
        f"Greedy, all slices: {len(gained)} problems were wrong before and right after, {len(lost)} the reverse.",
    ]
    for title, pairs in (("Wrong before, right after", gained), ("Right before, wrong after", lost)):
        if pairs:
            rows = [_changed_row(pair) for pair in pairs[: parts.samples]]
            header = ["Slice", "Question", "Gold", "Before", "After"]
            texts.append(f"### {title}\n\n" + table(header, rows, left=5))
    return _joined(texts)


def _changed_row(pair: Changed) -> list[str]:
    before, after = pair
    return [before.slice, code(before.question), code(before.gold), code(before.text, 60), code(after.text, 60)]


def _rollouts(parts: PageParts) -> str:
    best, worst = best_and_worst(parts.inputs.rollouts, parts.samples)
    texts = ["## Training rollouts of the last round"]
    for title, rows in (("Highest reward", best), ("Lowest reward", worst)):
        shown = [
            [
                row["slice"],
                code(row["prompt_text"], 100, keep_end=True),
                code(row["completion_text"], 60),
                _components(row["reward_raw"]),
                number(row["reward"], 3),
            ]
            for row in rows
        ]
        header = ["Slice", "End of the prompt", "Completion", "Components", "Reward"]
        texts.append(f"### {title}\n\n" + table(header, shown, left=4))
    return _joined(texts)


def _components(raw: Sequence[tuple[str, float | None]]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {'not scored' if v is None else f'{v:g}'}" for name, v in sorted(raw))


def _picture(name: str, parts: PageParts) -> str:
    return f"![{PICTURE_TEXTS[name]}](pictures/{name})" if name in parts.pictures else ""


def _joined(texts: Sequence[str]) -> str:
    return "\n\n".join(text for text in texts if text)
