"""Runs Python that nobody has read, apart from this machine: what that promises stands in docs/security.md.

>>> run_script("print(6 * int(input()))", "7").output  # doctest: +SKIP
'42\\n'
"""

from __future__ import annotations

import marshal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from grpo.rewards import sandbox_bubblewrap as bubblewrap
from grpo.rewards.sandbox_frames import ChannelError, OutOfTime, receive_some, send_frame
from grpo.rewards.sandbox_limits import DEFAULT_LIMITS, Isolation, Limits
from grpo.rewards.sandbox_process import Sandbox, SandboxFailed

__all__ = ["GUEST", "Isolation", "Limits", "SandboxFailed", "SandboxUnavailable", "ScriptRun", "require", "run_script"]

GUEST = Path(__file__).with_name("sandbox_guest.py")


class SandboxUnavailable(ValueError):
    """Programs cannot be isolated here as the configuration asks; the message says what to install or allow."""


@dataclass(frozen=True)
class ScriptRun:
    """How a script ended (by itself, or for time or too much output), what it had printed by then and its time."""

    output: str
    ended: Literal["exit", "time", "output"]
    exit_code: int
    seconds: float
    """From when the sandbox was up."""


def require(isolation: Isolation) -> None:
    """See that programs can be run under ``isolation``, by running one (once a process).

    Raises:
        SandboxUnavailable: bubblewrap is missing or this machine does not let it work; an unknown isolation.
    """
    if isolation not in get_args(Isolation):
        raise SandboxUnavailable(f"isolation is {isolation!r}: choose {' or '.join(get_args(Isolation))}")
    complaint = _trial() if isolation == "bubblewrap" else ""
    if complaint:
        raise SandboxUnavailable(
            f"completions are code that nobody has read, and they cannot be isolated here: {complaint}. To run "
            f"them all the same, with every right that you have, say isolation: {get_args(Isolation)[1]}"
        )


@cache
def _trial() -> str:
    """Why no sandbox comes up here, or nothing."""
    if bubblewrap.bubblewrap_path() is None:
        return f"the command bwrap is missing; {bubblewrap.INSTALL_HINT}"
    try:
        run_script("")
    except SandboxFailed as error:
        return f"{error} (the machine or container must allow new namespaces, see docs/security.md)"
    return ""


def run_script(
    source: str, text: str = "", *, limits: Limits = DEFAULT_LIMITS, isolation: Isolation = "bubblewrap"
) -> ScriptRun:
    """Run ``source`` as the main program, with ``text`` as its standard input.

    Raises:
        SandboxFailed: the sandbox did not come up.
    """
    ours, theirs = socket.socketpair()
    with ours, Sandbox((GUEST,), theirs, limits, isolation) as sandbox:
        sandbox.await_ready(ours)
        start = time.monotonic()
        deadline = start + limits.seconds
        with suppress(ChannelError):  # whatever became of it, the answer below shows it
            send_frame(ours, marshal.dumps(("script", source, text)), deadline)
        output, ended = _read_output(ours, limits.answer_kb << 10, deadline)
        exit_code = sandbox.finish(max(0.0, deadline - time.monotonic())) if ended == "exit" else sandbox.end()
        seconds = time.monotonic() - start
    return ScriptRun(output.decode("utf-8", errors="replace"), ended, exit_code, seconds)


def _read_output(
    channel: socket.socket, longest: int, deadline: float
) -> tuple[bytes, Literal["exit", "time", "output"]]:
    output = bytearray()
    try:
        while part := receive_some(channel, 1 << 16, deadline):
            output += part[: longest - len(output)]
            if len(output) == longest:
                return bytes(output), "output"
    except OutOfTime:
        return bytes(output), "time"
    return bytes(output), "exit"
