"""All that the report reads, checked before any of it is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from grpo.answer_metrics import METRICS, UNSCORED, Estimate, IntervalSettings
from grpo.answer_readings import STRICT
from grpo.held_out_answers import HeldOutAnswer, read_answers
from grpo.loopholes import LOOPHOLE_FIELDS, LOOPHOLES_FILE, SOURCES
from grpo.reporting.files import ReportError, parse_json, read_json, read_text, refuse_damaged, refuse_missing
from grpo.reporting.finished_run import FinishedRun, read_run, run_files

STAGE = "evaluate"
MODES = ("sampled", "greedy")
RELATIONS = {"trained_on": "trained on", "other_setting": "same task, not trained on", "other_task": "other task"}

# What may differ between two evaluations that are compared; all else must be the same.
_OWN_TO_A_POLICY = frozenset({"name", "policy_sha256"})
_IDENTITY = (
    "intervals",
    "max_new_tokens",
    "pass_at_k",
    "policy_sha256",
    "problems_sha256",
    "samples_per_problem",
    "scorer",
    "seed",
    "temperature",
    "versions",
)
# What an evaluation did that was written before it could do otherwise.
_DEFAULTS: Mapping[str, Any] = {"reading": STRICT.path, "scorer_settings": {}}
# What a file of another form fails with where its fields are read.
_ODD_FORM = (KeyError, TypeError, AttributeError, ValueError)


@dataclass(frozen=True)
class Evaluated:
    """One policy's evaluation: the numbers of its JSON file and the completions behind them.

    ``loopholes``: what the training's reward pays and the scorer rejects; None where it was not looked for.
    """

    name: str
    numbers: Mapping[str, Any]
    answers: list[HeldOutAnswer]
    loopholes: list[Mapping[str, Any]] | None = None

    @property
    def identity(self) -> Mapping[str, Any]:
        """What the numbers depend on."""
        identity: Mapping[str, Any] = {**_DEFAULTS, **self.numbers["identity"]}
        return identity


@dataclass(frozen=True)
class ReportInputs:
    """What the report is made of: two evaluations, and the training between them."""

    base: Evaluated
    trained: Evaluated
    run: FinishedRun

    @property
    def split(self) -> str | None:
        """Which split of the run's problems was evaluated, such as ``heldout``; None for another file."""
        evaluated = self.base.identity["problems_sha256"]
        return next((name for name, sha256 in self.run.run["problems_sha256"].items() if sha256 == evaluated), None)


def read_inputs(train: Path, evaluation_numbers: Path, completions: Path, base: str, trained: str) -> ReportInputs:
    """Read everything.

    Args:
        train: the train stage's output folder.
        evaluation_numbers: folder with ``<name>.json`` of both evaluations.
        completions: folder with ``<name>/completions.parquet`` of both.
        base: name of the evaluation before training.
        trained: name of the one after.

    Raises:
        ReportError: a file is missing or damaged, the two evaluations cannot be compared, or they are not of the
            policies before and after this training.
    """
    needed = run_files(train)
    for name in (base, trained):
        needed |= {_numbers_file(evaluation_numbers, name): STAGE, _answers_file(completions, name): STAGE}
    refuse_missing(needed)
    before, after = (_read_evaluation(name, evaluation_numbers, completions) for name in (base, trained))
    _refuse_incomparable(before, after)
    run = read_run(train)
    _refuse_other_policy(before, run.run, "base_policy_sha256", "started from")
    _refuse_other_policy(after, run.run, "policy_sha256", "ended with")
    return ReportInputs(before, after, run)


def _numbers_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _answers_file(folder: Path, name: str) -> Path:
    return folder / name / "completions.parquet"


def _read_evaluation(name: str, numbers: Path, completions: Path) -> Evaluated:
    path, answers = _numbers_file(numbers, name), _answers_file(completions, name)
    parsed = read_json(path, STAGE, ("identity", "overall", "by_slice"))
    try:
        _check_numbers(parsed)
    except _ODD_FORM as error:
        refuse_damaged(path, STAGE, f"{type(error).__name__}: {error}")
    loopholes = None if parsed.get("loopholes") is None else _read_loopholes(completions / name, parsed["loopholes"])
    try:
        return Evaluated(name, parsed, read_answers(answers), loopholes)
    except (pa.ArrowException, OSError, TypeError) as error:  # TypeError: a column is missing
        refuse_damaged(answers, STAGE, str(error).partition("\n")[0])


def _read_loopholes(folder: Path, numbers: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The texts behind the numbers, as many as those say."""
    path = folder / LOOPHOLES_FILE
    rows = [parse_json(path, STAGE, line, LOOPHOLE_FIELDS) for line in read_text(path, STAGE).split("\n")[:-1]]
    counted = sum(one["loopholes"] for part in numbers["by_slice"].values() for one in part.values())
    if len(rows) != counted:
        refuse_damaged(path, STAGE, f"it holds {len(rows)} loopholes and the numbers count {counted}")
    return rows


def _check_numbers(parsed: Mapping[str, Any]) -> None:
    """Touch every field that the report reads.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: one is not there, or of another form.
    """
    identity = parsed["identity"]
    _require(identity, _IDENTITY)
    IntervalSettings(**identity["intervals"])
    dict(identity["versions"])
    needed = METRICS.keys() - {UNSCORED}
    metrics = {"greedy": needed, "sampled": {*needed, *(f"pass_at_{k}" for k in identity["pass_at_k"])}}
    for part in (parsed["overall"], *parsed["by_slice"].values()):
        _require(part, ("problems", *MODES))
        for mode, names in metrics.items():
            _require(part[mode], sorted(names))
            for one in part[mode].values():
                Estimate(**one).rounded()
    if parsed.get("loopholes") is not None:
        _check_loopholes(parsed["loopholes"], parsed["by_slice"])
    for part in parsed["by_slice"].values():
        if part["relation"] not in RELATIONS:
            raise ValueError(f"relation is {part['relation']!r}")


def _check_loopholes(numbers: Mapping[str, Any], slices: Iterable[str]) -> None:
    list(numbers["components"])
    _require(numbers["by_slice"], slices)
    for one in numbers["probes"].values():
        _require(one, ("asked", "loopholes"))
    for part in (numbers["overall"], *numbers["by_slice"].values()):
        for source in SOURCES:
            _require(part[source], ("texts", "paid", "unjudged", "loopholes"))
            Estimate(**part[source]["rate"]).rounded()


def _require(fields: Mapping[str, Any], names: Iterable[str]) -> None:
    lacking = [name for name in names if name not in fields]
    if lacking:
        raise KeyError(", ".join(lacking))


def _refuse_incomparable(base: Evaluated, trained: Evaluated) -> None:
    before, after = base.identity, trained.identity
    differing = [key for key in sorted({*before, *after} - _OWN_TO_A_POLICY) if before.get(key) != after.get(key)]
    if differing:
        parts = ", ".join(f"{key}: {before.get(key)} and {after.get(key)}" for key in differing)
        raise ReportError(
            f"the evaluations {base.name} and {trained.name} cannot be compared, they differ in {parts}: "
            "evaluate both policies with the same configs/evaluate.yaml"
        )
    if base.numbers["by_slice"].keys() != trained.numbers["by_slice"].keys():
        raise ReportError(
            f"the evaluations {base.name} and {trained.name} have numbers of other slices: evaluate both policies again"
        )
    if not base.numbers["overall"]["problems"]:
        raise ReportError(
            "no held-out problem belongs to a slice that was trained on: add some to the problem file, or there "
            "is nothing to say of the training"
        )


def _refuse_other_policy(one: Evaluated, run: Mapping[str, Any], field: str, what: str) -> None:
    """Numbers of one policy beside the record of another's training would be a result that nobody had."""
    evaluated, expected = one.identity["policy_sha256"], run[field]
    if evaluated != expected:
        raise ReportError(
            f"the evaluation {one.name} is of the policy {evaluated[:16]}, the training {run['run_id']} {what} "
            f"{expected[:16]}: evaluate the policies of this training again, or `dvc repro report`"
        )
