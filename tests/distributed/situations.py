"""Uneven situations, one after the other in the same group of processes: each process runs this script.

What it was handed as unevenness, and what it ended with, goes to ``FOLDER/SITUATION.RANK.json``. A situation that
takes longer than its limit ends its process on the spot.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pyarrow.parquet as pq
import torch
from fixtures_policy import TOKENIZER, share_of_lower_case
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor

from grpo.problem_files import read_problems, write_problems
from grpo.records import Problem, Score
from grpo.rewards import RewardComponent
from grpo.rollouts.sampling import SamplingSettings
from grpo.rollouts.tools import Calculator, ToolSettings
from grpo.train import EXPECTED_WARNINGS
from grpo.training.checkpoints import RoundCheckpoint, StreamingCheckpointIO, newest_checkpoint
from grpo.training.grpo_module import GRPOModule
from grpo.training.processes import wait_at_most
from grpo.training.prompt_group_datamodule import PromptGroupDataModule
from grpo.training.rollout_log import RolloutLog
from grpo.training.run_loggers import RoundCSVLogger
from grpo.training.settings import LossSettings, OptimizerSettings, RoundSettings
from grpo.training.strategies import CPUDeepSpeedStrategy, FullyShardedStrategy

RANK = int(os.environ.get("RANK", 0))
PROCESSES = int(os.environ.get("WORLD_SIZE", 1))
LIMIT_SECONDS = 60
LATE_SECONDS = 2.0
Reward = Callable[[Problem, str], Score]


@dataclass
class Verdict:
    """How a situation went in one process.

    Args:
        seconds: it took.
        error: that it ended with, ``Kind: message``; none where it went through.
        loaded: whether it came as far as to load the policy.
        rounds: of the ledger.
        updates: made.
        weights: a sum over the trained policy's, which must be the same everywhere.
        own: what was different for this process.
    """

    seconds: float = 0.0
    error: str = ""
    loaded: bool = False
    rounds: int = 0
    updates: int = 0
    weights: float = 0.0
    own: Any = None


@dataclass
class Run:
    """A training in this process's part of the group.

    Args:
        folder: of this situation; the policy and the problems stand beside it.
        strategy: its name.
        verdict: what is found out on the way.
    """

    folder: Path
    strategy: str
    verdict: Verdict = field(default_factory=Verdict)

    def fit(
        self,
        reward: Reward = share_of_lower_case,
        rounds: int = 2,
        groups: int = 4,
        validation: int = 2,
        callbacks: Sequence[L.Callback] = (),
        problems: Path | None = None,
        checkpoint: Path | None = None,
        **settings: Any,
    ) -> None:
        """Train, and note what the process has at the end, whether or not it got there."""
        policy = self.folder.parent / "policy"
        rewards = {"made": RewardComponent(reward, limit_seconds=None)}
        settings = {
            "sampling": SamplingSettings(max_new_tokens=6),
            "round": RoundSettings(group_size=4),
            "optimizer": OptimizerSettings(learning_rate=1e-3, micro_batch_rows=4),
        } | settings
        module = GRPOModule(policy, rewards, **settings)
        module.rollout_log = RolloutLog(self.folder / "record", "run", RANK, rewards, "problem")
        data = PromptGroupDataModule(policy, problems or self.folder.parent / "problems", rounds, groups, validation)
        trainer = L.Trainer(
            accelerator="cpu", devices=PROCESSES, strategy=made_strategy(self.strategy), max_epochs=1,
            logger=RoundCSVLogger(self.folder), enable_progress_bar=False, enable_model_summary=False,
            num_sanity_val_steps=0, log_every_n_steps=1, val_check_interval=1, default_root_dir=self.folder,
            callbacks=[*callbacks, RoundCheckpoint(self.folder / "checkpoints", 1)], plugins=[StreamingCheckpointIO()],
        )  # fmt: skip
        wait_at_most(trainer, LIMIT_SECONDS / 2 / 60)
        try:
            trainer.fit(module, data, ckpt_path=checkpoint)
        finally:
            self.verdict.rounds = module.ledger["rounds"]
            self.verdict.loaded = hasattr(module, "policy")
            if self.verdict.loaded:
                self.verdict.updates = trainer.global_step
        self.verdict.weights = sum(float(p.detach().double().sum()) for p in module.whole.model.parameters())

    def rows(self, table: str = "rollouts") -> list[dict[str, Any]]:
        """This process's part of the record."""
        files = sorted((self.folder / "record" / table).glob(f"*-rank-{RANK}.parquet"))
        return [row for file in files for row in pq.read_table(file).to_pylist()]

    def verdicts(self) -> list[str]:
        return sorted({row["verdict"] for row in self.rows("updates")})


def made_strategy(name: str) -> Strategy:
    if name == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if name == "fsdp2":
        return FullyShardedStrategy("gloo")
    return CPUDeepSpeedStrategy(int(name.removeprefix("deepspeed_")))


def flat(_: Problem, __: str) -> Score:
    return Score(1.0)


def only_in(rank: int, otherwise: Reward = share_of_lower_case) -> Callable[[Reward], Reward]:
    """A reward that only one process has."""
    return lambda reward: reward if rank == RANK else otherwise


class Late(L.Callback):
    """Keeps one process waiting in a hook, every time."""

    def __init__(self, rank: int, *hooks: str) -> None:
        for hook in hooks:
            setattr(self, hook, lambda *_, **__: time.sleep(LATE_SECONDS if rank == RANK else 0))


# ---- What goes through. ----


def completions_of_very_different_lengths(run: Run) -> None:
    run.fit(sampling=SamplingSettings(max_new_tokens=64 if RANK else 2))
    run.verdict.own = sum(len(row["completion_tokens"]) for row in run.rows())


def prompts_of_very_different_lengths(run: Run) -> None:
    """The same problems, whose questions are long in one process."""
    asked = run.folder / f"problems-{RANK}"
    asked.mkdir()
    for name in ("train.jsonl", "validation.jsonl"):
        known = read_problems(run.folder.parent / "problems" / name)
        longer = "1 + " * (15 * RANK)
        write_problems(asked / name, [Problem(p.id, longer + p.question, p.answer, p.slice) for p in known])
    run.fit(problems=asked)
    run.verdict.own = sum(len(row["prompt_tokens"]) for row in run.rows())


def flat_groups_in_one_process_skipped(run: Run) -> None:
    run.fit(only_in(1)(flat))
    run.verdict.own = run.verdicts()


def flat_groups_in_one_process_kept_with_a_reference(run: Run) -> None:
    run.fit(
        only_in(1)(flat),
        round=RoundSettings(group_size=4, flat_groups="keep"),
        loss=LossSettings(kl_beta=0.1, kl_on_flat_groups=False, reference_refresh_rounds=1),
    )
    run.verdict.own = run.verdicts()


def flat_groups_everywhere(run: Run) -> None:
    run.fit(flat)
    run.verdict.own = run.verdicts()


def a_late_reward(run: Run) -> None:
    slept = []

    def late(problem: Problem, completion: str) -> Score:
        if not slept:
            time.sleep(2 * LATE_SECONDS)
        slept.append(completion)
        return share_of_lower_case(problem, completion)

    run.fit(only_in(1)(late))
    run.verdict.own = bool(slept)


def different_numbers_of_micro_batches(run: Run) -> None:
    rows = 1 if RANK else 8
    run.fit(optimizer=OptimizerSettings(learning_rate=1e-3, micro_batch_rows=rows))
    run.verdict.own = rows


def no_row_that_teaches_in_one_process(run: Run) -> None:
    """Every completion of it is cut off and masked."""
    run.fit(loss=LossSettings(mask_truncated=True), sampling=SamplingSettings(max_new_tokens=1 if RANK else 12))
    run.verdict.own = sum(row["loss_tokens"] for row in run.rows("updates")) > 0


def minibatches_that_are_empty_in_one_process(run: Run) -> None:
    """A group a process, dealt out to three updates: one has a row of this process, one of the other, one none."""
    run.fit(groups=2, round=RoundSettings(group_size=4, minibatches=3, epochs=2))
    run.verdict.own = sorted({row["problem_id"] for row in run.rows()})


def draws_again_in_one_process(run: Run) -> None:
    run.fit(only_in(1)(flat), round=RoundSettings(group_size=4, flat_groups="resample", max_draws=5))
    run.verdict.own = len(run.rows())


def an_odd_number_of_validation_problems(run: Run) -> None:
    run.fit(validation=3)
    run.verdict.own = len(run.rows("validation"))


def fewer_validation_problems_than_processes(run: Run) -> None:
    run.fit(validation=1)
    run.verdict.own = len(run.rows("validation"))


def stop_strings_in_one_process(run: Run) -> None:
    """Every digit and every lower-case letter stops it."""
    stops = tuple("0123456789abcdefghijklmnopqrstuvwxyz") if RANK else ()
    run.fit(sampling=SamplingSettings(max_new_tokens=16, stop_strings=stops))
    run.verdict.own = sum(row["finish_reason"] == "stop_string" for row in run.rows())


def tools_in_one_process(run: Run) -> None:
    """What opens a call is likely, and its answer is put in."""
    letters = sorted({TOKENIZER.decode(i) for i in range(len(TOKENIZER))} & set("abcdefghij"))
    tools = ToolSettings({"c": Calculator()}, opening=letters[0], closing=letters[1], result="={result};")
    run.fit(sampling=SamplingSettings(max_new_tokens=48, tools=tools if RANK else None))
    run.verdict.own = sum(bool(row["tool_calls"]) for row in run.rows())


def unscored_rewards_in_one_process(run: Run) -> None:
    """Fewer than are allowed: the groups go without them."""
    seen: list[str] = []

    def unsure(problem: Problem, completion: str) -> Score:
        seen.append(completion)
        fails = len(seen) % 4 == 0
        return Score.unscorable("not sure") if fails else share_of_lower_case(problem, completion)

    run.fit(only_in(1)(unsure), round=RoundSettings(group_size=4, max_failure_share=0.5))
    run.verdict.own = sum(row["reward"] is None for row in run.rows())


class LogsAlone(L.Callback):
    """Logs where no other process does, by the trainer and past it."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.is_global_zero:
            self.log("alone", 1.0)
            for logger in trainer.loggers:
                logger.log_metrics({"alone": 1.0}, step=trainer.global_step)


def metrics_of_one_process(run: Run) -> None:
    run.fit(callbacks=[LogsAlone()])
    run.verdict.own = RANK


def states_saved_at_different_times(run: Run) -> None:
    run.fit(callbacks=[Late(1, "on_save_checkpoint", "on_train_batch_end"), Late(0, "on_validation_end")])
    run.verdict.own = RANK


class Stops(L.Callback):
    """Every process, before the third round."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            raise InterruptedError


def resumed_at_different_times(run: Run) -> None:
    with suppress(InterruptedError):
        run.fit(rounds=3, callbacks=[Stops()])
    assert run.verdict.rounds == 2
    kept = newest_checkpoint(run.folder)
    assert kept is not None
    run.fit(rounds=3, checkpoint=kept, callbacks=[Late(1, "setup", "on_load_checkpoint"), Late(0, "on_train_start")])
    run.verdict.own = RANK


# ---- What ends with an error, in every process. ----


def groups_that_cannot_be_shared(run: Run) -> None:
    run.fit(groups=3)


def rewards_that_fail_in_one_process(run: Run) -> None:
    run.fit(only_in(1)(lambda *_: Score.unscorable("the service is down")))


def a_reward_that_raises_in_one_process(run: Run) -> None:
    def broken(*_: object) -> Score:
        raise KeyError("a fault of the reward")

    run.fit(only_in(1)(broken))


def groups_that_may_not_stay_flat_in_one_process(run: Run) -> None:
    run.fit(only_in(1)(flat), round=RoundSettings(group_size=4, flat_groups="resample", max_draws=2, at_limit="fail"))


class Poisons(L.Callback):
    """Makes one process's gradient something else than a number."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if RANK == 1:
            pl_module.policy.get_input_embeddings().register_forward_hook(self._hook)

    def _hook(self, module: torch.nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("nan"))


def a_gradient_that_is_not_finite_in_one_process(run: Run) -> None:
    run.fit(callbacks=[Poisons()])


THROUGH = (
    completions_of_very_different_lengths,
    prompts_of_very_different_lengths,
    flat_groups_in_one_process_skipped,
    flat_groups_in_one_process_kept_with_a_reference,
    flat_groups_everywhere,
    a_late_reward,
    different_numbers_of_micro_batches,
    no_row_that_teaches_in_one_process,
    minibatches_that_are_empty_in_one_process,
    draws_again_in_one_process,
    an_odd_number_of_validation_problems,
    fewer_validation_problems_than_processes,
    stop_strings_in_one_process,
    tools_in_one_process,
    unscored_rewards_in_one_process,
    metrics_of_one_process,
    states_saved_at_different_times,
    resumed_at_different_times,
)
REFUSED = (
    groups_that_cannot_be_shared,
    rewards_that_fail_in_one_process,
    a_reward_that_raises_in_one_process,
    groups_that_may_not_stay_flat_in_one_process,
    a_gradient_that_is_not_finite_in_one_process,
)


def main(folder: Path, strategy: str, *names: str) -> None:
    torch.set_num_threads(1)
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)
    for situation in (*THROUGH, *REFUSED):
        if names and situation.__name__ not in names:
            continue
        faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
        run = Run(folder / situation.__name__, strategy)
        run.folder.mkdir(exist_ok=True)
        began = time.monotonic()
        try:
            situation(run)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the verdict
            run.verdict.error = f"{type(error).__name__}: {error}"
        run.verdict.seconds = time.monotonic() - began
        (folder / f"{situation.__name__}.{RANK}.json").write_text(json.dumps(asdict(run.verdict)))
        print(f"{situation.__name__} {RANK}: {run.verdict}", flush=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
