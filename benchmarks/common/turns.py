"""Workers that take turns: a process that trains one round when it is told to, and sleeps in between.

A worker reads commands and writes replies, one JSON object a line. While it waits it sleeps in a read, and the threads
of its last round sleep too (see ``common``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

QUIET = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
FOLDER = Path(__file__).resolve().parent.parent


class Worker:
    """The driver's end of a worker.

    Args:
        module: of ``common``, run as a program.
        log: file for what it prints; its temporary files lie beside it, so that they go with that folder.
        threads: of torch.
        arguments: of the program.
        environment: beside this process's own.
    """

    def __init__(
        self, module: str, log: Path, threads: int, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        path = f"{FOLDER}{os.pathsep}{FOLDER.parent / 'src'}"
        own = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path, "TMPDIR": str(log.parent)}
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"common.{module}", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | QUIET | own | dict(environment or {}),
            )

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and wait for its reply."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            reply = self.process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            raise RuntimeError(f"a worker ended; the end of its log:\n{self.log.read_text()[-3000:]}")
        return dict(json.loads(reply))

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        """Let it end by itself, or end it; at once where its driver was interrupted or failed."""
        assert self.process.stdin is not None
        if kind is not None:
            self.process.kill()
        with suppress(BrokenPipeError):  # a command that it no longer takes
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Turns:
    """A worker's end. What it and its libraries print goes to its log; replies have a stream of their own."""

    def __init__(self) -> None:
        self.replies: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.started = 0.0

    def reply(self, **values: Any) -> None:
        self.replies.write(json.dumps(values) + "\n")
        self.replies.flush()

    def next(self) -> dict[str, Any]:
        """The next command; ``{"do": "end"}`` when there is none. The clock of the turn starts when it arrives."""
        line = sys.stdin.readline()
        self.started = time.perf_counter()
        return dict(json.loads(line)) if line else {"do": "end"}

    def seconds(self) -> float:
        return time.perf_counter() - self.started


def memory_mib(name: str = "VmHWM") -> float:
    """This process's peak (``VmHWM``) or present (``VmRSS``) memory."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024
