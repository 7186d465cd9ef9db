"""What every test runs under: the Makefile's switches, and no way out of this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

# Before any library that reads them is imported. A bare `pytest` is held to the same as `make test`.
SWITCHES = {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "DVC_STUDIO_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
    "ITERATIVE_DO_NOT_TRACK": "1",
    "MPLBACKEND": "Agg",
    "OTEL_SDK_DISABLED": "true",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
}
os.environ.update(SWITCHES)
# Small tensors gain nothing from a second thread, and threads that wait for each other lose much on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402 - after the switches, as is whatever it imports
from hypothesis import settings  # noqa: E402

# The same examples on every machine, and no failure because a machine was slow.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")

LOOPBACK = ("127.", "::1", "localhost")


class NetworkRefused(RuntimeError):
    """A test tried to reach another machine."""


@pytest.fixture(autouse=True, scope="session")
def only_this_machine() -> Iterator[None]:
    """Refuse every connection that leaves the machine; processes on it may talk to each other."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith(LOOPBACK):
            raise NetworkRefused(f"a test tried to connect to {address}: tests run without a network")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        yield
