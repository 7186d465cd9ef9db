"""What a finished training left: its record, its metrics, its ledger, and the method it declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.records import Problem, Score
from grpo.reporting.curves import Curves, read_curves
from grpo.reporting.files import ReportError, read_folder, read_json, read_text, read_yaml, refuse_damaged
from grpo.rewards import RewardComponent
from grpo.rollouts.flat_groups import AtLimit, FlatGroups
from grpo.rollouts.reward_transform import RewardTransform
from grpo.run_identity import CONFIG_FILE

Row = Mapping[str, Any]

STAGE = "train"
ROLLOUT_COLUMNS = (
    "rollout_id",
    "run_id",
    "group_id",
    "round",
    "purpose",
    "problem_id",
    "slice",
    "template_id",
    "prompt_text",
    "occurrence",
    "member",
    "draw",
    "tools",
    "completion_text",
    "completion_tokens",
    "completion_drawn",
    "tool_calls",
    "finish_reason",
    "reward_raw",
    "reward_parts",
    "reward_weighted",
    "reward_steps",
    "reward",
    "unscored_reason",
)
UPDATE_COLUMNS = ("rollout_id", "round", "verdict", "centred", "advantage", "loss_tokens")
RUN_FIELDS = ("run_id", "config", "ledger", "policy_sha256", "base_policy_sha256", "problems_sha256")


@dataclass(frozen=True)
class Method:
    """What the resolved configuration says of how rewards, groups and advantages are made.

    Args:
        components: the reward's, for their weights: their checks are not called again.
        advantages: the options of ``group_advantages``.
    """

    seed: int
    rounds: int
    groups_per_round: int
    group_size: int
    flat_groups: FlatGroups
    max_draws: int
    at_limit: AtLimit
    components: Mapping[str, RewardComponent]
    transform: RewardTransform
    advantages: Mapping[str, Any]
    mask_truncated: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Method:
        """The method of a resolved configuration, which holds every field, defaults too.

        Raises:
            ReportError: it lacks a field, or holds one that is not known here: another version wrote it.
        """
        try:
            model, data = config["model"], config["data"]
            groups = {name: model["round"][name] for name in ("group_size", "flat_groups", "max_draws", "at_limit")}
            return cls(
                seed=config["seed_everything"],
                rounds=data["rounds"],
                groups_per_round=data["groups_per_round"],
                components={
                    name: RewardComponent(_not_called, one["weight"]) for name, one in model["rewards"].items()
                },
                transform=RewardTransform(**model["reward_transform"]),
                advantages=dict(model["advantages"]),
                mask_truncated=model["loss"]["mask_truncated"],
                **groups,
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ReportError(
                f"the run's configuration cannot be read ({type(error).__name__}: {error}): another version of the "
                f"code wrote it, so run the stage {STAGE} again"
            ) from error


@dataclass(frozen=True)
class FinishedRun:
    """A finished training.

    Args:
        config: the resolved configuration.
        method: what it says of the method.
        run: the fields of ``run.json``.
        curves: its metrics by round.
        rollouts: rows of the record's first table.
        validation: rows of the same form, of the rollouts on the validation split; may be empty.
        decisions: rows of the record's second table.
    """

    config: Mapping[str, Any]
    method: Method
    run: Mapping[str, Any]
    curves: Curves
    rollouts: Sequence[Row]
    validation: Sequence[Row]
    decisions: Sequence[Row]

    @property
    def ledger(self) -> Mapping[str, int]:
        """What the run counted as it went."""
        ledger: Mapping[str, int] = self.run["ledger"]
        return ledger

    @property
    def updates(self) -> dict[str, Row]:
        """The decisions by rollout id."""
        return {row["rollout_id"]: row for row in self.decisions}


def run_files(folder: Path) -> dict[Path, str]:
    """What must be there of a finished run, and the stage that makes it."""
    names = (f"policy/{CONFIG_FILE}", "run.json", "metrics.csv", "record/rollouts", "record/updates")
    return {folder / name: STAGE for name in names}


def read_run(folder: Path) -> FinishedRun:
    """Read the train stage's output folder.

    Raises:
        ReportError: a file is damaged, or of another run than its neighbour.
    """
    record = folder / "record"
    run = read_json(folder / "run.json", STAGE, RUN_FIELDS)
    _check_run(folder / "run.json", run)
    path = folder / "policy" / CONFIG_FILE
    if read_text(path, STAGE) != run["config"]:
        refuse_damaged(path, STAGE, f"it is not the configuration that {folder / 'run.json'} holds")
    config = read_yaml(path, STAGE, ("seed_everything", "model", "data"))
    validation = record / "validation"
    return FinishedRun(
        config=config,
        method=Method.of(config),
        run=run,
        curves=read_curves(folder / "metrics.csv"),
        rollouts=read_folder(record / "rollouts", STAGE, ROLLOUT_COLUMNS),
        validation=read_folder(validation, STAGE, ROLLOUT_COLUMNS) if validation.exists() else [],
        decisions=read_folder(record / "updates", STAGE, UPDATE_COLUMNS),
    )


def drawn_tokens(row: Row) -> int:
    """Tokens of a rollout, without those that a tool inserted."""
    drawn = row["completion_drawn"]
    return len(row["completion_tokens"]) if drawn is None else sum(drawn)


def _check_run(path: Path, run: Mapping[str, Any]) -> None:
    for name in ("ledger", "problems_sha256"):
        if not isinstance(run[name], dict):
            refuse_damaged(path, STAGE, f"{name} does not hold named fields")
    if not all(type(count) is int for count in run["ledger"].values()):
        refuse_damaged(path, STAGE, "the ledger holds something that is not a count")


def _not_called(_problem: Problem, _completion: str) -> Score:
    raise AssertionError("the record is worked out again from its scores, never from its texts")
