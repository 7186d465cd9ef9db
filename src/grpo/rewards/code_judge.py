"""The judge: runs a problem's tests in a sandbox of its own, and asks the solution, in another, for answers.

The tests and what they expect are here alone. The solution gets arguments and gives plain data; the values that
the tests see are built here from that data, so no object of the solution's, no exit code and no printed word
can pass a test, and no trick in its own interpreter reaches this one.

Runs as a program: one process lives on, and forks a fresh one for every solution.
"""

from __future__ import annotations

import builtins
import json
import marshal
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from grpo.rewards.sandbox_frames import ChannelError, HungUp, frame, receive_frame, send_frame
from grpo.rewards.sandbox_guest import give_up_rights, limits_given, take_channel, watch_over_a_copy

# Past the limit, for reading the last answer and reporting; then a test that does not end is ended with the process.
GRACE_SECONDS = 0.5


class Unjudgeable(BaseException):
    """The tests cannot judge any solution as they are. No ``Exception``: tests must not catch it."""


class SolutionError(Exception):
    """An exception of the solution's that is no ordinary built-in one, or one that a test could take for a signal."""


# By these an iterator says that it is at its end: raised within `all(map(f, ...))` they would end the loop and let the
# test pass. The other exceptions with a meaning of their own (IndexError, AttributeError, KeyError) are swallowed only
# where a test's own `__getitem__`, `__getattr__` or `__missing__` calls the solution, and tests do expect them.
_SIGNALS = (StopIteration, StopAsyncIteration)


class Solution:
    """The solution in its sandbox, as seen from here."""

    def __init__(self, channel: socket.socket, longest: int, at_work: Callable[[], object]) -> None:
        self._channel = channel
        self._longest = longest
        self._at_work = at_work
        self._deadline = 0.0
        self.calls = 0
        self.gone = ""
        """Why it answers no more."""

    def load(self, source: str, seconds: float, start_seconds: float) -> None:
        """Wait for the sandbox, start the clock, and have the program run to its end."""
        try:
            receive_frame(self._channel, time.monotonic() + start_seconds, 100)
        except ChannelError as error:
            raise Unjudgeable(f"the solution's sandbox {error} while starting") from None
        signal.setitimer(signal.ITIMER_REAL, seconds + GRACE_SECONDS)
        start = time.monotonic()
        self._deadline = start + seconds
        self._ask(("calls", source, ""))
        if time.monotonic() - start > seconds / 2:  # it left the tests too little time to be blamed
            self._at_work()

    def call(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if not self.calls:
            self._at_work()
        self.calls += 1
        try:
            marshal.dumps((arguments, keywords))
        except ValueError:
            if _from_solution((arguments, keywords)):
                raise SolutionError(f"a value that the program gave cannot be passed on to {name}") from None
            raise Unjudgeable(f"a test calls {name} with something other than plain data") from None
        return self._ask((name, arguments, keywords))

    def _ask(self, request: tuple[Any, ...]) -> Any:
        if self.gone:
            raise SolutionError(self.gone)
        try:
            send_frame(self._channel, marshal.dumps(request), self._deadline)
            reply = receive_frame(self._channel, self._deadline, self._longest)
        except HungUp:
            self.gone = "the program ended before it answered"
        except ChannelError as error:
            self.gone = f"the program {error}"
        if self.gone:
            raise SolutionError(self.gone)
        return unpacked(reply)


class Function:
    """Stands in a test for a function of the solution."""

    def __init__(self, solution: Solution, name: str) -> None:
        self._solution = solution
        self._name = name

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._solution.call(self._name, arguments, keywords)

    def _no_value(self, *_: Any) -> Any:
        raise Unjudgeable(f"a test uses {self._name} other than by calling it")

    __getattr__ = __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = _no_value
    __getitem__ = __contains__ = __iter__ = __len__ = __bool__ = _no_value
    __hash__ = None  # type: ignore[assignment]


def _from_solution(value: Any) -> bool:
    """Whether there is a value in ``value`` that only an answer can have brought: the two that cannot go back."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_from_solution, value))
    return isinstance(value, range | type(iter([])))


def unpacked(reply: bytes) -> Any:
    """The value that a reply spells out; an exception of the solution's is raised here, as a built-in one."""
    try:
        message = json.loads(reply)
        if message[0] == "value":
            return value_of(message[1])
        kind, text = message[1], str(message[2])
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError, MemoryError):
        raise SolutionError("the program's answer is no plain data") from None
    found = getattr(builtins, kind, None) if isinstance(kind, str) else None
    if isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, _SIGNALS):
        try:
            raised = found(text)
        except TypeError:
            raise SolutionError(f"{kind}: {text}") from None
        raise raised
    raise SolutionError(f"{kind!s:.60}: {text}")


_COLLECTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "l": list, "t": tuple, "s": set, "z": frozenset, "i": iter,
}  # fmt: skip


def value_of(data: Any) -> Any:
    """Plain data from its JSON form (see the guest's ``Encoder``).

    >>> value_of(["t", 1, ["d", "a", ["n", "-ff"]]])
    (1, {'a': -255})
    """
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise ValueError("no plain data")
        return data
    tag, parts = data[0], data[1:]
    if tag in ("b", "a"):
        return bytes.fromhex(parts[0]) if tag == "b" else bytearray.fromhex(parts[0])
    if tag == "n":
        return int(parts[0], 16)
    if tag == "f":
        return float(parts[0])
    values = [value_of(part) for part in parts]
    if tag == "d":
        return dict(zip(values[::2], values[1::2], strict=True))
    if tag in ("r", "c"):
        return range(*values) if tag == "r" else complex(*values)
    return _COLLECTIONS[tag](values)


def outcomes_of(job: dict[str, Any], solution: Solution) -> Iterator[str]:
    """For each test in turn: why it failed, or nothing; each test is run once, in names of its own."""
    names: dict[str, Any] = {"__name__": "tests"}
    try:
        exec(compile(job["setup"], "setup", "exec"), names)
        compiled = [compile(test, f"test {number}", "exec") for number, test in enumerate(job["tests"], start=1)]
    except Exception as error:  # noqa: BLE001 - the setup is anyone's code
        raise Unjudgeable(f"the setup of the tests fails: {_words(error)}") from None
    names |= {name: Function(solution, name) for name in job["functions"]}
    try:
        solution.load(job["source"], job["seconds"], job["start_seconds"])
    except Exception as error:  # noqa: BLE001 - whatever the solution raises, no test can pass
        yield from [f"the program fails before any test: {_words(error)}"] * len(compiled)
        return
    for number, test in enumerate(compiled, start=1):
        before = solution.calls
        failure = _failure(test, dict(names)) or solution.gone
        failure = f"test {number}: {failure}" if failure else ""
        if not failure and solution.calls == before:
            raise Unjudgeable(f"test {number} never calls the solution, so anything would pass it")
        yield failure


def _failure(test: Any, names: dict[str, Any]) -> str:
    try:
        exec(test, names)
    except Unjudgeable:
        raise
    except BaseException as error:  # noqa: BLE001 - a failed test, in whatever way
        return _words(error)
    return ""


def _words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}".removeprefix("SolutionError: ").removesuffix(": ")[:200]
    except Exception:  # noqa: BLE001 - a message made of the solution's values
        return type(error).__name__


def verdict(job: dict[str, Any], channel: socket.socket, at_work: Callable[[], object]) -> dict[str, Any]:
    random.seed(0)  # tests that draw their examples draw the same for everyone
    try:
        return {"failures": list(outcomes_of(job, Solution(channel, job["longest"], at_work)))}
    except Unjudgeable as error:
        return {"fault": str(error)}


def serve(control: socket.socket) -> None:
    """Answer every job with a verdict, or with the exit code of the process that was to give it.

    With the code goes whether the solution had its part in it: it was called, or took its time before. Until then
    nothing but the tests can be at fault.

    ``control`` has no time limit, and must get none: its mode is shared by this process and its copies.
    """
    while True:
        header, channels, _, _ = socket.recv_fds(control, 4, 1)
        if not header:
            return
        channel = socket.socket(fileno=channels[0])
        size = int.from_bytes(header, "big")
        job = marshal.loads(control.recv(size, socket.MSG_WAITALL))
        mark, mark_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        child = os.fork()
        if not child:
            message = json.dumps(verdict(job, channel, partial(os.write, mark_end, b"1"))).encode()
            signal.setitimer(signal.ITIMER_REAL, 0)
            control.sendall(frame(message))
            os._exit(0)
        channel.close()
        os.close(mark_end)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            control.sendall(frame(json.dumps({"ended": code, "took_part": _is_marked(mark)}).encode()))
        os.close(mark)


def _is_marked(mark: int) -> bool:
    try:
        return os.read(mark, 1) == b"1"
    except BlockingIOError:  # a process that the tests left behind holds the other end
        return False


def start() -> None:
    limits = limits_given()
    channel = take_channel(limits["trainer"])
    watch_over_a_copy(channel, limits["trainer"])
    control = socket.socket(fileno=channel)
    give_up_rights(limits)
    control.sendall(frame(b"ready"))
    serve(control)


if __name__ == "__main__":
    start()
