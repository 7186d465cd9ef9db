"""All that the report reads, checked before any of it is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from grpo.held_out_answers import HeldOutAnswer, read_answers
from grpo.reporting.curves import Curves, read_curves
from grpo.run_identity import CONFIG_FILE

# What may differ between two evaluations that are compared; all else must be the same.
_OWN_TO_A_POLICY = frozenset({"name", "policy_sha256"})

ROLLOUT_COLUMNS = [
    "rollout_id",
    "round",
    "purpose",
    "problem_id",
    "slice",
    "prompt_text",
    "occurrence",
    "member",
    "draw",
    "completion_text",
    "completion_tokens",
    "completion_drawn",
    "finish_reason",
    "reward_raw",
    "reward",
]
UPDATE_COLUMNS = ["rollout_id", "verdict", "advantage", "loss_tokens"]


class ReportError(ValueError):
    """The report cannot be made from what is there."""


@dataclass(frozen=True)
class Evaluated:
    """One policy's evaluation: the numbers of its JSON file and the completions behind them."""

    name: str
    numbers: Mapping[str, Any]
    answers: list[HeldOutAnswer]


@dataclass(frozen=True)
class ReportInputs:
    """What the report is made of. ``rollouts`` and ``updates`` are rows of the record's two tables."""

    base: Evaluated
    trained: Evaluated
    curves: Curves
    rollouts: list[dict[str, Any]]
    updates: dict[str, dict[str, Any]]
    config: Mapping[str, Any]
    run: Mapping[str, Any]


def read_inputs(train: Path, evaluation_numbers: Path, completions: Path, base: str, trained: str) -> ReportInputs:
    """Read everything.

    Args:
        train: the train stage's output folder.
        evaluation_numbers: folder with ``<name>.json`` of both evaluations.
        completions: folder with ``<name>/completions.parquet`` of both.
        base: name of the evaluation before training.
        trained: name of the one after.

    Raises:
        ReportError: a file is missing, or the two evaluations cannot be compared.
    """
    config, run, metrics = train / "policy" / CONFIG_FILE, train / "run.json", train / "metrics.csv"
    record = train / "record"
    needed = {
        config: "train",
        run: "train",
        metrics: "train",
        record / "rollouts": "train",
        record / "updates": "train",
    }
    for name in (base, trained):
        needed |= {evaluation_numbers / f"{name}.json": "evaluate"}
        needed |= {completions / name / "completions.parquet": "evaluate"}
    missing = [f"{path} (stage {stage})" for path, stage in needed.items() if not path.exists()]
    if missing:
        raise ReportError(f"the report lacks {', '.join(missing)}: run the stages named, or `dvc repro report`")
    before = _read_evaluation(base, evaluation_numbers, completions)
    after = _read_evaluation(trained, evaluation_numbers, completions)
    _refuse_incomparable(before, after)
    rollouts = _read_record(record / "rollouts", ROLLOUT_COLUMNS)
    return ReportInputs(
        base=before,
        trained=after,
        curves=read_curves(metrics),
        rollouts=[row for row in rollouts if row["purpose"] == "train"],
        updates={row["rollout_id"]: row for row in _read_record(record / "updates", UPDATE_COLUMNS)},
        config=_mapping(config, yaml.safe_load(config.read_text(encoding="utf-8"))),
        run=_mapping(run, json.loads(run.read_text(encoding="utf-8"))),
    )


def drawn_tokens(row: Mapping[str, Any]) -> int:
    """Tokens of a rollout, without those that a tool inserted."""
    drawn = row["completion_drawn"]
    return len(row["completion_tokens"]) if drawn is None else sum(drawn)


def _read_evaluation(name: str, numbers: Path, completions: Path) -> Evaluated:
    path = numbers / f"{name}.json"
    parsed = _mapping(path, json.loads(path.read_text(encoding="utf-8")))
    return Evaluated(name, parsed, read_answers(completions / name / "completions.parquet"))


def _refuse_incomparable(base: Evaluated, trained: Evaluated) -> None:
    before, after = base.numbers["identity"], trained.numbers["identity"]
    differing = [key for key in sorted({*before, *after} - _OWN_TO_A_POLICY) if before.get(key) != after.get(key)]
    if differing:
        parts = ", ".join(f"{key}: {before.get(key)} and {after.get(key)}" for key in differing)
        raise ReportError(
            f"the evaluations {base.name} and {trained.name} cannot be compared, they differ in {parts}: "
            "evaluate both policies with the same configs/evaluate.yaml"
        )
    if not base.numbers["overall"]["problems"]:
        raise ReportError(
            "no held-out problem belongs to a slice that was trained on: add some to the problem file, or there "
            "is nothing to say of the training"
        )


def _read_record(folder: Path, columns: list[str]) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise ReportError(f"{folder} holds no table: run the stage train again")
    rows: list[dict[str, Any]] = pa.concat_tables(pq.read_table(file, columns=columns) for file in files).to_pylist()
    return rows


def _mapping(path: Path, parsed: object) -> Mapping[str, Any]:
    if not isinstance(parsed, dict):
        raise ReportError(f"{path} does not hold named fields: run the stage that makes it again")
    return parsed
