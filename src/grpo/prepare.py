"""The first stage: check the raw problems, grade the rewards on them, and split them.

``grpo prepare --config configs/prepare.yaml`` stops before any training where the data or the rewards cannot
be trusted: a gold answer without full marks, a wrong or empty one with them, a question that stands twice,
or a worked example that is held out. ``docs/data.md`` has the layouts that are read and the rules of the splits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser

from grpo.problem_sources import Sources, as_sources
from grpo.problem_sources.prepared_files import (
    REJECTED_FILE,
    Loaded,
    data_sha256,
    described,
    rejected_lines,
    slice_counts,
    write_prepared,
)
from grpo.problem_sources.splits import (
    SPLITS,
    Rejected,
    Row,
    held_out_first,
    leaked_examples,
    repeated_ids,
    repeated_questions,
    split_row,
)
from grpo.records import Problem
from grpo.rewards import RewardComponent, validate_components
from grpo.rewards.self_check import DESERVING, Misjudgement, grade
from grpo.scorers import check_scorer, load_scorer
from grpo.whole_files import write_whole

# An error lists this many places and counts the others.
SHOWN = 5

Remedy = Literal["refuse", "drop"]


class PrepareError(ValueError):
    """Problems or rewards that must not go into training."""


@dataclass(frozen=True)
class PrepareSettings:
    """What ``grpo prepare`` reads."""

    problems: Sources
    """The raw problems: a file of them, a source by class_path (docs/data.md), or a list of such."""
    rewards: dict[str, RewardComponent]
    """The components to grade: the file that training uses, relative to this config."""
    seed: int
    """Key of the split; another one splits anew."""
    scorer: str | None = None
    """The scorer of configs/evaluate.yaml, proved on the held-out problems before anything is trained; null: not."""
    worked_examples: Sources | None = None
    """Examples a policy is warmed up on: graded, and kept out of validation and heldout."""
    validation: float = 0.1
    """Share of the problems of role train that validation gets."""
    heldout: float = 0.25
    """Share of the problems of role train that heldout gets, beside all of role heldout_only."""
    on_failed_reference: Remedy = "refuse"
    """Problems whose own answer gets no full marks: refuse, or drop them. rejected.jsonl lists them either way."""
    on_repeated_question: Remedy = "refuse"
    """Questions that stand twice: refuse, or drop the later one; of two splits, the one that is not held out."""
    max_rejected_share: float = 0.02
    """The largest share of the problems that may be dropped: more is a fault of the data or of the reward."""
    answer_template: str = "{answer}"
    """How an answer is written as a whole completion, where a reward asks for a form around it."""
    grade_solutions: bool = False
    """Whether the worked solution of a problem (metadata.solution) must get full marks too."""
    workers: int = 2
    """Processes that grade."""
    output: Path = Path("build/problems")
    """The folder of train.jsonl, validation.jsonl, heldout.jsonl and summary.json."""


def main(argv: list[str]) -> None:
    """The ``grpo prepare`` command."""
    parser = ArgumentParser(prog="grpo prepare", description=__doc__)
    parser.add_argument("--config", action="config", help="configs/prepare.yaml")
    parser.add_class_arguments(PrepareSettings, sub_configs=True)  # rewards may be the path of a file
    values = parser.instantiate(parser.parse_args(argv))
    prepare(PrepareSettings(**{name: value for name, value in values.items() if name != "config"}))


def prepare(settings: PrepareSettings) -> None:
    """Check, grade, split and write.

    Raises:
        ProblemFileError: a source that cannot be read, or a row that is no good.
        SelfCheckError: rewards that cannot be graded on these problems.
        ScorerError: a scorer that does not fit the held-out problems.
        PrepareError: settings, problems or rewards that must not go into training. The output folder is
            then left as it was, but for the list of problems whose own answer fails.
    """
    _check(settings)
    problems, worked = _load(settings.problems), _load(settings.worked_examples)
    shares = {"validation": settings.validation, "heldout": settings.heldout}
    rows = [split_row(row, seed=settings.seed, **shares) for loaded in problems for row in loaded.rows]
    examples = [Row(row.problem, row.place, None) for loaded in worked for row in loaded.rows]
    kept, repeated = _without_repeats(rows, settings)
    _refuse("questions that stand twice", repeated_questions(examples), "remove one")
    _refuse("ids that stand twice", repeated_ids(kept) + repeated_ids(examples), "give each an id of its own")
    _refuse("worked examples that are held out", leaked_examples(examples, kept), "remove the worked example")
    kept, failed = _graded(kept, examples, settings)
    rejected = [*repeated, *failed]
    by_split = _by_split(kept)
    _refuse_large_share(len(rejected), len(rows), settings)
    if settings.scorer is not None:
        check_scorer(settings.scorer, load_scorer(settings.scorer), by_split["heldout"])
    write_prepared(
        settings.output, by_split, _summary(settings, by_split, [*problems, *worked], len(examples), rejected), rejected
    )
    counts = ", ".join(f"{split} {len(problems)}" for split, problems in by_split.items())
    print(f"{settings.output}: {counts}" + (f"; left out {len(rejected)}, see {REJECTED_FILE}" if rejected else ""))


def _load(sources: Sources | None) -> list[Loaded]:
    return [Loaded(source, list(source.read())) for source in as_sources(sources)]


def _without_repeats(rows: Sequence[Row], settings: PrepareSettings) -> tuple[list[Row], list[Rejected]]:
    if settings.on_repeated_question == "refuse":
        _refuse("questions that stand twice", repeated_questions(rows), "remove one, or set on_repeated_question: drop")
        return list(rows), []
    repeated = repeated_questions(held_out_first(rows))
    return _without(rows, repeated), repeated


def _graded(rows: list[Row], examples: Sequence[Row], settings: PrepareSettings) -> tuple[list[Row], list[Rejected]]:
    """The rows whose references get full marks and, where that is declared, the others.

    Raises:
        PrepareError: a reward that misjudges an answer for which no row can be blamed; a failed reference
            where they are to be refused, after listing them all.
    """
    everything = [*rows, *examples]
    found = grade(
        settings.rewards,
        [row.problem for row in everything],
        answer_template=settings.answer_template,
        solutions=settings.grade_solutions,
        workers=settings.workers,
    )
    failed = _failed_references(everything, [each for each in found if each.index < len(rows)])
    listed = ""
    if failed and settings.on_failed_reference == "refuse":
        write_whole(settings.output / REJECTED_FILE, rejected_lines(failed))
        listed = f"{settings.output / REJECTED_FILE} lists the problems whose own answer fails"
    if settings.on_failed_reference == "drop":
        dropped = {id(each.row) for each in failed}
        # Where a row's own answer fails because its check does, so may the others; but never with full marks.
        found = [each for each in found if each.full or id(everything[each.index]) not in dropped]
    _refuse("rewards that misjudge", [Rejected(everything[each.index], str(each)) for each in found], after=listed)
    return _without(rows, failed), failed


def _failed_references(rows: Sequence[Row], found: Sequence[Misjudgement]) -> list[Rejected]:
    """A row once, for the first of its references that fails."""
    first = {each.index: each for each in reversed(found) if each.kind in DESERVING}
    return [Rejected(rows[index], str(first[index])) for index in sorted(first)]


def _without(rows: Sequence[Row], rejected: Sequence[Rejected]) -> list[Row]:
    out = {id(each.row) for each in rejected}  # a problem cannot be hashed, and a place may be read twice
    return [row for row in rows if id(row) not in out]


def _by_split(rows: Sequence[Row]) -> dict[str, list[Problem]]:
    by_split: dict[str, list[Problem]] = {s: [row.problem for row in rows if row.split == s] for s in SPLITS}
    for split, problems in by_split.items():
        if not problems:
            raise PrepareError(
                f"no problem falls into {split}: add problems, declare a source's `split: {split}`, or change "
                "validation, heldout or seed"
            )
    return by_split


def _check(settings: PrepareSettings) -> None:
    validate_components(settings.rewards)
    for name in ("validation", "heldout"):
        share = getattr(settings, name)
        if not 0 < share < 1:
            raise PrepareError(f"{name} is {share}: choose a share above 0 and below 1")
    if settings.validation + settings.heldout >= 1:
        raise PrepareError(
            f"validation {settings.validation} and heldout {settings.heldout} leave nothing to train on: "
            "keep their sum below 1"
        )
    if not 0 <= settings.max_rejected_share < 1:
        raise PrepareError(f"max_rejected_share is {settings.max_rejected_share}: choose a share from 0 and below 1")
    if settings.workers < 1:
        raise PrepareError(f"workers is {settings.workers}: give at least 1")


def _refuse(what: str, rejected: Sequence[Rejected], remedy: str = "", after: str = "") -> None:
    if not rejected:
        return
    shown = "".join(f"\n  {each.row.place}: {each.reason}{remedy and ': '}{remedy}" for each in rejected[:SHOWN])
    more = f"\n  and {len(rejected) - SHOWN} more" if len(rejected) > SHOWN else ""
    raise PrepareError(f"{what} ({len(rejected)}):{shown}{more}" + (f"\n{after}" if after else ""))


def _refuse_large_share(rejected: int, rows: int, settings: PrepareSettings) -> None:
    if rejected > settings.max_rejected_share * rows:
        raise PrepareError(
            f"{rejected} of {rows} problems would be dropped, more than max_rejected_share = "
            f"{settings.max_rejected_share}: mend the data or the reward, or allow a larger share"
        )


def _summary(
    settings: PrepareSettings,
    by_split: Mapping[str, Sequence[Problem]],
    loaded: Sequence[Loaded],
    worked_examples: int,
    rejected: Sequence[Rejected],
) -> dict[str, Any]:
    declared = {each.name: described(getattr(settings, each.name)) for each in fields(settings)}
    del declared["output"], declared["workers"]  # neither changes what is written
    return {
        "counts": {split: slice_counts(problems) for split, problems in by_split.items()},
        "worked_examples": worked_examples,
        "rejected": len(rejected),
        "data_sha256": data_sha256(loaded),
        "settings": declared,
    }
