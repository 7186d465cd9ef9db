"""One program against its tests: a sandbox for each of the two, and this process between them, with the clock."""

from __future__ import annotations

import hmac
import json
import marshal
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from grpo.code_scorer.published_tests import PublishedTests
from grpo.rewards.sandbox import GUEST, ScriptRun, run_script
from grpo.rewards.sandbox_frames import ChannelError, receive_frame, send_frame
from grpo.rewards.sandbox_limits import Isolation, Limits
from grpo.rewards.sandbox_process import Sandbox

# What runs in the sandboxes, as one script.
_SCRIPT = tuple(Path(__file__).with_name(name) for name in ("sandbox_sides.py", "plain_data.py"))
# The tests' side reads answers of a bounded size and compares them.
_TESTS_MEMORY_MB = 1024
_LONGEST_MESSAGE = 1 << 24


class NoVerdict(RuntimeError):
    """Nothing can be said of the program, through no fault of its own."""


@dataclass(frozen=True)
class Bench:
    """Where programs are judged."""

    limits: Limits
    isolation: Isolation

    def failure(self, program: str, tests: PublishedTests) -> str:
        """Why the program fails its tests; empty text where it passes all of them.

        Raises:
            NoVerdict: the tests cannot judge a program.
            SandboxFailed, OSError: a sandbox did not come up.
        """
        if tests.runs:
            return self._failure_of_runs(program, tests.runs)
        with ExitStack() as given:
            limits = replace(self.limits, memory_mb=max(self.limits.memory_mb, _TESTS_MEMORY_MB))
            secret = secrets.token_hex(16)
            job = {"setup": tests.setup, "tests": tests.tests, "functions": tests.functions, "secret": secret}
            examiner = self._side(given, "run_tests_side", limits)
            candidate = self._side(given, "run_program_side", self.limits)
            for side in (examiner, candidate):
                side.sandbox.await_ready(side.channel)
            exchange = _Exchange(examiner, candidate, secret, time.monotonic() + self.limits.seconds)
            return exchange.failure(job, {"program": program})

    def _side(self, given: ExitStack, function: str, limits: Limits) -> _Side:
        ours, theirs = socket.socketpair()
        given.enter_context(ours)
        return _Side(function, ours, given.enter_context(Sandbox((GUEST,), theirs, limits, self.isolation)))

    def _failure_of_runs(self, program: str, runs: Sequence[tuple[str, str]]) -> str:
        """The limit is on all runs together."""
        left = self.limits.seconds
        for number, (given, expected) in enumerate(runs, start=1):
            if left <= 0:
                return f"run {number}: the time limit was over before"
            run = run_script(program, given, limits=replace(self.limits, seconds=left), isolation=self.isolation)
            if failure := _failure_of_run(run, expected):
                return f"run {number}: {failure}"
            left -= run.seconds
        return ""


@dataclass(frozen=True)
class _Side:
    function: str
    channel: socket.socket
    sandbox: Sandbox

    def start(self, job: Mapping[str, object], deadline: float) -> None:
        texts = (path.read_text(encoding="utf-8") for path in _SCRIPT)
        source = "\n".join([*texts, f"{self.function}()\n"])
        send_frame(self.channel, marshal.dumps(("script", source, json.dumps(job))), deadline)


@dataclass
class _Exchange:
    """The messages between the two sides, each of which may end, hang or flood."""

    examiner: _Side
    candidate: _Side
    secret: str
    deadline: float
    answered: bool = False

    def failure(self, job: Mapping[str, object], program: Mapping[str, object]) -> str:
        try:
            start = time.monotonic()
            self.candidate.start(program, self.deadline)
            loaded = self._answer()
            # A program that left the tests too little time has its part in whatever becomes of them.
            self.answered = time.monotonic() - start > (self.deadline - start) / 2
        except ChannelError as error:
            return f"the program {error}"
        if not loaded.startswith(b"('value',"):
            return f"the program fails before any test: {loaded[:200].decode(errors='replace')}"
        try:
            self.examiner.start(job, self.deadline)
            return self._examined()
        except ChannelError as error:
            # A test that hangs on, or dies of, an answer of the program's is a failed one.
            if self.answered:
                return f"the tests got no further: the side that runs them {error}"
            raise NoVerdict(f"the side that runs the tests {error}") from error

    def _examined(self) -> str:
        while True:
            message = receive_frame(self.examiner.channel, self.deadline, _LONGEST_MESSAGE)
            kind, _, rest = message.partition(b":")
            if kind == b"call":
                try:
                    send_frame(self.candidate.channel, rest, self.deadline)
                    answer = self._answer()
                except ChannelError as error:
                    return f"the program {error}"
                self.answered = True
                send_frame(self.examiner.channel, answer, self.deadline)
            elif kind == b"passed" and hmac.compare_digest(rest, self.secret.encode()):
                return ""
            elif kind == b"failed":
                return rest.decode(errors="replace")
            else:
                raise NoVerdict(rest.decode(errors="replace"))

    def _answer(self) -> bytes:
        return receive_frame(self.candidate.channel, self.deadline, _LONGEST_MESSAGE)


def _failure_of_run(run: ScriptRun, expected: str) -> str:
    """A run must end by itself with exit code 0; white space at the ends of lines and of the output does not count."""
    if run.ended != "exit":
        return "it did not end in time" if run.ended == "time" else "it printed too much"
    if run.exit_code:
        return f"it ended with exit code {run.exit_code}"
    printed, wanted = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (run.output, expected))
    return "" if printed == wanted else "it printed something else"
