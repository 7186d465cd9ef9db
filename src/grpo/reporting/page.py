"""The report as a Markdown page: the result first, then where it came from, then what it cannot say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo.reporting.cautions import cautions, problems_called
from grpo.reporting.comparison import Compared, SliceComparison
from grpo.reporting.group_statistics import GroupStatistics, ProblemSignal
from grpo.reporting.groups_section import groups_section
from grpo.reporting.inputs import RELATIONS, ReportInputs
from grpo.reporting.loopholes_section import loopholes_section
from grpo.reporting.markdown import code, difference, number, plain, share, table
from grpo.reporting.provenance import counts_section, identity_section, limits_section, method_section
from grpo.reporting.result_rows import cells, paired_text, readings_text, result_rows, unscored_by_slice
from grpo.reporting.samples import Changed, best_and_worst, changed_answers

PICTURE_TEXTS = {
    "held_out.png": "Sampled accuracy of base and trained policy by slice, with intervals",
    "learning.png": "Reward and its components by round",
    "groups.png": "Share of mixed groups by round, and the part of the absolute advantage by slice",
    "update.png": "KL, gradient norm, length and truncation by round",
}


_WHICH_PROBLEMS: Mapping[str | None, str] = {"heldout": "These are new problems of the slices that were trained on"}
_NOT_HELD_OUT = "These are of the slices that were trained on, and **not** the run's held-out problems"


@dataclass(frozen=True)
class PageParts:
    """What the page is written from."""

    inputs: ReportInputs
    overall: SliceComparison
    slices: Sequence[SliceComparison]
    groups: Sequence[GroupStatistics]
    signal: Sequence[ProblemSignal]
    pictures: Sequence[str]
    samples: int


def write_page(parts: PageParts) -> str:
    """The whole page."""
    sections = [
        "# What training changed",
        headline(parts.overall, parts.inputs.split),
        *_cautions(parts),
        _result(parts),
        _slices(parts),
        loopholes_section(parts.inputs, parts.slices, parts.samples),
        _training(parts),
        groups_section(parts.groups, parts.signal[: parts.samples], _picture("groups.png", parts)),
        _changed(parts),
        _rollouts(parts),
        method_section(parts.inputs.run.config),
        counts_section(parts.inputs),
        limits_section(parts.inputs),
        identity_section(parts.inputs),
    ]
    return "\n\n".join(sections) + "\n"


def headline(overall: SliceComparison, split: str | None) -> str:
    """The result in a sentence, and what the other readings add; ``split`` is the one that was evaluated."""
    strict = overall.metrics["sampled"]["accuracy"]
    low, high = strict.difference.low, strict.difference.high
    verb = "did not clearly change"
    if low is not None and low > 0:
        verb = "raised"
    if high is not None and high < 0:
        verb = "lowered"
    return (
        f"**Training {verb} the share of correct sampled answers on {overall.problems} {problems_called(split)} "
        f"problems: {share(strict.base.value)} before, {share(strict.trained.value)} after, "
        f"{difference(strict.difference, unit=' points')}.** "
        f"Greedy: {_before_after(overall.metrics['greedy']['accuracy'])}. "
        f"{_read_leniently(overall.metrics['sampled']['lenient_accuracy'])}"
        f"Brackets hold intervals over problems. {_WHICH_PROBLEMS.get(split, _NOT_HELD_OUT)}; the others follow below."
    )


def _read_leniently(one: Compared) -> str:
    """Nothing where answers have no lenient reading."""
    return "" if one.base.value is None else f"Sampled, read leniently: {_before_after(one)}. "


def _before_after(one: Compared) -> str:
    change = difference(one.difference, unit=" points")
    return f"{share(one.base.value)} before, {share(one.trained.value)} after, {change}"


def _cautions(parts: PageParts) -> list[str]:
    found = cautions(parts.inputs)
    return ["**To know before reading on:**\n\n" + "\n".join(f"- {text}" for text in found)] if found else []


def _result(parts: PageParts) -> str:
    identity = parts.inputs.base.identity
    intro = (
        f"{parts.overall.problems} {problems_called(parts.inputs.split)} problems of the slices trained on; sampled: "
        f"{identity['samples_per_problem']} completions of each at temperature {identity['temperature']:g}; greedy: "
        f"one. Both policies have {identity['max_new_tokens']} new tokens. Differences are in points (in tokens for "
        f"lengths), paired by problem; brackets hold {identity['intervals']['confidence']:.0%} intervals (bootstrap "
        "over problems)."
    )
    texts = [f"## Result\n\n{intro}"]
    for mode in ("sampled", "greedy"):
        texts.append(
            f"### {mode.capitalize()}\n\n"
            + table(["", "Base", "Trained", "Difference"], result_rows(parts.overall, mode))
        )
    return _joined([*texts, paired_text(parts.overall), readings_text(identity)])


def _slices(parts: PageParts) -> str:
    texts = ["## By slice", _picture("held_out.png", parts)]
    for title, mode, metric in (
        ("Sampled, strict", "sampled", "accuracy"),
        ("Sampled, lenient", "sampled", "lenient_accuracy"),
        ("Greedy, strict", "greedy", "accuracy"),
    ):
        rows = [
            [plain(one.name), RELATIONS[one.relation], str(one.problems), *cells(one.metrics[mode][metric], metric)]
            for one in parts.slices
        ]
        header = ["Slice", "Relation to training", "Problems", "Base", "Trained", "Difference"]
        texts.append(f"### {title}\n\n" + table(header, rows, left=2))
    return _joined([*texts, unscored_by_slice(parts.slices)])


def _training(parts: PageParts) -> str:
    texts = ["## Learning curves", _picture("learning.png", parts), _picture("update.png", parts)]
    return _joined([*texts, "All metrics by round but times: `curves.csv`."])


def _changed(parts: PageParts) -> str:
    gained, lost = changed_answers(parts.inputs.base.answers, parts.inputs.trained.answers)
    texts = [
        f"## {problems_called(parts.inputs.split).capitalize()} answers that changed",
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
    return [plain(before.slice), code(before.question), code(before.gold), code(before.text, 60), code(after.text, 60)]


def _rollouts(parts: PageParts) -> str:
    best, worst = best_and_worst(parts.inputs.run.rollouts, parts.samples)
    texts = ["## Training rollouts of the last round"]
    if not best:
        return _joined([*texts, "None was scored."])
    for title, rows in (("Highest reward", best), ("Lowest reward", worst)):
        shown = [
            [
                plain(row["slice"]),
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
    shown = [(plain(name.replace("_", " ")), value) for name, value in sorted(raw)]
    return ", ".join(f"{name} {'not scored' if value is None else f'{value:g}'}" for name, value in shown)


def _picture(name: str, parts: PageParts) -> str:
    return f"![{PICTURE_TEXTS[name]}](pictures/{name})" if name in parts.pictures else ""


def _joined(texts: Sequence[str]) -> str:
    return "\n\n".join(text for text in texts if text)
