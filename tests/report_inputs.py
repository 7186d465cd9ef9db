"""A small finished experiment on disk, made without a model: what the report reads."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from grpo.answer_metrics import IntervalSettings, summarise
from grpo.held_out_answers import HeldOutAnswer, answers_parquet
from grpo.records import Purpose, RolloutKey
from grpo.report import ReportSettings
from grpo.reporting.curves import Curves
from grpo.reporting.finished_run import FinishedRun, Method
from grpo.reporting.recorded_groups import by_round
from grpo.reporting.recorded_metrics import round_values, validation_values
from grpo.training.rollout_log import ROLLOUTS_SCHEMA, UPDATES_SCHEMA

INTERVALS = IntervalSettings(resamples=200)
SLICES = {
    "sums_1digit": ("train", "trained_on", 12),
    "sums_2digit": ("train", "trained_on", 8),
    "sums_3digit": ("heldout_only", "other_setting", 6),
    "products": ("heldout_only", "other_task", 5),
}
ROUNDS, GROUP_SIZE, SEED = 4, 4, 1
RUN_ID = "0123456789abcdef"
SECONDS = {"rollout": 1.0, "reward": 0.25, "record": 0.125, "update": 0.5, "other": 0.125, "round": 2.0}
CONFIG: dict[str, Any] = {
    "seed_everything": SEED,
    "trainer": {"precision": "32-true", "devices": 1, "max_epochs": 1},
    "model": {
        "policy": "build/policy",
        "rewards": {
            "exact_answer": {"check": "grpo.rewards.exact_answer.exact_answer", "weight": 1.0},
            "answer_format": {"check": "grpo.rewards.answer_format.answer_format", "weight": 0.1},
        },
        "reward_transform": {"clip": None, "length_penalty": 0.0},
        "round": {"group_size": GROUP_SIZE, "flat_groups": "skip", "max_draws": 4, "at_limit": "skip"},
        "advantages": {"baseline": "mean", "scale": "group_std", "std_correction": 0, "epsilon": 1e-8},
        "loss": {"kl_beta": 0.04, "clip_high": None, "mask_truncated": False},
        "optimizer": {"betas": [0.9, 0.95]},
    },
    "data": {"problems": "build/problems", "rounds": ROUNDS, "groups_per_round": 2},
}

# Whether a policy answers problem `index` of a slice correctly in completion `member`.
Skill = Callable[[str, int, int], bool]


def base_skill(slice: str, index: int, member: int) -> bool:
    return slice == "sums_1digit" and index % 4 == 0 and member % 2 == 0


def trained_skill(slice: str, index: int, member: int) -> bool:
    if slice == "sums_1digit":
        return index not in (0, 1) or member == 1
    return slice == "sums_2digit" and index % 2 == 0


def answers(skill: Skill) -> list[HeldOutAnswer]:
    """One greedy and four sampled completions of each problem; wrong ones with an odd index are cut off."""
    found = []
    for slice, (role, _, count) in SLICES.items():
        for index in range(count):
            for mode, members in (("greedy", 1), ("sampled", 4)):
                found += [_answer(slice, role, index, mode, m, skill(slice, index, m)) for m in range(members)]
    return found


def _answer(slice: str, role: str, index: int, mode: str, member: int, correct: bool) -> HeldOutAnswer:
    cut_off = not correct and index % 2 == 1
    gold = str(index + 7)
    text = f" {gold}" if correct else f" {gold} | `so`\nit is" if cut_off else " 0"
    strict = None if cut_off else text.strip()
    return HeldOutAnswer(
        problem_id=f"{slice}-{index:02d}",
        slice=slice,
        role=role,
        question=f"What is {index} + 7?",
        gold=gold,
        mode=mode,
        member=member,
        text=text,
        tokens=8 if cut_off else 2,
        finish_reason="length" if cut_off else "end_token",
        strict_answer=strict,
        strict_score=float(correct),
        correct=correct,
        lenient_answer=gold if correct or cut_off else "0",
        lenient_correct=correct or cut_off,
    )


def evaluation(name: str, found: Sequence[HeldOutAnswer]) -> dict[str, Any]:
    """The numbers of an evaluation, as its stage writes them."""

    def summary(chosen: Sequence[HeldOutAnswer]) -> dict[str, Any]:
        modes = {
            mode: summarise([a.attempt for a in chosen if a.mode == mode], INTERVALS, pass_ks)
            for mode, pass_ks in (("greedy", ()), ("sampled", (1, 4)))
        }
        rounded = {mode: {n: e.rounded() for n, e in metrics.items()} for mode, metrics in modes.items()}
        return {"problems": len({a.problem_id for a in chosen}), **rounded}

    identity = {
        "name": name,
        "policy_sha256": name * 16,
        "problems_sha256": "f" * 64,
        "problems": 31,
        "samples_per_problem": 4,
        "pass_at_k": [1, 4],
        "temperature": 1.0,
        "max_new_tokens": 8,
        "max_rows": 128,
        "seed": 1,
        "scorer": "grpo.scorers.reasoning_gym_score",
        "intervals": asdict(INTERVALS),
        "versions": {"torch": "2.13.0"},
    }
    by_slice = {
        slice: {"relation": relation} | summary([a for a in found if a.slice == slice])
        for slice, (_, relation, _) in SLICES.items()
    }
    return {"identity": identity, "overall": summary([a for a in found if a.role == "train"]), "by_slice": by_slice}


@cache
def evaluation_files(name: str, skill: Skill) -> tuple[str, bytes]:
    """The two files of an evaluation; kept, because the intervals take a moment."""
    found = answers(skill)
    return json.dumps(evaluation(name, found)), answers_parquet(found)


# A mixed group has one rollout that is right: rewards 1.1 and three times 0.1, mean 0.35, std sqrt(3) / 4.
CENTRED = {True: 0.75, False: -0.25}
ADVANTAGES = {right: centred / (3**0.5 / 4 + 1e-8) for right, centred in CENTRED.items()}


def record_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Two groups a round: one of sums_1digit, mixed, and one of sums_2digit, flat until the last round."""
    rollouts, updates = [], []
    for number in range(ROUNDS):
        for slice in ("sums_1digit", "sums_2digit"):
            mixed = slice == "sums_1digit" or number == ROUNDS - 1
            for member in range(GROUP_SIZE):
                right = mixed and member == 0
                rollouts.append(_rollout_row(number, slice, member, right))
                updates.append(
                    {
                        "rollout_id": rollouts[-1]["rollout_id"],
                        "round": number,
                        "verdict": "kept" if mixed else "skipped_flat",
                        "verdict_reason": "",
                        "centred": CENTRED[right] if mixed else 0.0,
                        "advantage": ADVANTAGES[right] if mixed else 0.0,
                        "reference_logprobs": None,
                        "reference_version": None,
                        "loss_tokens": 3 if mixed else 0,
                    }
                )
    return rollouts, updates


def validation_rows() -> list[dict[str, Any]]:
    """After every second round: two completions of one problem, the first right."""
    return [
        _rollout_row(number, "sums_1digit", member, member == 0, purpose="validation")
        for number in range(1, ROUNDS, 2)
        for member in range(2)
    ]


def _rollout_row(number: int, slice: str, member: int, right: bool, purpose: Purpose = "train") -> dict[str, Any]:
    problem = f"{slice}-{purpose}-{number}"
    key = RolloutKey(SEED, purpose, number, problem, "plain", member=member)
    return {
        "rollout_id": key.rollout_id,
        "run_id": RUN_ID,
        "group_id": f"{purpose}-{number}-{slice}",
        "round": number,
        "purpose": purpose,
        "problem_id": problem,
        "slice": slice,
        "template_id": "plain",
        "prompt_text": f"What is {number} + 7?",
        "prompt_tokens": [1, 2],
        "occurrence": 0,
        "member": member,
        "draw": 0,
        "context_sha256": "",
        "tools": "{}",
        "sampling_settings": "{}",
        "policy_version": number,
        "engine": "transformers",
        "completion_text": " 7" if right else " 0",
        "completion_tokens": [5, 6, 0] if right else [4, 4, 0],
        "completion_drawn": None,
        "tool_calls": [],
        "finish_reason": "end_token",
        "end_token_id": 0,
        "old_logprobs": [-1.0] * 3,
        "sampling_logprobs": None,
        "reward_raw": [("exact_answer", float(right)), ("answer_format", 1.0)],
        "reward_parts": [("exact_answer", '{"answer": "7"}' if right else '{"answer": "0"}')],
        "reward_weighted": [("exact_answer", float(right)), ("answer_format", 0.1)],
        "reward_steps": [("weighted_sum", 0.1 + right)],
        "reward": 0.1 + right,
        "unscored_reason": None,
    }


def metrics_rows() -> list[dict[str, Any]]:
    """What the record determines, by the definitions of the training, and losses and times beside it."""
    rollouts, updates = record_rows()
    decided = {row["rollout_id"]: row for row in updates}
    components = Method.of(CONFIG).components
    rows: list[dict[str, Any]] = []
    for number, groups in by_round(rollouts).items():
        row = {"round": number, **round_values(groups, decided, components)}
        row |= {"loss/gradient_norm": 3.0 - 0.4 * number, "loss/updates": 1.0}
        row |= {f"seconds/{name}": value * (1.0 + number) for name, value in SECONDS.items()}
        row |= {"loss/kl": 0.01 * number**2} if number else {}
        rows.append(row)
    for number, groups in by_round(validation_rows()).items():
        rows[number] |= validation_values(groups, components)
    return rows


def run_fields() -> dict[str, Any]:
    """What ``run.json`` holds."""
    return {
        "run_id": RUN_ID,
        "config": yaml.safe_dump(CONFIG),
        "policy_sha256": "trained" * 16,
        "base_policy_sha256": "base" * 16,
        "problems_sha256": {"heldout": "f" * 64, "train": "7" * 64, "validation": "a" * 64},
        "ledger": {
            "rounds": ROUNDS,
            "groups": 2 * ROUNDS,
            "groups_kept": ROUNDS + 1,
            "groups_skipped_flat": ROUNDS - 1,
            "rollouts": 2 * ROUNDS * GROUP_SIZE,
            "validation_rollouts": 4,
            "tokens_sampled": 3 * 2 * ROUNDS * GROUP_SIZE,
            "tokens_in_loss": 3 * (ROUNDS + 1) * GROUP_SIZE,
            "updates": ROUNDS,
        },
    }


@dataclass
class Experiment:
    """The parts of the small experiment, to be changed before they are written."""

    rollouts: list[dict[str, Any]]
    updates: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    run: dict[str, Any]


def experiment() -> Experiment:
    """A sound one."""
    return Experiment(*record_rows(), validation_rows(), metrics_rows(), run_fields())


def finished_run(parts: Experiment) -> FinishedRun:
    """The training of an experiment as it is read, without writing it."""
    columns = sorted({name for row in parts.metrics for name in row} - {"round"})
    rounds = tuple({name: str(value) for name, value in row.items()} for row in parts.metrics)
    config = yaml.safe_load(parts.run["config"])
    return FinishedRun(
        config=config,
        method=Method.of(config),
        run=parts.run,
        curves=Curves(("round", *columns), rounds),
        rollouts=parts.rollouts,
        validation=parts.validation,
        decisions=parts.updates,
    )


def write_experiment(
    folder: Path, base: Skill = base_skill, trained: Skill = trained_skill, parts: Experiment | None = None
) -> ReportSettings:
    """Write everything below ``folder``; give the settings of its report."""
    parts = parts or experiment()
    train = folder / "build" / "train"
    numbers, completions = folder / "report" / "evaluation", folder / "build" / "evaluation"
    numbers.mkdir(parents=True)
    (train / "policy").mkdir(parents=True)
    for name, skill in (("base", base), ("trained", trained)):
        text, parquet = evaluation_files(name, skill)
        (numbers / f"{name}.json").write_text(text)
        (completions / name).mkdir(parents=True)
        (completions / name / "completions.parquet").write_bytes(parquet)
    write_table(train / "record" / "rollouts", parts.rollouts, ROLLOUTS_SCHEMA)
    write_table(train / "record" / "updates", parts.updates, UPDATES_SCHEMA)
    write_table(train / "record" / "validation", parts.validation, ROLLOUTS_SCHEMA)
    with (train / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({name for row in parts.metrics for name in row}))
        writer.writeheader()
        writer.writerows(parts.metrics)
    (train / "policy" / "resolved_config.yaml").write_text(parts.run["config"])
    (train / "run.json").write_text(json.dumps(parts.run))
    return ReportSettings(train, numbers, completions, output=folder / "report")


def write_table(folder: Path, rows: Sequence[dict[str, Any]], schema: pa.Schema) -> None:
    """A file a round, as the training writes them."""
    folder.mkdir(parents=True)
    for number in sorted({row["round"] for row in rows}):
        part = [row for row in rows if row["round"] == number]
        pq.write_table(pa.Table.from_pylist(part, schema=schema), folder / f"round-{number:05d}-rank-0.parquet")
