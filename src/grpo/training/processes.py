"""Processes that train together end together: when one is asked to, and when one is gone."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning as L
import torch

from grpo.rewards import RewardComponent
from grpo.training.strategies import all_processes, deepspeed_engine

# How gloo, NCCL and torch's own store say that nobody answers.
_NOBODY = re.compile(r"closed by peer|reset by peer|broken pipe|timed? ?out|remote (worker|process)", re.IGNORECASE)

LONGEST_MINUTES = 365 * 24 * 60


class LostProcess(RuntimeError):
    """Another process ended by itself, or did not come in time; the run can go on from its newest state."""

    exit_status = 75  # as of a run that was stopped; whatever ended the other process is told by its own status


class EndsTogether(L.Callback):
    """SIGTERM to any of the processes ends the training in all of them, after the round.

    Lightning's own handler sends a message from within the signal. The other processes are elsewhere then, and take it
    for a part of what they wait for, or all wait for each other.
    """

    def __init__(self) -> None:
        self.asked = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Lightning puts back what stood there before itself when the training ends.
        signal.signal(signal.SIGTERM, self._note)
        engine = deepspeed_engine(pl_module)
        if engine is not None:  # it has a group of its own, which waits as long as torch does by default
            timeout = trainer.strategy._timeout  # type: ignore[attr-defined]
            torch.distributed.distributed_c10d._set_pg_timeout(timeout, engine.data_parallel_group)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        rounds_left = batch_idx + 1 < trainer.num_training_batches  # after the last one, the run ends as any other
        if any(all_processes(self.asked)) and rounds_left:
            trainer._signal_connector.received_sigterm = True  # Lightning stops once the round is wholly done

    def _note(self, *_: object) -> None:
        self.asked = True


def wait_at_most(trainer: L.Trainer, minutes: float) -> None:
    """Bound how long a process waits for the others; to be set before they are connected."""
    if not 0 < minutes <= LONGEST_MINUTES:
        raise ValueError(f"longest_wait_minutes is {minutes}: give minutes above 0, up to {LONGEST_MINUTES} (a year)")
    if hasattr(trainer.strategy, "_timeout"):  # of all but one device, which waits for nobody
        trainer.strategy._timeout = timedelta(minutes=minutes)


def require_patience(trainer: L.Trainer, minutes: float, components: Mapping[str, RewardComponent]) -> None:
    """Refuse a check that alone may take longer than the other processes wait; a round's checks add up.

    Raises:
        ValueError: naming the check, its limit and the wait.
    """
    if not hasattr(trainer.strategy, "_timeout"):  # one device: nobody waits
        return
    for name, component in components.items():
        limit = component.limit_seconds
        if limit is not None and limit > 60 * minutes:
            raise ValueError(
                f"model.rewards.{name}.limit_seconds is {limit:g}, longer than longest_wait_minutes = {minutes:g}: the "
                "other processes would give this one up first; lower the limit, or raise longest_wait_minutes"
            )


@contextmanager
def others_needed(minutes: float, processes: int) -> Iterator[None]:
    """Say what has happened where a message between processes fails.

    Args:
        minutes: that a process waits for another.
        processes: how many there are; one waits for nobody.

    Raises:
        LostProcess: in the place of the library's error.
    """
    try:
        yield
    except RuntimeError as error:
        if processes == 1 or not _is_of_a_message(error):
            raise
        raise LostProcess(
            f"another process of this run ended, or did not come within longest_wait_minutes = {minutes:g}: what it "
            f"printed says why. Run it again to go on from the newest state ({str(error).splitlines()[0]:.200})"
        ) from error


def _is_of_a_message(error: RuntimeError) -> bool:
    """A plain RuntimeError, or torch's own of messages between processes; not one derived here, nor one of a GPU."""
    is_torch_s = type(error).__module__ in ("builtins", "torch", "torch.distributed")
    return is_torch_s and "CUDA error" not in str(error) and _NOBODY.search(str(error)) is not None
