"""A small finished experiment on disk, made without a model: what the report reads."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from grpo.answer_metrics import IntervalSettings, summarise
from grpo.held_out_answers import HeldOutAnswer, answers_parquet
from grpo.report import ReportSettings
from grpo.training.rollout_log import ROLLOUTS_SCHEMA, UPDATES_SCHEMA

INTERVALS = IntervalSettings(resamples=200)
SLICES = {
    "sums_1digit": ("train", "trained_on", 12),
    "sums_2digit": ("train", "trained_on", 8),
    "sums_3digit": ("heldout_only", "other_setting", 6),
    "products": ("heldout_only", "other_task", 5),
}
ROUNDS, GROUP_SIZE = 4, 4

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


def record_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Two groups a round: one of sums_1digit, mixed, and one of sums_2digit, flat until the last round."""
    rollouts, updates = [], []
    for number in range(ROUNDS):
        for slice in ("sums_1digit", "sums_2digit"):
            mixed = slice == "sums_1digit" or number == ROUNDS - 1
            for member in range(GROUP_SIZE):
                right = mixed and member == 0
                name = f"{number}-{slice}-{member}"
                rollouts.append(_rollout_row(name, number, slice, member, right))
                updates.append(
                    {
                        "rollout_id": name,
                        "round": number,
                        "verdict": "kept" if mixed else "skipped_flat",
                        "verdict_reason": "",
                        "centred": 0.75 if right else -0.25 if mixed else 0.0,
                        "advantage": 1.732 if right else -0.577 if mixed else 0.0,
                        "reference_logprobs": None,
                        "reference_version": None,
                        "loss_tokens": 3 if mixed else 0,
                    }
                )
    return rollouts, updates


def _rollout_row(name: str, number: int, slice: str, member: int, right: bool) -> dict[str, Any]:
    return {
        "rollout_id": name,
        "run_id": "run",
        "group_id": f"{number}-{slice}",
        "round": number,
        "purpose": "train",
        "problem_id": f"{slice}-train-{number}",
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
        "reward_weighted": [("exact_answer", float(right)), ("answer_format", 0.1)],
        "reward_steps": [("weighted_sum", 0.1 + right)],
        "reward": 0.1 + right,
        "unscored_reason": None,
    }


def metrics_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number in range(ROUNDS):
        exact = 0.125 + 0.125 * (number == ROUNDS - 1)
        row = {
            "round": number,
            "reward/mean": exact + 0.1,
            "reward/exact_answer": exact,
            "reward/answer_format": 0.4 + 0.15 * number,
            "groups/mixed": 0.5 + 0.5 * (number == ROUNDS - 1),
            "groups/duplicates": 0.6 + 0.02 * number,
            "loss/gradient_norm": 3.0 - 0.4 * number,
            "length/mean": 6.5 - number,
            "length/truncated": 0.4 - 0.1 * number,
            "seconds/rollout": 1.234 + number,
        }
        if number:
            row["loss/kl"] = 0.01 * number**2
        if number % 2:
            row |= {"validation/reward/mean": 0.2 * number, "validation/reward/exact_answer": 0.15 * number}
        rows.append(row)
    return rows


def write_experiment(folder: Path, base: Skill = base_skill, trained: Skill = trained_skill) -> ReportSettings:
    """Write everything below ``folder``; give the settings of its report."""
    train = folder / "build" / "train"
    numbers, completions = folder / "report" / "evaluation", folder / "build" / "evaluation"
    for path in (train / "policy", train / "record" / "rollouts", train / "record" / "updates", numbers):
        path.mkdir(parents=True)
    for name, skill in (("base", base), ("trained", trained)):
        text, parquet = evaluation_files(name, skill)
        (numbers / f"{name}.json").write_text(text)
        (completions / name).mkdir(parents=True)
        (completions / name / "completions.parquet").write_bytes(parquet)
    for table, rows, schema in zip(
        ("rollouts", "updates"), record_rows(), (ROLLOUTS_SCHEMA, UPDATES_SCHEMA), strict=True
    ):
        for number in range(ROUNDS):
            part = [row for row in rows if row["round"] == number]
            path = train / "record" / table / f"round-{number:05d}-rank-0.parquet"
            pq.write_table(pa.Table.from_pylist(part, schema=schema), path)
    rows = metrics_rows()
    with (train / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({name for row in rows for name in row}))
        writer.writeheader()
        writer.writerows(rows)
    config = {
        "seed_everything": 1,
        "trainer": {"precision": "32-true", "devices": 1, "max_epochs": 1},
        "model": {
            "policy": "build/policy",
            "rewards": {
                "exact_answer": {"check": "grpo.rewards.exact_answer.exact_answer", "weight": 1.0},
                "answer_format": {"check": "grpo.rewards.answer_format.answer_format", "weight": 0.1},
            },
            "round": {"group_size": GROUP_SIZE, "flat_groups": "skip"},
            "loss": {"kl_beta": 0.04, "clip_high": None},
            "optimizer": {"betas": [0.9, 0.95]},
        },
        "data": {"problems": "build/problems", "groups_per_round": 2},
    }
    (train / "policy" / "resolved_config.yaml").write_text(yaml.safe_dump(config))
    run = {"run_id": "0123456789abcdef", "seconds": {"rollout": 9.87}, "ledger": {"update_steps": ROUNDS}}
    (train / "run.json").write_text(json.dumps(run))
    return ReportSettings(train, numbers, completions, output=folder / "report")
