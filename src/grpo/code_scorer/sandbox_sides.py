"""The two sides of a judgement, each alone in a sandbox: the program's, and the tests'.

Only its text and that of ``plain_data`` enter, and run as a script (``run_script`` of the guest): standard input holds
the job as JSON, standard output is the channel to the process that holds the clock. The tests' side alone knows the
secret that says "all passed". What the program's side sends can be no more than the spelling of plain data, which the
tests' side reads back, so that no object of the program's and no exit of it reaches a test.
"""

from __future__ import annotations

import builtins
import json
import os
import random
import sys

# `typing` would lengthen the start; type checkers take this name for typing's own.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, NoReturn

    from grpo.code_scorer.plain_data import read_back, spelled

# Raised within a test's loop they would end it early, and the test would pass.
_ENDS_OF_LOOPS = (StopIteration, StopAsyncIteration)


class ProgramError(Exception):
    """The program failed in a way that is no ordinary exception of Python's."""


class Channel:
    """Messages of text on a descriptor of this side's own; what else is printed here goes nowhere."""

    def __init__(self) -> None:
        self._end = os.dup(1)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 1)

    def send(self, text: str) -> None:
        message = text.encode()
        rest = len(message).to_bytes(4, "big") + message
        while rest:
            rest = rest[os.write(self._end, rest) :]

    def receive(self) -> str:
        return self._exactly(int.from_bytes(self._exactly(4), "big")).decode()

    def _exactly(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = os.read(self._end, min(size, 1 << 20))
            if not part:
                os._exit(0)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def job_given() -> dict[str, Any]:
    """What standard input holds, which leads nowhere afterwards."""
    parts = []
    while part := os.read(0, 1 << 20):
        parts.append(part)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    job: dict[str, Any] = json.loads(b"".join(parts))
    return job


def run_program_side() -> None:
    """Load the program, then call its functions as the tests' side asks."""
    source = job_given()["program"]
    channel = Channel()
    random.seed(0)
    module = type(sys)("solution")
    sys.modules["solution"] = module  # dataclasses and typing look a class's module up
    names = module.__dict__

    def load() -> None:
        exec(compile(source, "solution.py", "exec", dont_inherit=True), names)

    def call(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if name not in names:
            raise NameError(f"name {name!r} is not defined")
        return names[name](*arguments, **keywords)

    channel.send(_said(load))
    while True:
        request = read_back(channel.receive())
        channel.send(_said(lambda: call(*request)))  # noqa: B023


def _said(work: Callable[[], Any]) -> str:
    """What ``work`` returned, or how it failed, spelled: ``("value", it)`` or ``("error", type, words)``."""
    try:
        return spelled(("value", work()))
    except BaseException as error:  # noqa: BLE001 - the program's, whatever it is
        try:
            words = str(error)[:200]
        except BaseException:  # noqa: BLE001 - __str__ may be the program's own
            words = ""
        return spelled(("error", type(error).__name__, words))


class StandIn:
    """Stands in the tests for a function of the program."""

    def __init__(self, side: TestsSide, name: str) -> None:
        self._side, self._name = side, name

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._side.ask(self._name, arguments, keywords)


class Names(dict[str, object]):
    """The tests' global names: what is neither theirs nor Python's is the program's."""

    def __init__(self, side: TestsSide, given: Mapping[str, object]) -> None:
        super().__init__(given)
        self._side = side

    def __missing__(self, name: str) -> object:
        if hasattr(builtins, name):
            return getattr(builtins, name)
        if name.startswith("__"):
            raise KeyError(name)
        return StandIn(self._side, name)


class TestsSide:
    """Runs the tests; every call of the program goes out through the channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.calls = 0

    def ask(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        try:
            request = spelled((name, arguments, keywords))
        except TypeError as error:
            self.end("fault", f"a test calls {name} with something other than plain data ({error})")
        self.calls += 1
        self._channel.send("call:" + request)
        return self._answer(self._channel.receive())

    def run(self, setup: str, tests: Sequence[str], functions: Sequence[str]) -> str:
        """Every test in names of its own; the words of the first failure, or nothing."""
        compiled = [self._compiled(test, number) for number, test in enumerate(tests, start=1)]
        names = Names(self, {"__name__": "tests"})
        exec(compile(setup, "setup", "exec", dont_inherit=True), names)
        for number, test in enumerate(compiled, start=1):
            own = Names(self, {**names, **{name: StandIn(self, name) for name in functions}})
            before = self.calls
            try:
                exec(test, own)
            except BaseException as error:  # noqa: BLE001 - a failed test, in whatever way
                return f"test {number}: {_words(error)}"
            if self.calls == before:
                self.end("fault", f"test {number} never calls the program, so that anything would pass it")
        return ""

    def _compiled(self, test: str, number: int) -> Any:
        try:
            return compile(test, f"test {number}", "exec", dont_inherit=True)
        except Exception as error:  # noqa: BLE001 - whatever a compiler says of a text that is no Python
            self.end("fault", f"test {number} is no Python: {_words(error)}")

    def end(self, kind: str, words: str) -> NoReturn:
        self._channel.send(f"{kind}:{words}")
        os._exit(0)

    def _answer(self, text: str) -> Any:
        try:
            kind, first, *words = read_back(text)
        except BaseException:  # noqa: BLE001 - the program wrote it
            raise ProgramError("the program's answer is no plain data") from None
        if kind == "value":
            return first
        raise _error(str(first), str(*words[:1]))


def _error(kind: str, words: str) -> Exception:
    """The built-in exception of that name, where it is an ordinary one and made of words alone."""
    found = getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, _ENDS_OF_LOOPS):
        try:
            return found(words)
        except TypeError:
            pass
    return ProgramError(f"{kind}: {words}")


def _words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:200]
    except Exception:  # noqa: BLE001 - a message made of the program's values
        return type(error).__name__


def run_tests_side() -> None:
    """Run the tests, and say the secret where all of them passed."""
    job = job_given()
    side = TestsSide(Channel())
    random.seed(0)
    try:
        failure = side.run(job["setup"], job["tests"], job["functions"])
    except BaseException as error:  # noqa: BLE001 - the setup is anyone's code
        side.end("fault", f"the setup of the tests fails: {_words(error)}")
    if failure:
        side.end("failed", failure)
    side.end("passed", job["secret"])
