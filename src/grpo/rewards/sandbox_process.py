"""One process in a sandbox, from its start to the end of all that it started."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from grpo.rewards import sandbox_bubblewrap as bubblewrap
from grpo.rewards.sandbox_frames import ChannelError, receive_frame
from grpo.rewards.sandbox_limits import Isolation, Limits
from grpo.rewards.sandbox_seccomp import filter_bytes

# How long a sandbox may take to come up. Generous: a busy machine is no fault of the program inside.
START_SECONDS = 30.0
# After its end is asked for. The kernel needs milliseconds; this only bounds a fault.
_END_SECONDS = 10.0


class SandboxFailed(RuntimeError):
    """A sandbox that should have come up did not: nothing is known of the program it was for."""


class Sandbox:
    """One program in a sandbox of its own, started at once; the end of the ``with`` block ends all it started.

    Args:
        files: the files of Python that enter; the first is run, and sends the frame ``ready`` over the channel
            once it has set its limits.
        channel: one end of a pair of sockets, which becomes the program's standard input. Closed here.
        limits: what the program sets for itself. Of its time only the processor's is bounded that way; whoever
            holds the other end of the channel keeps the clock.
        trusted: the program is our own and lives on: no bound on its time and processes.
    """

    def __init__(
        self,
        files: Sequence[Path],
        channel: socket.socket,
        limits: Limits,
        isolation: Isolation,
        trusted: bool = False,
    ) -> None:
        self._resources = ExitStack()
        # In memory: bubblewrap says little, and the program points its standard error elsewhere when it starts.
        self._stderr: IO[bytes] = os.fdopen(os.memfd_create("stderr"), "w+b")
        self._resources.callback(self._stderr.close)
        self._first_process: int | None = None
        isolated = isolation == "bubblewrap"
        # By this the first process inside sees when this one ends, in whatever way, and ends with it.
        trainer = os.pidfd_open(os.getpid())
        self._trainer = trainer
        arguments = [*limits.as_arguments(isolated=isolated, trusted=trusted), f"trainer={trainer}"]
        with channel, _closed(trainer), self._undone_on_error():
            if isolated:
                self._start_isolated(files, channel, arguments, limits.scratch_mb)
            else:
                self._start_bare(files[0], channel, arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def await_ready(self, channel: socket.socket) -> None:
        """Wait for the program's first frame, by which it says that its limits are set.

        Raises:
            SandboxFailed: it did not come.
        """
        try:
            if receive_frame(channel, time.monotonic() + START_SECONDS, 100) == b"ready":
                return
        except ChannelError:
            pass
        raise SandboxFailed(f"the sandbox did not come up: {self.complaint()}")

    def complaint(self) -> str:
        """End the sandbox and tell what bubblewrap or the interpreter said on the way up."""
        self._kill()
        self._process.wait()
        self._stderr.seek(0)
        return " ".join(self._stderr.read(2000).decode(errors="replace").split())[-200:] or "no message"

    def end(self) -> int:
        """End every process of the sandbox and wait until none is left; the exit code of the program."""
        if self._process.returncode is None:
            self._kill()
        return self.finish(_END_SECONDS)

    def finish(self, seconds: float) -> int:
        """Give the program ``seconds`` to end by itself, then see that nothing it started is left."""
        if not self._ended_within(seconds):
            self._kill()
        self._process.wait()
        if self._first_process is not None:
            # Where bubblewrap itself was ended by others, its child is still there.
            self._kill()
            _has_ended(self._first_process, _END_SECONDS)
            os.close(self._first_process)
            self._first_process = None
        else:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._resources.close()
        return self._process.returncode

    def _ended_within(self, seconds: float) -> bool:
        """Wait by a handle: `Popen.wait` with a time limit looks from time to time, and sleeps longer than it takes."""
        if self._process.returncode is not None:
            return True
        handle = os.pidfd_open(self._process.pid)
        with _closed(handle):
            return _has_ended(handle, seconds)

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Where the start fails half-way, leave no process and no open file."""
        try:
            yield
        except BaseException:
            if (process := getattr(self, "_process", None)) is not None:
                # The group: bubblewrap's child belongs to it as long as it cannot yet see for itself that it is alone.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self._resources.close()
            raise

    def _kill(self) -> None:
        """Kill the first process inside, and with it all others; bubblewrap then reaps it and ends."""
        with suppress(ProcessLookupError):
            if self._first_process is not None:
                signal.pidfd_send_signal(self._first_process, signal.SIGKILL)
            else:
                self._process.kill()

    def _start_isolated(
        self, files: Sequence[Path], channel: socket.socket, arguments: Sequence[str], scratch_mb: int
    ) -> None:
        info, info_end = os.pipe()
        with os.fdopen(info, "rb") as answer:
            with ExitStack() as given:
                given.callback(os.close, info_end)
                call_filter = _filter_end(given)
                words = bubblewrap.command(
                    files, arguments, scratch_mb=scratch_mb, info_fd=info_end, filter_fd=call_filter
                )
                # With the end that is read here too: without a reader, should this process be killed, bubblewrap
                # would fail at writing and leave its child waiting for ever.
                kept = [info, info_end] if call_filter is None else [info, info_end, call_filter]
                # Bubblewrap's own environment can be read by no one inside, and still holds nothing.
                self._process = self._popen(words, channel, kept, environment={}, folder=None)
            self._first_process = _handle_of_child(answer.read(), self._process.pid)

    def _start_bare(self, file: Path, channel: socket.socket, arguments: Sequence[str]) -> None:
        words = [str(bubblewrap.interpreter()), *bubblewrap.INTERPRETER_OPTIONS, str(file), *arguments]
        folder = self._resources.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        environment = {**bubblewrap.ENVIRONMENT, "PYTHONPATH": str(file.parents[2])}
        self._process = self._popen(words, channel, [], environment, folder)

    def _popen(
        self, words: list[str], channel: socket.socket, kept: list[int], environment: dict[str, str], folder: str | None
    ) -> subprocess.Popen[bytes]:
        # A session of its own: no terminal to write to, and a group that can be ended as one.
        return subprocess.Popen(
            words,
            stdin=channel.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=self._stderr.fileno(),
            pass_fds=[*kept, self._trainer],
            env=environment,
            cwd=folder,
            start_new_session=True,
        )


def _has_ended(handle: int, seconds: float) -> bool:
    """Whether the process behind ``handle`` ends within ``seconds``. `poll`, as `select` ends at descriptor 1,023."""
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    return bool(waiting.poll(max(0.0, seconds) * 1000))


@contextmanager
def _closed(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


def _filter_end(given: ExitStack) -> int | None:
    """A pipe that holds the system call filter; it fits into a pipe's buffer, so nobody waits."""
    program = filter_bytes()
    if program is None:
        return None
    end, ours = os.pipe()
    given.callback(os.close, end)
    with os.fdopen(ours, "wb") as pipe:
        pipe.write(program)
    return end


def _handle_of_child(info: bytes, parent: int) -> int | None:
    """A handle on the process that bubblewrap names, if it is there and bubblewrap's child: ids are used again.

    Where the machine runs out of memory the kernel is told to choose this process, not the trainer.
    """
    try:
        child = int(json.loads(info)["child-pid"])
        handle = os.pidfd_open(child)
    except (ValueError, KeyError, ProcessLookupError):
        return None
    if _parent(child) != parent:
        os.close(handle)
        return None
    with suppress(OSError):
        Path(f"/proc/{child}/oom_score_adj").write_text("1000", encoding="utf-8")
    return handle


def _parent(process: int) -> int | None:
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1])
