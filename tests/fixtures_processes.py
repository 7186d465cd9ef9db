"""Runs of several processes on this machine that the tests share: as a command, or each process started by itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pyarrow.parquet as pq
import torch
from fixtures_policy import train_config, write_config
from torch import Tensor

from grpo.rollouts.policies import load_policy
from grpo.training.strategies import deepspeed_engine

TESTS = Path(__file__).resolve().parent
SECONDS = 400
# As it is before any test. A training within the tests' own process leaves the address of its W&B service behind; a
# command that took it over would find a killed run's name in use there, and end before it could go on.
STARTED_WITH = dict(os.environ)
STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "fsdp2": {"class_path": "grpo.training.strategies.FullyShardedStrategy"},
    "deepspeed_1": {"class_path": "grpo.training.strategies.CPUDeepSpeedStrategy", "init_args": {"stage": 1}},
    "deepspeed_2": {"class_path": "grpo.training.strategies.CPUDeepSpeedStrategy"},
    "deepspeed_3": {"class_path": "grpo.training.strategies.CPUDeepSpeedStrategy", "init_args": {"stage": 3}},
    "deepspeed_3_offload": {
        "class_path": "grpo.training.strategies.CPUDeepSpeedStrategy",
        "init_args": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    },
}

# Several backward passes of an update meet in the host's memory here, by code of DeepSpeed's that nothing above runs.
OFFLOADED_2 = {
    "deepspeed_2_offload": {
        "class_path": "grpo.training.strategies.CPUDeepSpeedStrategy",
        "init_args": {"stage": 2, "offload_optimizer": True},
    }
}


class FailsIn(L.Callback):
    """A fault in one process alone, at the end of its second round.

    Args:
        rank: of the process.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_rank == self.rank and batch_idx == 1:
            raise OSError("no space left on the device")


def written_config(
    folder: Path,
    strategy: Any,
    processes: int,
    model: dict[str, Any] | None = None,
    callbacks: Sequence[Any] = (),
    **changes: Any,
) -> str:
    """The configuration file of two rounds of four groups, whose newest state is set aside at the end."""
    folder.mkdir(exist_ok=True)
    config = train_config(folder, rounds=2, groups_per_round=4, validation_problems=2)
    config["checkpoint_every_n_updates"] = 1
    config["model"]["loss"] = {"reduction": "token_mean"}
    for section, values in (model or {}).items():
        config["model"][section] = config["model"].get(section, {}) | values
    keeps = {"class_path": "fixtures_policy.KeepsState", "init_args": {"to": str(folder / "kept")}}
    config["trainer"] |= {"devices": processes, "strategy": strategy, "callbacks": [keeps, *callbacks]}
    config["data"] |= changes.pop("data", {})
    return write_config(folder / "train.yaml", config | changes)


def train(
    folder: Path,
    strategy: Any,
    processes: int,
    model: dict[str, Any] | None = None,
    fails: bool = False,
    callbacks: Sequence[Any] = (),
    **changes: Any,
) -> str:
    """The train stage as a command, as a user runs it; gives what it printed."""
    config = written_config(folder, strategy, processes, model, callbacks, **changes)
    output, code = run([sys.executable, "-m", "grpo", "train", "--config", config], environment())
    assert (code != 0) is fails, output[-3000:]
    return output


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    return STARTED_WITH | {"PYTHONPATH": paths, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def run(command: list[str], environment: dict[str, str]) -> tuple[str, int]:
    """What a command printed, and its exit status; no process of it outlives the time limit."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return output, process.returncode


@dataclass
class Ended:
    """How one of several processes ended.

    Args:
        status: its exit status; minus the signal that ended it.
        seconds: from what ``meanwhile`` did to its end.
        output: what it printed.
    """

    status: int
    seconds: float
    output: str


Meanwhile = Callable[[list[subprocess.Popen[bytes]]], None]


def together(
    command: Sequence[str], processes: int, folder: Path, limit: float, meanwhile: Meanwhile = lambda _: None
) -> list[Ended]:
    """Start each process as ``torchrun`` would, without the watch that it keeps: each has to end by itself.

    Args:
        command: of every process.
        processes: how many, in the order of their ranks.
        folder: gets what they print.
        limit: seconds after ``meanwhile``; every process that is still there is killed then.
        meanwhile: what is done to the processes once they are started.
    """
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "TORCHELASTIC_RUN_ID": "tests"}
    names |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "GROUP_RANK": "0"}
    places = [names | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    return _started(command, places, folder, limit, meanwhile)


def run_launched(command: Sequence[str], folder: Path, limit: float, meanwhile: Meanwhile) -> list[Ended]:
    """Start one process, which starts the others; it has ended when all that print where it does have."""
    return _started(command, [{}], folder, limit, meanwhile)


def _started(
    command: Sequence[str], places: Sequence[dict[str, str]], folder: Path, limit: float, meanwhile: Meanwhile
) -> list[Ended]:
    folder.mkdir(exist_ok=True)
    files = [folder / f"output-{rank}" for rank in range(len(places))]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for place, file in zip(places, files, strict=True):
            with file.open("wb") as printed:
                own = environment() | place
                started.append(
                    subprocess.Popen(command, env=own, stdout=printed, stderr=printed, start_new_session=True)
                )
        meanwhile(started)
        seconds = _wait(started, limit)
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    outputs = [file.read_text(errors="replace") for file in files]
    return [Ended(p.returncode, s, o) for p, s, o in zip(started, seconds, outputs, strict=True)]


def _wait(started: list[subprocess.Popen[bytes]], limit: float) -> list[float]:
    """Seconds to the end of each process and of those it started, or the limit."""
    began = time.monotonic()
    ended: dict[int, float] = {}
    while len(ended) < len(started) and time.monotonic() - began < limit:
        ended |= {p.pid: time.monotonic() - began for p in started if p.pid not in ended and _gone(p)}
        time.sleep(0.05)
    return [ended.get(process.pid, limit) for process in started]


def _gone(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended, and all that it started: they are of its group."""
    if process.poll() is None:
        return False
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 0)
        return False
    return True


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def weights(output: Path) -> Tensor:
    return torch.cat([p.detach().flatten() for p in load_policy(output / "policy").model.parameters()])


def rollouts(output: Path) -> dict[str, dict[str, Any]]:
    return table(output, "rollouts")


def table(output: Path, name: str) -> dict[str, dict[str, Any]]:
    """The rows of one of the record's tables by rollout, of all processes."""
    files = sorted((output / "record" / name).iterdir())
    return {row["rollout_id"]: row for path in files for row in pq.read_table(path).to_pylist()}


def assert_same_weights(output: Path, expected: Path) -> None:
    """Adam's first steps divide a gradient by its own size: where it is all rounding, the steps may differ."""
    distance = (weights(output) - weights(expected)).abs()
    moved = (weights(expected) - weights(expected.parent)).abs()
    assert distance.mean() < 1e-3 * moved.mean()
    assert distance.max() < 1e-4


class DropsAMicroBatch(L.Callback):
    """Leaves the last micro-batch of every update out: a fault for a comparison to find."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        whole = pl_module.round_update._plan
        pl_module.round_update._plan = lambda *args: whole(*args)[:-1]


class CountsSteps(L.Callback):
    """Writes a process's backward passes, its engine's own steps, and the updates that the trainer counted.

    Args:
        to: the file, whose name gets the rank.
    """

    def __init__(self, to: Path) -> None:
        self.to = Path(to)
        self.passes = 0

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.passes += 1

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        engine = deepspeed_engine(pl_module)
        assert engine is not None
        counted = f"{self.passes} {engine.global_steps} {trainer.global_step}"
        self.to.with_suffix(f".{trainer.global_rank}").write_text(counted)


class CutsUpEveryWeight(L.Callback):
    """Has DeepSpeed's stage 3 leave no weight whole, as it does with small ones, and gather few before their turn."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        config = getattr(trainer.strategy, "config", None)
        if config is not None:
            config["zero_optimization"] |= {
                "stage3_param_persistence_threshold": 0,
                "stage3_prefetch_bucket_size": 2_000,
                "stage3_max_live_parameters": 4_000,
                "reduce_bucket_size": 50_000,
            }


class IsToldToEndLast(L.Callback):
    """SIGTERM to the first process in the last round."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_global_zero and batch_idx + 1 == trainer.num_training_batches:
            os.kill(os.getpid(), signal.SIGTERM)


class CountsStates(L.Callback):
    """Writes how many states a run saved, and the most that stood side by side after a round.

    Args:
        to: the file, ``saved most``.
    """

    def __init__(self, to: Path) -> None:
        self.to = Path(to)
        self.seen: set[str] = set()
        self.most = 0

    def _look(self, trainer: L.Trainer) -> None:
        names = {path.name for path in (Path(trainer.default_root_dir) / "checkpoints").glob("*")}
        self.seen |= names
        self.most = max(self.most, len(names))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_global_zero:
            self._look(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self._look(trainer)
            self.to.write_text(f"{len(self.seen)} {self.most}")
