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

from grpo.output_folders import require_writable
from grpo.rollouts.policies import LoadedPolicy, save_policy
from grpo.rollouts.policy_files import require_finite, require_replaceable
from grpo.run_identity import policy_digest, weights_digest
from grpo.training.run_loggers import METRICS_FILE

CHECKPOINTS = "checkpoints"
RECORD = "record"
POLICY = "policy"
RUN_FILE = "run.json"
# What a record may hold, so that another folder of that name is not deleted for one.
TABLES = frozenset({"rollouts", "updates", "validation"})


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
            self._forget_older(trainer)

    def _forget_older(self, trainer: L.Trainer) -> None:
        """Lightning spares the state that it resumed from: each interruption would leave one behind."""
        assert self.dirpath is not None
        folder, kept = Path(self.dirpath), Path(self.best_model_path).name
        if not (trainer.is_global_zero and kept and (folder / kept).exists()):
            return
        for state in folder.glob("update-*.ckpt"):
            if state.name != kept:
                trainer.strategy.remove_checkpoint(state)


def _validation_follows(trainer: L.Trainer, batch_idx: int) -> bool:
    every = trainer.val_check_batch
    problems = getattr(trainer, "datamodule", None)
    if not getattr(problems, "validation_groups", ()):  # Lightning passes over an empty validation without a word
        return False
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


def require_processes(checkpoint: Path, processes: int) -> None:
    """Refuse a state that DeepSpeed cut up for another number of processes; no other depends on it.

    Raises:
        ValueError: naming both numbers, and what to do.
    """
    saved = len(list(checkpoint.rglob("*_optim_states.pt"))) if checkpoint.is_dir() else 0
    if saved not in (0, processes):
        raise ValueError(
            f"trainer.devices (by trainer.num_nodes) makes {processes} processes, but {saved} wrote {checkpoint}, and "
            f"DeepSpeed's state goes on with as many: set {saved}; or begin a new run from its policy, with a fresh "
            f"optimizer: grpo export --checkpoint {checkpoint} --policy build/policy --output build/exported, then "
            "set data.policy to build/exported"
        )


def require_publishable(output: Path) -> None:
    """Refuse an output folder that a finished run could not be published to, or would have to delete something from.

    Raises:
        ValueError: naming what is in the way.
    """
    require_writable(output, "output")
    require_replaceable(output / POLICY, "output")
    record = output / RECORD
    if record.exists() and not (record.is_dir() and {path.name for path in record.iterdir()} <= TABLES):
        raise ValueError(f"output is {output}, where {RECORD} is no record of a run: name another folder, or move it")
    for name in (METRICS_FILE, RUN_FILE):
        if (output / name).is_dir():
            raise ValueError(f"output is {output}, where {name} is a folder: name another folder, or move it")


def publish(
    output: Path, run_folder: Path, policy: LoadedPolicy, identity: Mapping[str, Any], ledger: Mapping[str, int]
) -> None:
    """Move what a finished run made to the stage's output, and forget how to resume it.

    All of it is written aside first: where that fails, the output and the run's state stay as they were.

    Args:
        output: gets ``policy/``, ``record/``, ``metrics.csv`` and ``run.json``.
        run_folder: where the run kept its state.
        policy: the trained policy.
        identity: what the run was made of; ``config`` is its resolved configuration, YAML.
        ledger: what it spent.

    Raises:
        NonFiniteWeights: the policy's; nothing is published.
    """
    require_finite(policy.model, "the trained weights are not finite", "Nothing is published: lower the learning rate")
    aside = output / ".partial"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        _write_results(aside, run_folder, policy, identity, ledger)
        for name in (POLICY, RECORD, METRICS_FILE, RUN_FILE):
            if (output / name).is_dir():
                shutil.rmtree(output / name)
            os.replace(aside / name, output / name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(run_folder / CHECKPOINTS, ignore_errors=True)


def _write_results(
    folder: Path, run_folder: Path, policy: LoadedPolicy, identity: Mapping[str, Any], ledger: Mapping[str, int]
) -> None:
    save_policy(folder / POLICY, policy, identity, identity["config"])
    shutil.copytree(run_folder / RECORD, folder / RECORD)
    shutil.copyfile(run_folder / METRICS_FILE, folder / METRICS_FILE)
    digests = {"policy_sha256": policy_digest(folder / POLICY), "weights_sha256": weights_digest(folder / POLICY)}
    run = {**identity, "ledger": dict(ledger), **digests}
    (folder / RUN_FILE).write_text(json.dumps(run, indent=2, sort_keys=True) + "\n", encoding="utf-8")
