"""Where the metrics of a round go: a CSV file always, a line on standard output where that is a file, and W&B."""

from __future__ import annotations

import csv
import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

METRICS_FILE = "metrics.csv"

# What a line of a log file says of a round.
IN_A_LINE = {
    "reward": "reward/mean",
    "mixed": "groups/mixed",
    "kl": "loss/kl",
    "validation reward": "validation/reward/mean",
    "seconds": "seconds/round",
}


@dataclass(frozen=True)
class WandbSettings:
    """Weights & Biases.

    Args:
        mode: ``offline`` writes a run that ``wandb sync`` can send later; ``online`` sends it at once and needs a
            login; ``disabled`` writes none. The environment's WANDB_MODE wins.
        project: where the run belongs.
        group: runs to be seen together, such as the seeds of one setting.
    """

    mode: Literal["offline", "online", "disabled"] = "offline"
    project: str = "grpo"
    group: str | None = None


class RoundLogger(Logger):
    """A logger of rounds, of which a run has one version and whose settings stand elsewhere."""

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """The configuration stands in ``run.json``."""


class RoundCSVLogger(RoundLogger):
    """One row a round in ``metrics.csv``, whole after every round.

    Lightning's own CSV logger starts its file anew when a run is resumed. This one keeps the rounds
    before the resumed one and replaces those after it, so that each round stands there once.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / METRICS_FILE
        self.rows: dict[int, dict[str, Any]] = {}
        if self.path.is_file():
            with self.path.open(newline="") as file:
                self.rows = {int(row["round"]): dict(row) for row in csv.DictReader(file)}

    @property
    def name(self) -> str:
        return "csv"

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add to the row of round ``step``; rows of later rounds belong to a run that was rewound."""
        if step is None:
            raise ValueError("step is None: metrics are logged under their round")
        self.rows = {number: row for number, row in self.rows.items() if number <= step}
        row = self.rows.setdefault(step, {"round": step})
        if row.keys() & metrics.keys():  # the round is run again: nothing of its earlier row may stay
            row.clear()
        row.update({"round": step, **metrics})
        columns = sorted({name for row in self.rows.values() for name in row} - {"round"})
        aside = self.path.with_suffix(".partial")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["round", *columns])
            writer.writeheader()
            writer.writerows(self.rows.values())
        os.replace(aside, self.path)


class RoundLineLogger(RoundLogger):
    """A line a round on standard output, for a log file: no progress bar shows there."""

    @property
    def name(self) -> str:
        return "lines"

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        values = [f"{label} {metrics[name]:.3g}" for label, name in IN_A_LINE.items() if name in metrics]
        print(f"round {step}: {', '.join(values)}", flush=True)


def run_loggers(folder: Path, run_id: str, wandb: WandbSettings) -> list[Logger]:
    """The loggers of a run, new for each run: none keeps a handle of an earlier one."""
    mode = os.environ.get("WANDB_MODE") or wandb.mode
    loggers: list[Logger] = [RoundCSVLogger(folder)]
    if not sys.stdout.isatty():
        loggers.append(RoundLineLogger())
    if mode != "disabled":
        offline = mode in ("offline", "dryrun")  # the second is W&B's older word, which Lightning sets by itself
        folder.mkdir(parents=True, exist_ok=True)
        loggers.append(
            WandbLogger(
                project=wandb.project,
                group=wandb.group,
                save_dir=folder,
                id=run_id,
                name=run_id,
                offline=offline,
                resume=None if offline else "allow",
            )
        )
    return loggers
