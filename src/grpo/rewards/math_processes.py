"""Checks in processes that can be killed: an answer, or a reason why there is none, within the limit.

math-verify's own time limits are signals, which only a main thread can set and which do not stop every hang.
So each process has one helper, an ordinary subprocess that forks a worker for each caller (a daemonic
process may have it too, which ``multiprocessing`` would refuse). The limit is the kernel's timer in the worker;
a worker that dies is replaced by the next fork. A worker says when it is ready, and only then does the time of its
first item begin, so that no item pays for the imports. Nothing outlives the owner, however it ends: the helper
and its workers stop at the end of their sockets.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

# How much later than its limit a worker may be heard: the kernel ends it at the limit itself.
GRACE_SECONDS = 0.7
# How long a helper may take to start and to fork a worker: it imports sympy, on a machine that may be busy.
START_SECONDS = 60.0
MOST_IDLE = 8


class CheckFailed(RuntimeError):
    """There is no verdict; the message says why."""


@dataclass
class Checker:
    """The helper of this process and its idle workers. Safe to use from any thread, and after a fork."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    idle: list[socket.socket] = field(default_factory=list)
    control: socket.socket | None = None
    helper: subprocess.Popen[bytes] | None = None

    def same(self, *, gold: str, answer: str, limit_seconds: float) -> bool:
        """Whether two answers in canonical spelling are the same.

        Args:
            gold: the right answer.
            answer: the one to judge.
            limit_seconds: for the comparison; where a process has to be started first, that comes on top.

        Raises:
            CheckFailed: no verdict within the limit, or the check itself failed or could not be started.
        """
        request = json.dumps({"gold": gold, "answer": answer, "limit_seconds": limit_seconds})
        worker = self._worker()
        start = time.monotonic()
        worker.settimeout(limit_seconds + GRACE_SECONDS)
        try:
            worker.sendall(request.encode() + b"\n")
            reply = _line(worker)
        except OSError:  # no reply in time, or the worker is gone
            reply = b""
        if not reply:
            worker.close()
            late = time.monotonic() - start >= limit_seconds
            raise CheckFailed(f"no verdict within {limit_seconds:g} s" if late else "the checking process died")
        self._put_back(worker)
        return _verdict(json.loads(reply))

    def prepare(self) -> None:
        """Start what a first check would wait for.

        Raises:
            CheckFailed: it does not start.
        """
        self._put_back(self._worker())

    def close(self) -> None:
        """End the helper and the workers. The next check starts them anew."""
        with self.lock:
            for worker in self.idle:
                worker.close()
            self.idle.clear()
            self._end_helper()

    def forget(self) -> None:
        """In a forked child: what was opened belongs to the parent, who is still using it."""
        for connection in (*self.idle, self.control):
            if connection is not None:
                connection.close()
        if self.helper is not None:
            self.helper.returncode = 0  # not this process's to wait for
        self.lock, self.idle, self.control, self.helper = threading.Lock(), [], None, None

    def _end_helper(self) -> None:
        if self.control is not None:
            self.control.close()
        if self.helper is not None:
            if self.helper.poll() is None:  # else its number may be another's; its workers end with their sockets
                os.killpg(self.helper.pid, signal.SIGKILL)  # it and its workers: they hold nothing
            self.helper.wait()
        self.control = self.helper = None

    def _worker(self) -> socket.socket:
        with self.lock:
            if self.idle:
                return self.idle.pop()
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self._control(), [b"w"], [theirs.fileno()])
                except OSError:  # the helper was killed from outside: once more with a new one
                    self._end_helper()
                    socket.send_fds(self._control(), [b"w"], [theirs.fileno()])
            helper = self.helper
        self._wait_until_ready(ours, helper)
        return ours

    def _wait_until_ready(self, worker: socket.socket, helper: subprocess.Popen[bytes] | None) -> None:
        worker.settimeout(START_SECONDS)
        late = False
        try:
            ready = _line(worker)
        except OSError as error:
            ready, late = b"", isinstance(error, TimeoutError)
        if ready:
            return
        worker.close()
        with self.lock:
            if self.helper is helper:  # the next check tries a new one
                self._end_helper()
        raise CheckFailed(
            f"the checking process was not ready within {START_SECONDS:g} s" if late else "the checking process died"
        )

    def _put_back(self, worker: socket.socket) -> None:
        with self.lock:
            if len(self.idle) < MOST_IDLE:
                self.idle.append(worker)
                return
        worker.close()

    def _control(self) -> socket.socket:
        if self.control is None:
            self.control, theirs = socket.socketpair()
            with theirs:
                # A fixed hash seed, because sympy's ways depend on it; the path as it is here, and with -P nothing
                # that lies in the working folder is imported in place of a library.
                path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
                self.helper = subprocess.Popen(
                    [sys.executable, "-P", "-m", "grpo.rewards.math_worker"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
                    process_group=0,  # so that ctrl-C does not reach it, and it can be ended with its workers
                )
        return self.control


def _line(connection: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"\n"):
        piece = connection.recv(65_536)
        if not piece:
            return b""
        received += piece
    return received


def _verdict(reply: dict[str, object]) -> bool:
    if "error" in reply:
        raise CheckFailed(str(reply["error"]))
    return reply["same"] is True


CHECKER = Checker()
atexit.register(CHECKER.close)
os.register_at_fork(after_in_child=CHECKER.forget)
