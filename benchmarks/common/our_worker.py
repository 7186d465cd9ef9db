"""This project's trainer as a worker: ``python -m common.our_worker WORK TUNING PARTS``.

The module, data, record and loggers are those that ``grpo train`` puts together; a callback waits after each round for
the next command.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from pyarrow import parquet

from common.turns import Turns, memory_mib
from common.work import REWARDS, Tuning, Work
from grpo.records import Problem, Score
from grpo.rewards import RewardComponent
from grpo.rollouts.sampling import SamplingSettings
from grpo.train import EXPECTED_WARNINGS
from grpo.training.grpo_module import GRPOModule
from grpo.training.prompt_group_datamodule import PromptGroupDataModule
from grpo.training.rollout_log import RolloutLog
from grpo.training.run_loggers import WandbSettings, run_loggers
from grpo.training.settings import AdvantageSettings, LossSettings, OptimizerSettings, RoundSettings


@dataclass(frozen=True)
class Parts:
    """What of a run is switched on beside sampling and updating.

    Args:
        record: the rollouts and decisions, on disk.
        loggers: the CSV file and the line a round, and W&B where WANDB_MODE says so.
        reward: the workload's reward; else one that costs nothing.
        shared_prompt: whether sampling runs a group's prompt once.
        lengths: whether replies hold the length of every prompt and completion, read back from the record.
    """

    record: bool = True
    loggers: bool = True
    reward: bool = True
    shared_prompt: bool = True
    lengths: bool = False


class Told(L.Callback):
    """Replies with what a round took, and waits for the next command."""

    def __init__(self, turns: Turns, record: Path | None) -> None:
        self.turns = turns
        self.record = record

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.turns.reply(ready=True, loaded_mib=memory_mib("VmRSS"))
            self._wait(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        seconds, counted = self.turns.seconds(), trainer.loggers[-1].last  # type: ignore[attr-defined]
        phases = {name.removeprefix("seconds/"): value for name, value in counted.items() if "seconds/" in name}
        lengths = {} if self.record is None else recorded_lengths(self.record, batch_idx)
        self.turns.reply(
            round=seconds,
            rollout=phases["rollout"],
            update=phases["update"],
            reward=phases["reward"],
            record=phases.get("record", 0.0),
            tokens=counted["tokens/sampled"],
            mean_reward=counted["reward/mean"],
            mixed=counted["groups/mixed"],
            peak_mib=memory_mib(),
            **lengths,
        )
        self._wait(trainer)

    def _wait(self, trainer: L.Trainer) -> None:
        command = self.turns.next()
        while command["do"] == "save":
            trainer.lightning_module.policy.save_pretrained(command["folder"])  # type: ignore[union-attr, operator]
            self.turns.reply(saved=True)
            command = self.turns.next()
        trainer.should_stop = command["do"] == "end"


class LastRound(Logger):
    """Keeps the metrics of the last round."""

    name, version = "last", ""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, float] = {}

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """None are kept."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.last = dict(metrics)


def recorded_lengths(record: Path, round_index: int) -> dict[str, list[int]]:
    """Tokens of each rollout's prompt and completion, and the group's name, in the order of the record."""
    (path,) = (record / "rollouts").glob(f"round-{round_index:05d}-*.parquet")
    table = parquet.read_table(path, columns=["group_id", "prompt_tokens", "completion_tokens"]).to_pydict()
    names = list(dict.fromkeys(table["group_id"]))
    return {
        "groups": [names.index(name) for name in table["group_id"]],
        "prompts": [len(tokens) for tokens in table["prompt_tokens"]],
        "completions": [len(tokens) for tokens in table["completion_tokens"]],
    }


def costless(_: Problem, completion: str) -> Score:
    """Something that differs within a group, at next to no cost."""
    return Score(zlib.crc32(completion.encode()) / 2**32)


def make_module(work: Work, tuning: Tuning, parts: Parts) -> GRPOModule:
    """The objective that TRL calls ``grpo``: flat groups stay in, the sample's standard deviation, epsilon 1e-4."""
    check = REWARDS[work.reward] if parts.reward else costless
    return GRPOModule(
        Path(work.policy),
        {"reward": RewardComponent(check, limit_seconds=None)},
        sampling=SamplingSettings(
            max_new_tokens=work.max_new_tokens, max_rows=tuning.sampled_rows, shared_prompt=parts.shared_prompt
        ),
        round=RoundSettings(group_size=work.group_size, flat_groups="keep"),
        advantages=AdvantageSettings(std_correction=1, epsilon=1e-4),
        loss=LossSettings(kl_beta=work.kl_beta, reduction="response_mean"),
        optimizer=OptimizerSettings(learning_rate=work.learning_rate, micro_batch_rows=tuning.micro_batch),
        seed=work.seed,
    )


def make_data(work: Work) -> PromptGroupDataModule:
    return PromptGroupDataModule(
        Path(work.policy),
        Path(work.problems),
        work.rounds,
        work.groups,
        validation_problems=0,
        max_prompt_tokens=2048,  # growth.py has prompts of 1024
        seed=work.seed,
    )


def serve(work: Work, tuning: Tuning, parts: Parts, folder: Path) -> None:
    """Train round by round, as told."""
    turns = Turns()
    torch.set_num_threads(tuning.threads)
    module = make_module(work, tuning, parts)
    loggers = run_loggers(folder, "benchmark", WandbSettings("offline")) if parts.loggers else []
    if parts.record:
        module.rollout_log = RolloutLog(folder / "record", "benchmark", 0, module.components)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=[*loggers, LastRound()],
        callbacks=[Told(turns, folder / "record" if parts.lengths else None)],
        deterministic="warn",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        default_root_dir=folder,
    )
    trainer.fit(module, make_data(work))


if __name__ == "__main__":
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)
    with tempfile.TemporaryDirectory() as scratch:
        chosen = replace(Parts(), **json.loads(sys.argv[3]))
        serve(Work.loads(sys.argv[1]), Tuning(**json.loads(sys.argv[2])), chosen, Path(scratch))
