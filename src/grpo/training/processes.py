"""Processes that train together end together: when one is asked to, and when one is gone."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning as L

from grpo.training.strategies import all_processes

# How gloo, NCCL and torch's own store say that nobody answers.
_NOBODY = re.compile(r"closed by peer|reset by peer|broken pipe|timed? ?out|remote (worker|process)", re.IGNORECASE)


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

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if any(all_processes(self.asked)):
            trainer._signal_connector.received_sigterm = True  # Lightning stops once the round is wholly done

    def _note(self, *_: object) -> None:
        self.asked = True


def wait_at_most(trainer: L.Trainer, minutes: float) -> None:
    """Bound how long a process waits for the others; to be set before they are connected."""
    if not minutes > 0:
        raise ValueError(f"longest_wait_minutes is {minutes}: give minutes above 0 (30 is usual)")
    if hasattr(trainer.strategy, "_timeout"):  # of DDP and DeepSpeed; one device waits for nobody
        trainer.strategy._timeout = timedelta(minutes=minutes)


@contextmanager
def others_needed(minutes: float) -> Iterator[None]:
    """Say what has happened where a message between processes fails.

    Args:
        minutes: that a process waits for another.

    Raises:
        LostProcess: in the place of the library's error.
    """
    try:
        yield
    except RuntimeError as error:
        # A plain RuntimeError, or torch's own of messages between processes; not one of those derived here.
        if type(error).__module__ not in ("builtins", "torch", "torch.distributed") or not _NOBODY.search(str(error)):
            raise
        raise LostProcess(
            f"another process of this run ended, or did not come within longest_wait_minutes = {minutes:g}: what it "
            f"printed says why. Run it again to go on from the newest state ({str(error).splitlines()[0]:.200})"
        ) from error
