"""The train stage: prompt groups in, a trained policy and its record out."""

from __future__ import annotations

import json
import re
import shutil
import sys
import warnings
from argparse import ArgumentError
from contextlib import closing, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import SIGTERMException

from grpo.output_folders import require_writable
from grpo.problem_files import read_problems
from grpo.rewards.self_check import self_check
from grpo.run_identity import (
    SOURCE,
    code_digest,
    code_revision,
    fingerprint,
    folder_digest,
    policy_digest,
    problems_digests,
    versions,
)
from grpo.training.checkpoints import (
    CHECKPOINTS,
    RECORD,
    RoundCheckpoint,
    StreamingCheckpointIO,
    newest_checkpoint,
    publish,
    require_processes,
    require_publishable,
)
from grpo.training.grpo_module import GRPOModule
from grpo.training.named_code import named_code
from grpo.training.processes import EndsTogether, others_needed, require_patience, wait_at_most
from grpo.training.prompt_group_datamodule import PromptGroupDataModule
from grpo.training.rollout_log import RolloutLog
from grpo.training.run_folder import only_trainer, rounds_without_update
from grpo.training.run_loggers import WandbSettings, run_loggers
from grpo.training.run_options import refuse_options

# What decides how a run goes on. An edit elsewhere, of the report say, must not orphan an interrupted run.
TRAINING_CODE = (
    "maths",
    "output_folders.py",
    "problem_files.py",
    "records.py",
    "rewards",
    "rollouts",
    "run_identity.py",
    "train.py",
    "training",
    "whole_files.py",
)


class UnfinishedRun(RuntimeError):
    """Training was stopped before its last round; nothing is published, and the run can go on."""

    exit_status = 75  # a temporary failure, in the words of sysexits.h: schedulers can be told to start it again


class TrainCLI(LightningCLI):
    """Lightning's own command line, with the run's folder named after what the run is made of."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--output", type=Path, default=Path("build/train"), help="the stage's output folder")
        parser.add_argument("--runs", type=Path, default=Path("runs"), help="resumable state, a folder a run")
        parser.add_argument("--checkpoint_every_n_updates", type=int, default=4, help="updates between saves, at least")
        parser.add_argument(
            "--longest_wait_minutes",
            type=float,
            default=30.0,
            help="how long a process waits for the others, which may still sample or reward, or for a server to sample",
        )
        parser.add_argument("--wandb", type=WandbSettings, default=WandbSettings())
        parser.set_defaults({"trainer.max_epochs": 1, "trainer.num_sanity_val_steps": 0})
        parser.link_arguments("seed_everything", "model.seed")
        parser.link_arguments("seed_everything", "data.seed")
        parser.link_arguments("data.policy", "model.policy")
        parser.link_arguments("model.round.group_unit", "data.group_unit")
        parser.link_arguments("model.round.group_size", "data.group_size")
        parser.link_arguments("model.round.split_groups", "data.split_groups")
        parser.link_arguments("model.sampling.max_new_tokens", "data.max_new_tokens")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, and refuse what could not be trained, kept or published, before anything is made."""
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:  # the parser's own way out prints every option there is first
            raise ValueError(_in_one_line(error)) from error
        refuse_options(self.config, parser.get_defaults())
        require_writable(Path(self.config.runs), "runs")
        require_publishable(Path(self.config.output))

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        config = self.config
        resolved = self.parser.dump(config, skip_none=False)
        self.identity = {
            "config": resolved,
            "data": folder_digest(Path(config.data.problems)),
            "policy": folder_digest(Path(config.data.policy)),
            "code": code_digest(TRAINING_CODE),
            "named_code": named_code(resolved, [SOURCE / name for name in TRAINING_CODE]),
            "versions": versions(),
        }
        if config.model.adapter is not None:
            start = config.model.adapter.start
            self.identity["adapter"] = {
                "start": None if start is None else folder_digest(Path(start)),
                "peft": version("peft"),
            }
        self.run_id = fingerprint(self.identity | {"config": _what_moves_numbers(resolved)})
        # By these an evaluation is told to be of this run's policies and problems.
        self.evaluable = {
            "base_policy_sha256": policy_digest(Path(config.data.policy)),
            "problems_sha256": problems_digests(Path(config.data.problems)),
        }
        self.run_folder = Path(config.runs) / self.run_id
        callbacks = [
            *(self.config_init.trainer.callbacks or []),
            EndsTogether(),
            RoundCheckpoint(self.run_folder / CHECKPOINTS, config.checkpoint_every_n_updates),
        ]
        loggers = run_loggers(self.run_folder, self.run_id, self.config_init.wandb)
        plugins = [*(self.config_init.trainer.plugins or []), StreamingCheckpointIO()]
        trainer: L.Trainer = super().instantiate_trainer(
            default_root_dir=self.run_folder, callbacks=callbacks, logger=loggers, plugins=plugins, **kwargs
        )
        wait_at_most(trainer, config.longest_wait_minutes)
        return trainer

    def provenance(self) -> dict[str, Any]:
        """What the trained policy was made from: no times and no paths, so that equal runs say the same."""
        machine = {"code_revision": code_revision(), "threads": torch.get_num_threads()}
        return self.identity | self.evaluable | {"run_id": self.run_id} | machine


def _what_moves_numbers(resolved: str) -> dict[str, Any]:
    """The configuration without what changes no number: how many processes share the work, how long one waits for
    another, and where a server stands.
    """
    config: dict[str, Any] = yaml.safe_load(resolved)
    del config["longest_wait_minutes"], config["model"]["engine"]["address"]
    sizes = ("devices", "num_nodes")
    return config | {"trainer": {key: value for key, value in config["trainer"].items() if key not in sizes}}


def _in_one_line(error: ArgumentError) -> str:
    text = " ".join(str(error).split())
    # A section that is null loses the keys that other settings are linked to.
    lost = re.fullmatch(r'Key "(.+)\.\w+" not found in namespace\.', text)
    return text if lost is None else f"{lost[1]} is null: give its settings, or leave the key out for the defaults"


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
    """Train, or go on with what was interrupted; publish the policy and its record at the end."""
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
        parser_kwargs={"prog": "grpo train", "description": __doc__, "exit_on_error": False},
    )
    require_patience(cli.trainer, cli.config.longest_wait_minutes, cli.model.components)
    with only_trainer(cli.run_folder) if cli.trainer.is_global_zero else nullcontext():
        _prove_rewards(cli)
        _train(cli)
        if cli.trainer.is_global_zero:
            _publish(cli)


def _prove_rewards(cli: TrainCLI) -> None:
    """On some problems, as *prepare* did on all of them: the rewards may be others since."""
    folder = Path(cli.config.data.problems)
    complaints = self_check(
        cli.model.components,
        read_problems(folder / "train.jsonl"),
        answer_template=_proved_template(folder),
        workers=cli.model.round.reward_workers,
    )
    if complaints:
        raise ValueError(f"the rewards misjudge known answers ({len(complaints)}), first {complaints[0]}")


def _proved_template(folder: Path) -> str:
    """How *prepare* made a completion of an answer; where the problems come from elsewhere, the answer alone."""
    summary = folder / "summary.json"
    settings = json.loads(summary.read_text(encoding="utf-8"))["settings"] if summary.is_file() else {}
    return str(settings.get("answer_template", "{answer}"))


def _train(cli: TrainCLI) -> None:
    run = cli.run_folder
    processes = cli.trainer.num_devices * cli.trainer.num_nodes
    checkpoint = newest_checkpoint(run)
    if checkpoint is None:
        shutil.rmtree(run / RECORD, ignore_errors=True)
    else:
        require_processes(checkpoint, processes)
        print(f"grpo train: going on from {checkpoint}")
    cli.model.rollout_log = RolloutLog(
        run / RECORD, cli.run_id, cli.trainer.global_rank, cli.model.components, cli.model.round.group_unit
    )
    cli.model.longest_wait_minutes = cli.config.longest_wait_minutes
    # Deterministic mode fills new tensors before they are written: a pass over memory that nothing reads.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # Lightning leaves by a SystemExit of status 0 then, which a scheduler would take for the end of the work.
    with closing(cli.model), suppress(SIGTERMException), others_needed(cli.config.longest_wait_minutes, processes):
        cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=checkpoint)
    if cli.model.ledger["rounds"] < cli.config.data.rounds:
        raise UnfinishedRun(
            f"training stopped after {cli.model.ledger['rounds']} of {cli.config.data.rounds} rounds: nothing is "
            f"published; run it again to go on from {run}"
        )


def _publish(cli: TrainCLI) -> None:
    ledger = dict(sorted(cli.model.ledger.items()))
    publish(Path(cli.config.output), cli.run_folder, cli.model.trained_policy(), cli.provenance(), ledger)
    idle = rounds_without_update(cli.run_folder)
    if idle:
        print(
            f"grpo train: {len(idle)} of {cli.config.data.rounds} rounds made no update, since no group in them had "
            f"rewards that differ: {', '.join(map(str, idle))}",
            file=sys.stderr,
        )
