"""Interrupted runs go on, finished runs leave a policy folder."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from grpo.rollouts.policies import LoadedPolicy, save_policy
from grpo.training.run_loggers import METRICS_FILE

CHECKPOINTS = "checkpoints"
RECORD = "record"


def round_checkpoint(run_folder: Path, every_n_updates: int) -> ModelCheckpoint:
    """Keeps the newest resumable state of a run, and it alone."""
    return ModelCheckpoint(
        dirpath=run_folder / CHECKPOINTS,
        filename="update-{step}",
        auto_insert_metric_name=False,
        every_n_train_steps=every_n_updates,
        save_top_k=1,
        enable_version_counter=False,
    )


def newest_checkpoint(run_folder: Path) -> Path | None:
    """The state to go on from, or None where the run has not come so far."""

    def updates(path: Path) -> int:
        found = re.search(r"update-(\d+)", path.name)
        return int(found.group(1)) if found else -1

    return max((run_folder / CHECKPOINTS).glob("update-*.ckpt"), key=updates, default=None)


def publish(
    output: Path, run_folder: Path, policy: LoadedPolicy, identity: Mapping[str, Any], ledger: Mapping[str, int]
) -> None:
    """Move what a finished run made to the stage's output, and forget how to resume it.

    Args:
        output: gets ``policy/``, ``record/``, ``metrics.csv`` and ``run.json``.
        run_folder: where the run kept its state.
        policy: the trained policy.
        identity: what the run was made of; ``config`` is its resolved configuration, YAML.
        ledger: what it spent.
    """
    save_policy(output / "policy", policy, identity, identity["config"])
    record_aside = output / f".{RECORD}.partial"
    shutil.rmtree(record_aside, ignore_errors=True)
    shutil.copytree(run_folder / RECORD, record_aside)
    shutil.rmtree(output / RECORD, ignore_errors=True)
    os.replace(record_aside, output / RECORD)
    shutil.copyfile(run_folder / METRICS_FILE, output / METRICS_FILE)
    aside = output / "run.json.partial"
    aside.write_text(json.dumps({**identity, "ledger": ledger}, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(aside, output / "run.json")
    shutil.rmtree(run_folder / CHECKPOINTS, ignore_errors=True)
