"""The train stage: prompt groups in, a trained policy and its record out."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from grpo.run_identity import code_digest, code_revision, fingerprint, folder_digest, versions
from grpo.training.checkpoints import (
    CHECKPOINTS,
    RECORD,
    RoundCheckpoint,
    StreamingCheckpointIO,
    newest_checkpoint,
    publish,
)
from grpo.training.grpo_module import GRPOModule
from grpo.training.prompt_group_datamodule import PromptGroupDataModule
from grpo.training.rollout_log import RolloutLog
from grpo.training.run_loggers import WandbSettings, run_loggers

# What decides how a run goes on. An edit elsewhere, of the report say, must not orphan an interrupted run.
TRAINING_CODE = (
    "maths",
    "problem_files.py",
    "records.py",
    "rewards",
    "rollouts",
    "run_identity.py",
    "train.py",
    "training",
    "whole_files.py",
)


class TrainCLI(LightningCLI):
    """Lightning's own command line, with the run's folder named after what the run is made of."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--output", type=Path, default=Path("build/train"), help="the stage's output folder")
        parser.add_argument("--runs", type=Path, default=Path("runs"), help="resumable state, a folder a run")
        parser.add_argument("--checkpoint_every_n_updates", type=int, default=4, help="updates between saves, at least")
        parser.add_argument("--wandb", type=WandbSettings, default=WandbSettings())
        parser.set_defaults({"trainer.max_epochs": 1})
        parser.link_arguments("seed_everything", "model.seed")
        parser.link_arguments("seed_everything", "data.seed")
        parser.link_arguments("data.policy", "model.policy")
        parser.link_arguments("model.round.group_unit", "data.group_unit")
        parser.link_arguments("model.round.group_size", "data.group_size")

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        config = self.config
        if config.trainer.max_epochs != 1:
            raise ValueError(
                f"trainer.max_epochs is {config.trainer.max_epochs}: a run is one pass over its rounds; "
                "leave it at 1 and set data.rounds"
            )
        self.identity = {
            "config": self.parser.dump(config, skip_none=False),
            "data": folder_digest(Path(config.data.problems)),
            "policy": folder_digest(Path(config.data.policy)),
            "code": code_digest(TRAINING_CODE),
            "versions": versions(),
        }
        self.run_id = fingerprint(self.identity)
        self.run_folder = Path(config.runs) / self.run_id
        callbacks = [
            *(self.config_init.trainer.callbacks or []),
            RoundCheckpoint(self.run_folder / CHECKPOINTS, config.checkpoint_every_n_updates),
        ]
        loggers = run_loggers(self.run_folder, self.run_id, self.config_init.wandb)
        plugins = [*(self.config_init.trainer.plugins or []), StreamingCheckpointIO()]
        return super().instantiate_trainer(
            default_root_dir=self.run_folder, callbacks=callbacks, logger=loggers, plugins=plugins, **kwargs
        )

    def provenance(self) -> dict[str, Any]:
        """What the trained policy was made from: no times and no paths, so that equal runs say the same."""
        return self.identity | {
            "run_id": self.run_id,
            "code_revision": code_revision(),
            "threads": torch.get_num_threads(),
        }


# Each of these is what is wanted here; anything else that warns is news.
EXPECTED_WARNINGS = (
    r"Found \d+ module\(s\) in eval mode",  # the frozen reference
    r"Using ModelCheckpoint with manual optimization",  # the state after an update is the one to resume from
    r".*isinstance\(treespec, LeafSpec\)",  # Lightning's use of torch
    r"Checkpoint directory .* exists and is not empty",  # a run that goes on
    r"Total length of `RoundLoader` across ranks is zero",  # no validation problems were asked for
    r"\s+(By default only one JsonargparseDeprecationWarning|.*instantiator)",  # Lightning's use of jsonargparse
    r"LightningCLI's args parameter is intended",  # sys.argv stays whole: Lightning starts further processes with it
)


def main(argv: list[str]) -> None:
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)
    cli = TrainCLI(
        GRPOModule,
        PromptGroupDataModule,
        run=False,
        args=argv,
        save_config_callback=None,
        seed_everything_default=1,
        auto_configure_optimizers=False,  # a second place for the optimiser, which would win over model.optimizer
        parser_kwargs={"prog": "grpo train", "description": __doc__},
    )
    run = cli.run_folder
    checkpoint = newest_checkpoint(run)
    if checkpoint is None:
        shutil.rmtree(run / RECORD, ignore_errors=True)
    else:
        print(f"grpo train: going on from {checkpoint}")
    cli.model.rollout_log = RolloutLog(
        run / RECORD, cli.run_id, cli.trainer.global_rank, cli.model.components, cli.model.round.group_unit
    )
    # Deterministic mode fills new tensors before they are written: a pass over memory that nothing reads.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=checkpoint)
    if cli.model.ledger["rounds"] < cli.config.data.rounds:
        raise RuntimeError(
            f"training stopped after {cli.model.ledger['rounds']} of {cli.config.data.rounds} rounds: nothing is "
            f"published; run it again to go on from {run}"
        )
    if cli.trainer.is_global_zero:
        identity = cli.provenance()
        publish(Path(cli.config.output), run, cli.model.loaded, identity, dict(sorted(cli.model.ledger.items())))
