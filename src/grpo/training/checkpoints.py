"""Interrupted runs go on, finished runs leave a policy folder."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from grpo.rollouts.policies import LoadedPolicy, save_policy
from grpo.run_identity import weights_digest
from grpo.training.run_loggers import METRICS_FILE

CHECKPOINTS = "checkpoints"
RECORD = "record"


class RoundCheckpoint(ModelCheckpoint):
    """Saves after a round is wholly done: where a validation follows the round, after the validation.

    A state saved between the two would be resumed as if the validation had been. A round can make several
    updates, or none, so that their number need not meet a multiple of any other: what counts is how many were
    made since the last save.

    Args:
        folder: keeps the newest state, and it alone.
        every_n_updates: the least number of updates between two saves.
    """

    def __init__(self, folder: Path, every_n_updates: int) -> None:
        if every_n_updates < 1:
            raise ValueError(f"checkpoint_every_n_updates is {every_n_updates}: it must be at least 1")
        super().__init__(
            dirpath=folder,
            filename="update-{step}",
            auto_insert_metric_name=False,
            every_n_train_steps=1,
            save_top_k=1,
            enable_version_counter=False,
        )
        self.every_n_updates = every_n_updates
        self.saved_at = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.saved_at = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not _validation_follows(trainer, batch_idx):
            self._round_is_done(trainer, pl_module, batch_idx)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._round_is_done(trainer, pl_module, trainer.fit_loop.epoch_loop.batch_idx)

    def _round_is_done(self, trainer: L.Trainer, pl_module: L.LightningModule, batch_idx: int) -> None:
        if trainer.global_step - self.saved_at >= self.every_n_updates:
            super().on_train_batch_end(trainer, pl_module, None, None, batch_idx)
            self.saved_at = trainer.global_step


def _validation_follows(trainer: L.Trainer, batch_idx: int) -> bool:
    every = trainer.val_check_batch
    return bool(trainer.enable_validation) and every not in (None, float("inf")) and (batch_idx + 1) % every == 0


class StreamingCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint straight to its file, aside, and moves it in.

    Lightning's own makes it whole in memory first: for a policy with AdamW three times its weights, on top
    of what trains.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".partial")
        torch.save(checkpoint, aside)
        os.replace(aside, path)


def newest_checkpoint(run_folder: Path) -> Path | None:
    """The newest whole state to go on from, or None where the run has not come so far."""

    def updates(path: Path) -> int:
        found = re.search(r"update-(\d+)", path.name)
        return int(found.group(1)) if found else -1

    whole = filter(_is_whole, (run_folder / CHECKPOINTS).glob("update-*.ckpt"))
    return max(whole, key=updates, default=None)


def _is_whole(checkpoint: Path) -> bool:
    """A file was moved in when it was whole. DeepSpeed fills a folder, and writes ``latest`` into it last."""
    return checkpoint.is_file() or (checkpoint / "latest").is_file()


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
    run = {**identity, "ledger": dict(ledger), "weights_sha256": weights_digest(output / "policy")}
    aside = output / "run.json.partial"
    aside.write_text(json.dumps(run, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(aside, output / "run.json")
    shutil.rmtree(run_folder / CHECKPOINTS, ignore_errors=True)
