"""One program against its tests: a sandbox for the program, one for the judge, and the verdict between them."""

from __future__ import annotations

import json
import marshal
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from grpo.rewards.code_problems import CallTests, ScriptTests
from grpo.rewards.sandbox import GUEST, ScriptRun, run_script
from grpo.rewards.sandbox_frames import ChannelError, receive_frame
from grpo.rewards.sandbox_limits import Isolation, Limits
from grpo.rewards.sandbox_process import START_SECONDS, Sandbox, SandboxFailed

_JUDGE = (Path(__file__).with_name("code_judge.py"), Path(__file__).with_name("sandbox_frames.py"), GUEST)
# The judge rebuilds answers of a bounded size and compares them; it needs no more for any honest solution.
_JUDGE_LIMITS = Limits(memory_mb=1024)
_LONGEST_VERDICT = 1 << 24
# The judge ends half a second after the limit by itself. This only bounds a fault of the machinery.
_PATIENCE_SECONDS = 5.0


class JudgeFailed(RuntimeError):
    """There is no verdict, through no fault of the program."""


@dataclass(frozen=True)
class Outcomes:
    """For each test, in order, why the program failed it; empty text where it passed."""

    failures: tuple[str, ...]

    @property
    def passed(self) -> int:
        return self.failures.count("")


class Worker:
    """Judges one program at a time; its judge lives on from one to the next."""

    def __init__(self, limits: Limits, isolation: Isolation) -> None:
        self.limits = limits
        self.isolation = isolation
        self._judge: Sandbox | None = None
        self._control: socket.socket | None = None

    def run(self, program: str, tests: CallTests | ScriptTests) -> Outcomes:
        """Run every test once.

        Raises:
            JudgeFailed: nothing can be said of the program.
        """
        try:
            if isinstance(tests, ScriptTests):
                return Outcomes(tuple(self._script_failures(program, tests)))
            return self._called(program, tests)
        except SandboxFailed as error:
            raise JudgeFailed(str(error)) from error

    def close(self) -> None:
        """End the judge."""
        if self._control is not None:
            self._control.close()
        if self._judge is not None:
            self._judge.end()
        self._judge = self._control = None

    def _script_failures(self, program: str, tests: ScriptTests) -> Iterator[str]:
        """Why each test failed; the limit is on all runs together, and the tests after it are not run."""
        left = self.limits.seconds
        for given, expected in tests.tests:
            if left <= 0:
                yield "not run: the time limit was over before"
                continue
            limits = replace(self.limits, seconds=left)
            run = run_script(program, given, limits=limits, isolation=self.isolation)
            left = 0.0 if run.ended == "time" else left - run.seconds
            yield _script_failure(run, expected)

    def _called(self, program: str, tests: CallTests) -> Outcomes:
        control = self._ready_judge()
        ours, theirs = socket.socketpair()
        with ours, Sandbox((GUEST,), theirs, self.limits, self.isolation) as sandbox:
            message = self._ask_judge(control, ours, self._job(program, tests))
            fault = message.get("fault")
            if isinstance(fault, str):
                said = f" ({sandbox.complaint()})" if "sandbox" in fault else ""
                raise JudgeFailed(fault + said)
        return self._outcomes(message, len(tests.tests))

    def _job(self, program: str, tests: CallTests) -> bytes:
        return marshal.dumps(
            {
                "source": program,
                "setup": tests.setup,
                "tests": list(tests.tests),
                "functions": sorted(tests.functions),
                "seconds": float(self.limits.seconds),
                "start_seconds": START_SECONDS,
                "longest": self.limits.answer_kb << 10,
            }
        )

    def _ask_judge(self, control: socket.socket, channel: socket.socket, job: bytes) -> dict[str, object]:
        patience = START_SECONDS + self.limits.seconds + _PATIENCE_SECONDS
        try:
            control.settimeout(patience)
            socket.send_fds(control, [len(job).to_bytes(4, "big")], [channel.fileno()])
            # From here the judge alone holds this end, so that it hears of the other's end.
            channel.close()
            control.sendall(job)
            message: dict[str, object] = json.loads(
                receive_frame(control, time.monotonic() + patience, _LONGEST_VERDICT)
            )
        except (ChannelError, OSError, ValueError) as error:
            self.close()
            raise JudgeFailed(f"the judge gave no verdict: {error}") from error
        return message

    def _outcomes(self, message: dict[str, object], tests: int) -> Outcomes:
        """The verdict on ``tests`` tests; one that the clock ended is a verdict against a program that was called."""
        failures = message.get("failures")
        if isinstance(failures, list) and len(failures) == tests and all(isinstance(text, str) for text in failures):
            return Outcomes(tuple(failures))
        if message.get("ended") == -signal.SIGALRM and not message.get("took_part"):
            raise JudgeFailed("a test does not end, and never called the solution before: see to the tests")
        if message.get("ended") == -signal.SIGALRM:
            return Outcomes(("a test did not end within the time limit on what the program gave",) * tests)
        raise JudgeFailed(f"the judge ended without a verdict: {message!r:.100}")

    def _ready_judge(self) -> socket.socket:
        if self._control is not None:
            return self._control
        control, theirs = socket.socketpair()
        judge = Sandbox(_JUDGE, theirs, _JUDGE_LIMITS, self.isolation, trusted=True)
        try:
            judge.await_ready(control)
        except SandboxFailed:
            control.close()
            judge.end()
            raise
        self._judge, self._control = judge, control
        return control


def _script_failure(run: ScriptRun, expected: str) -> str:
    if run.ended == "time":
        return "the program did not end within the time limit"
    if run.ended == "output":
        return "the program printed without end"
    if run.exit_code:
        return f"the program ended with exit code {run.exit_code}"
    return "" if _lines(run.output) == _lines(expected) else "the program printed something else"


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends, and without empty lines at the end."""
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip().split("\n")
