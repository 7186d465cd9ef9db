"""A finished run held against itself: sound runs have no complaint, and each thing that is changed is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures_rounds import LOWER_CASE, Run
from report_inputs import CONFIG, Experiment, experiment, finished_run

from grpo.records import Problem, Score
from grpo.reporting.curves import read_curves
from grpo.reporting.files import read_folder
from grpo.reporting.finished_run import ROLLOUT_COLUMNS, UPDATE_COLUMNS, FinishedRun, Method
from grpo.reporting.reconciliation import complaints, same
from grpo.rewards import RewardComponent
from grpo.rollouts.reward_transform import RewardTransform
from grpo.rollouts.sampling import SamplingSettings
from grpo.training.settings import AdvantageSettings, LossSettings, RoundSettings

Change = Callable[[Experiment], Any]


def put(table: str, place: int, **fields: Any) -> Change:
    """Set fields of one row."""
    return lambda parts: getattr(parts, table)[place].update(fields)


def drop(table: str, place: int) -> Change:
    return lambda parts: getattr(parts, table).pop(place)


def repeat(table: str, place: int) -> Change:
    return lambda parts: getattr(parts, table).append(dict(getattr(parts, table)[place]))


def count(**counts: int) -> Change:
    return lambda parts: parts.run["ledger"].update(counts)


def configure(section: str, **settings: Any) -> Change:
    """Declare another method than the one that ran."""

    def change(parts: Experiment) -> None:
        config = yaml.safe_load(parts.run["config"])
        node = config
        for name in filter(None, section.split(".")):
            node = node[name]
        node.update(settings)
        parts.run["config"] = yaml.safe_dump(config)

    return change


# Row 0 of round 0 is the one right rollout of a mixed group; rows 4 to 7 are a flat group.
CHANGES: dict[str, tuple[Change, str]] = {
    "a round of the metrics is gone": (drop("metrics", 1), "data.rounds is 4, the rounds of metrics.csv are 0, 2, 3"),
    "the mean reward": (put("metrics", 1, **{"reward/mean": 0.3}), "reward/mean of round 1 is 0.3, the record gives 0"),
    "a component's curve": (put("metrics", 2, **{"reward/exact_answer": 1.0}), "reward/exact_answer of round 2 is 1.0"),
    "the mixed share": (put("metrics", 0, **{"groups/mixed": 1.0}), "groups/mixed of round 0 is 1.0, the record"),
    "groups in the update": (put("metrics", 0, **{"groups/in_update": 2}), "groups/in_update of round 0 is 2.0"),
    "a length": (put("metrics", 3, **{"length/mean": 2.0}), "length/mean of round 3 is 2.0, the record gives 3.0"),
    "the cut share": (put("metrics", 3, **{"length/truncated": 0.5}), "length/truncated of round 3 is 0.5"),
    "tokens": (put("metrics", 3, **{"tokens/sampled": 1}), "tokens/sampled of round 3 is 1.0"),
    "a slice's curve": (
        put("metrics", 0, **{"slice/sums_1digit/reward/mean": 1.0}),
        "slice/sums_1digit/reward/mean of round 0 is 1.0",
    ),
    "where the signal came from": (
        put("metrics", 0, **{"advantage/largest_problem": 0.1}),
        "advantage/largest_problem of round 0 is 0.1",
    ),
    "validation": (put("metrics", 1, **{"validation/reward/mean": 1.1}), "validation/reward/mean of round 1 is 1.1"),
    "validation that was not": (
        put("metrics", 0, **{"validation/reward/mean": 1.1}),
        "validation/reward/mean of round 0 is 1.1, the record gives None",
    ),
    "a round of the record is gone": (
        lambda parts: parts.rollouts.__setitem__(slice(0, 8), []) or parts.updates.__setitem__(slice(0, 8), []),
        "data.rounds is 4, the rounds of the record are 1, 2, 3",
    ),
    "a group is gone": (
        lambda parts: parts.rollouts.__setitem__(slice(0, 4), []) or parts.updates.__setitem__(slice(0, 4), []),
        "round 0 has 1 groups, data.groups_per_round is 2",
    ),
    "a member is gone": (
        lambda parts: (parts.rollouts.pop(1), parts.updates.pop(1)),
        "draw 0 of problem sums_1digit-train-0 in round 0 has 3 members, not 4",
    ),
    "a group's members": (put("rollouts", 0, group_id="x"), "in round 0 has members of several group ids"),
    "a rollout twice": (repeat("rollouts", 0), "1 rollouts stand in the record twice"),
    "a decision twice": (repeat("updates", 0), "1 rollouts have two decisions"),
    "a decision less": (drop("updates", 0), "1 rollouts have no decision"),
    "a rollout less": (drop("rollouts", 0), "1 decisions are of rollouts that were not recorded"),
    "another run's row": (put("rollouts", 0, run_id="x"), "1 rollouts are of another run"),
    "a key": (put("rollouts", 0, problem_id="other"), "1 rollouts do not have the id of their key"),
    "a seed": (configure("", seed_everything=5), "36 rollouts do not have the id"),
    "a raw score": (
        put("rollouts", 0, reward_raw=[("exact_answer", 0.5), ("answer_format", 1.0)]),
        "1 rollouts have another weighted score than weight times raw",
    ),
    "a weight": (
        configure("model.rewards.answer_format", weight=0.2),
        "36 rollouts have another weighted score than weight times raw",
    ),
    "a component": (
        put("rollouts", 0, reward_raw=[("exact_answer", 1.0)]),
        "1 rollouts have other scores than answer_format, exact_answer, first",
    ),
    "a component of a validation": (
        put("validation", 0, reward_raw=[("exact_answer", 1.0), ("other", 1.0)]),
        "1 rollouts have other scores than answer_format, exact_answer, first",
    ),
    "a step": (
        put("rollouts", 0, reward_steps=[("weighted_sum", 1.2)]),
        "1 rollouts have other reward_steps than their scores give",
    ),
    "a transform": (
        configure("model.reward_transform", clip=[0.0, 1.0]),
        "36 rollouts have other reward_steps than their scores give",
    ),
    "a reward": (put("rollouts", 0, reward=1.0), "1 rollouts have another reward than their reward_steps come to"),
    "a reward that is none": (put("rollouts", 0, reward=None), "1 rollouts have another reward than their"),
    "the rewards of a whole round": (
        lambda parts: [row.update(reward=1.1) for row in parts.rollouts[:8]],
        "7 rollouts have another reward than their reward_steps come to",
    ),
    "a reward that is no number": (put("rollouts", 0, reward=float("nan")), "have a score that is no finite number"),
    "an advantage": (
        put("updates", 0, advantage=1.7320508),
        "has advantage 1.7320508, its group's rewards give 1.73205",
    ),
    "an advantage that is gone": (put("updates", 0, advantage=None), "has advantage None"),
    "an advantage that is no number": (put("updates", 0, advantage=float("inf")), "1 decisions hold a value"),
    "a centred reward": (put("updates", 0, centred=0.7), "has centred 0.7, its group's rewards give 0.75"),
    "an epsilon": (configure("model.advantages", epsilon=1e-4), "decisions do not follow from the rewards"),
    "a scale": (configure("model.advantages", scale="none"), "decisions do not follow from the rewards"),
    "a verdict": (
        lambda parts: [row.update(verdict="kept") for row in parts.updates[4:8]],
        "draw 0 of problem sums_2digit-train-0 in round 0 is kept, its rewards make it skipped_flat",
    ),
    "what becomes of flat groups": (configure("model.round", flat_groups="keep"), "its rewards make it kept_flat"),
    "a fresh draw that never was": (configure("model.round", flat_groups="resample"), "rewards make it resampled"),
    "tokens of a group that was left out": (
        put("updates", 4, loss_tokens=3),
        "1 rollouts have other loss_tokens than their verdict and ending give",
    ),
    "tokens that were not in the loss": (put("updates", 0, loss_tokens=2), "1 rollouts have other loss_tokens"),
    "rounds declared": (configure("data", rounds=5), "data.rounds is 5, the rounds of the record are 0, 1, 2, 3"),
    "groups declared": (configure("data", groups_per_round=3), "round 0 has 2 groups, data.groups_per_round is 3"),
    **{
        f"the ledger's {name}": (count(**{name: 1}), f"the ledger counts 1 {name.replace('_', ' ')}, the record holds")
        for name in ("rounds", "groups", "rollouts", "tokens_sampled", "tokens_in_loss", "updates", "groups_kept")
    },
    "a verdict that only the ledger has": (count(groups_kept_flat=1), "counts 1 groups kept flat, the record holds 0"),
    "a ledger without a count": (lambda parts: parts.run["ledger"].pop("validation_rollouts"), "0 validation rollouts"),
}


def test_a_sound_run_has_no_complaint() -> None:
    assert complaints(finished_run(experiment())) == []


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_is_found(name: str) -> None:
    change, complaint = CHANGES[name]
    parts = experiment()
    change(parts)
    found = complaints(finished_run(parts))
    assert complaint in "; ".join(found)


def test_rounding_is_no_disagreement() -> None:
    parts = experiment()
    parts.updates[0]["advantage"] += 1e-12
    parts.metrics[0]["reward/mean"] += 1e-13
    assert complaints(finished_run(parts)) == []
    assert same(None, None)
    assert not same(None, 0.0)
    assert same(1e12, 1e12 + 1)
    assert not same(1.0, 1.0 + 1e-8)


def sometimes(_problem: Problem, completion: str) -> Score:
    """Fails on some completions, has nothing to say of others, and likes short ones."""
    length = len(completion)
    if length % 5 == 0:
        return Score.unscorable("a length that it cannot judge")
    return Score.not_applicable("not of this length") if length % 5 == 1 else Score(1.0 / (1 + length))


def finished(run: Run, rounds: int, groups: int) -> FinishedRun:
    """A real run as the report reads it; its settings stand in the module instead of in a file."""
    module = run.module
    advantages, settings = asdict(module.advantage_settings), module.round
    method = Method(
        seed=module.seed,
        rounds=rounds,
        groups_per_round=groups,
        group_size=settings.group_size,
        flat_groups=settings.flat_groups,
        max_draws=settings.max_draws,
        at_limit=settings.at_limit,
        components=module.components,
        transform=module.reward_transform,
        advantages=advantages,
        mask_truncated=module.loss_settings.mask_truncated,
    )
    (metrics,) = run.folder.rglob("metrics.csv")
    fields = {"run_id": "run", "ledger": dict(module.ledger)}
    return FinishedRun(
        CONFIG,
        method,
        fields,
        read_curves(metrics),
        *(read_folder(run.folder / "record" / table, "train", columns) for table, columns in TABLES.items()),
    )


TABLES = {"rollouts": ROLLOUT_COLUMNS, "validation": ROLLOUT_COLUMNS, "updates": UPDATE_COLUMNS}
WAYS: dict[str, dict[str, Any]] = {
    "skip": {},
    "resample": {"round": RoundSettings(group_size=2, flat_groups="resample", max_draws=3, at_limit="keep")},
    "one threshold for all": {
        "round": RoundSettings(group_size=4, flat_groups="keep"),
        "advantages": AdvantageSettings(baseline="batch_mean", scale="batch_std", std_correction=1, epsilon=0.1),
    },
    "unscored, transformed and masked": {
        "rewards": {**LOWER_CASE, "sometimes": RewardComponent(sometimes, 0.5)},
        "round": RoundSettings(group_size=4, max_failure_share=1.0),
        "reward_transform": RewardTransform(clip=(0.1, 0.6), length_penalty=0.5, max_length=6, length_zone=3),
        "loss": LossSettings(mask_truncated=True),
    },
    "several updates": {
        "round": RoundSettings(group_size=4, epochs=2, minibatches=2),
        "sampling": SamplingSettings(max_new_tokens=4, top_k=5),
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_a_real_run_has_no_complaint(tmp_path: Path, way: str) -> None:
    run = finished(Run(tmp_path / "run", rounds=3, groups=4, **WAYS[way]).go(), rounds=3, groups=4)
    assert complaints(run) == []
    # What makes these two ways hard must have happened.
    assert any(row["draw"] for row in run.rollouts) == (way == "resample")
    assert any(row["reward"] is None for row in run.rollouts) == way.startswith("unscored")
