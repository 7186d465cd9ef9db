"""The first program inside a sandbox: gives up its rights, then runs the untrusted code or answers calls of it.

It stands alone: this one file enters the sandbox, and imports little, as it starts anew for every program.
Nothing here is a secret and nothing is trusted afterwards: the code it runs can read and change all of it, and
whatever goes out through the channel counts as that code's own word.

Requests come as `marshal` (from the trusted side); answers go out as JSON that spells out plain data alone.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` would lengthen the start
import builtins
import marshal
import os
import resource
import sys
from _collections_abc import Iterator
from _json import encode_basestring_ascii as quoted

# `typing` and `collections` would double the time to start; type checkers take this name for typing's own.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

READY = b"ready"


def start() -> None:
    limits = limits_given()
    channel = take_channel(limits["trainer"])
    watch_over_a_copy(channel, limits["trainer"])
    give_up_rights(limits)
    send(channel, READY)
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # ordinarily put there by `site`, which is not loaded
    form, source, text = marshal.loads(receive(channel))
    if form == "script":
        run_script(channel, source, text)
    else:
        answer_calls(channel, source, limits["answer"])


def take_channel(trainer: int) -> int:
    """The socket that came as standard input; the standard files lead nowhere afterwards.

    Of what else came in open, all is closed but the handle on the trainer.
    """
    os.closerange(3, trainer)
    os.closerange(trainer + 1, max(trainer + 1, 1 << 16))
    channel = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)
    return channel


def limits_given() -> dict[str, int]:
    return {name: int(number) for name, _, number in (text.partition("=") for text in sys.argv[1:])}


def watch_over_a_copy(channel: int, trainer: int) -> None:
    """Go on as a copy of this process, while this one waits for the copy's end, or the trainer's, and ends with it.

    As the sandbox's first process it cannot be killed from inside, and it takes every other down when it ends. The
    trainer's end is seen by a handle on its process, which is good from the first moment on and whoever forks.
    """
    copy = os.fork()
    if not copy:
        os.close(trainer)
        return
    os.close(channel)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    _signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    import select  # not before the fork: the program needs none of it

    while True:
        reap(copy)
        if trainer in select.select([woken, trainer], [], [])[0]:
            end_the_group()
        os.read(woken, 1 << 10)


def reap(copy: int) -> None:
    """Take leave of those that have ended, orphans of the copy's too, and end as the copy has."""
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            os._exit(1)
        if not ended:
            return
        if ended == copy:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def end_the_group() -> None:
    """End, and without a namespace of processes, whose first process takes all down, kill what has not run away."""
    try:
        os.kill(0, _signal.SIGKILL)
    finally:
        os._exit(1)


def give_up_rights(limits: dict[str, int]) -> None:
    """Set what may be used, for good (soft and hard), and leave root where the sandbox was started by root.

    A limit of 0 is left as it was. The processes are counted for the user that this becomes.
    """
    if limits["user"]:
        os.setgroups([])
        os.setresgid(limits["user"], limits["user"], limits["user"])
        os.setresuid(limits["user"], limits["user"], limits["user"])
    kinds = {
        "address_space": resource.RLIMIT_AS,
        "cpu": resource.RLIMIT_CPU,
        "processes": resource.RLIMIT_NPROC,
        "file": resource.RLIMIT_FSIZE,
        "open_files": resource.RLIMIT_NOFILE,
        "signals": resource.RLIMIT_SIGPENDING,
    }
    for name, kind in kinds.items():
        if limits[name]:
            resource.setrlimit(kind, (limits[name], limits[name]))
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
        resource.setrlimit(kind, (0, 0))


def run_script(channel: int, source: str, text: str) -> None:
    """The code as the main program, with ``text`` as its input; what it prints goes out through the channel."""
    given = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600)
    with open(given, "w", encoding="utf-8", closefd=False) as file:
        file.write(text)
    os.lseek(given, 0, os.SEEK_SET)
    os.dup2(given, 0)
    os.dup2(channel, 1)
    os.close(given)
    os.close(channel)
    sys.argv = ["solution.py"]
    sys.modules["__main__"] = type(sys)("__main__")
    exec(compile(source, "solution.py", "exec"), sys.modules["__main__"].__dict__)


def answer_calls(channel: int, source: str, longest: int) -> None:
    """Load the code, then call its functions by name until the other side hangs up."""
    module = type(sys)("solution")
    sys.modules["solution"] = module  # dataclasses and typing look a class's module up

    def load() -> None:
        exec(compile(source, "solution.py", "exec"), module.__dict__)

    send(channel, answer(load, longest))
    while True:
        name, arguments, keywords = marshal.loads(receive(channel))
        send(channel, answer(lambda: called(module.__dict__, name)(*arguments, **keywords), longest))  # noqa: B023


def called(names: dict[str, Any], name: str) -> Any:
    if name not in names:
        raise NameError(f"name {name!r} is not defined")
    return names[name]


def answer(work: Callable[[], Any], longest: int) -> bytes:
    """What ``work`` returns or raises, in JSON; whatever it raises, SystemExit included, is an answer too."""
    try:
        text = "".join(['["value",', *Encoder(longest).pieces(work()), "]"])
    except BaseException as error:  # noqa: BLE001
        text = f'["error",{quoted(type(error).__name__)},{quoted(_words(error))}]'
    return text.encode()


def _words(error: BaseException) -> str:
    try:
        return str(error)[:300]
    except BaseException:  # noqa: BLE001 - __str__ is the solution's own
        return ""


class Encoder:
    """Plain data as JSON. Text, booleans, None, floats and small ints are JSON's own; the rest is a tagged list.

    A subclass of a plain type is sent as that plain type. Anything else is refused, and so is more than
    ``longest`` characters: a small value that refers to itself often would otherwise become a huge text.
    """

    def __init__(self, longest: int) -> None:
        self.left = longest

    def pieces(self, value: Any) -> Iterator[str]:
        for piece in self._pieces(value):
            self.left -= len(piece)
            if self.left < 0:
                raise OverflowError("the answer is too large")
            yield piece

    def _pieces(self, value: Any) -> Iterator[str]:
        if value is None:
            yield "null"
        elif value is True or value is False:
            yield "true" if value else "false"
        elif isinstance(value, int):
            number = int(value)
            yield int.__repr__(number) if abs(number) < 1 << 63 else f'["n","{number:x}"]'
        elif isinstance(value, float):
            text = float.__repr__(value)
            yield f'["f","{text}"]' if text in ("nan", "inf", "-inf") else text
        elif isinstance(value, str):
            yield quoted(value)
        elif isinstance(value, complex):
            yield from self._tagged("c", (value.real, value.imag))
        elif isinstance(value, bytes | bytearray):
            tag = "b" if isinstance(value, bytes) else "a"
            yield f'["{tag}","{value.hex()}"]'
        elif isinstance(value, dict):
            yield from self._tagged("d", (part for item in value.items() for part in item))
        else:
            yield from self._tagged(*_elements(value))

    def _tagged(self, tag: str, elements: Iterable[Any]) -> Iterator[str]:
        yield f'["{tag}"'
        for element in elements:
            yield ","
            yield from self._pieces(element)
        yield "]"


def _elements(value: Any) -> tuple[str, Iterable[Any]]:
    for kind, tag in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z")):
        if isinstance(value, kind):
            return tag, value
    if isinstance(value, range):
        return "r", (value.start, value.stop, value.step)
    if isinstance(value, Iterator):
        return "i", value
    raise TypeError(f"a {type(value).__name__} is no plain data, so no test can look at it")


def send(channel: int, payload: bytes) -> None:
    rest = memoryview(len(payload).to_bytes(4, "big") + payload)
    while rest:
        rest = rest[os.write(channel, rest) :]


def receive(channel: int) -> bytes:
    return _exactly(channel, int.from_bytes(_exactly(channel, 4), "big"))


def _exactly(channel: int, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = os.read(channel, min(size, 1 << 20))
        if not part:
            os._exit(0)  # the other side has hung up: nobody waits for an orderly end
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    start()
