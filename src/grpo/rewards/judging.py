"""Checks in worker processes: in parallel, each completion within its limit, and no crash of theirs is ours.

A check is the fork's own code on text that a policy made up: it may loop, run out of memory or take its
process with it. Here that costs one completion its score, with the reason, and one worker, which is replaced.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as TooLate
from contextlib import suppress
from multiprocessing.context import SpawnContext, SpawnProcess
from threading import Thread
from types import FunctionType, TracebackType
from typing import Any, Self

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from grpo.records import Problem, Score
from grpo.rewards import BatchReward, Reward, RewardComponent, judge, judge_batch

# In a worker: the checks by name, unpickled once, before any clock runs.
_CHECKS: dict[str, Reward] = {}


class _Worker(SpawnProcess):
    """Deaf to SIGTERM from its first moment on; the pool ends it by another signal.

    Schedulers send SIGTERM to every process of a job. The training ends after its round then, which it could not if its
    checks were ended at once: each would cost a completion its score. What a check starts is spared too.
    """

    def start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a new process begins with it
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def terminate(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)  # type: ignore[arg-type]


class _Context(SpawnContext):
    """Not forked: this process may hold locks of threads, which a copy of it would wait for for ever."""

    Process = _Worker


class Judges:
    """Runs the checks of a set of components.

    A check with a limit runs in worker processes. One without a limit runs in this process, and so does a lambda or
    a local function, which cannot be sent to another and so has no limit; a :class:`BatchReward` gets all completions
    at once, in this process.

    Args:
        components: checks and limits by name.
        workers: processes; they are started when the first check needs one.

    Raises:
        ValueError: a check that has a limit but cannot be pickled, so that it would run without the limit.
    """

    def __init__(self, components: Mapping[str, RewardComponent], workers: int = 2) -> None:
        self.components = components
        self.workers = workers
        self._pooled = {
            name: pickled
            for name, component in components.items()
            if component.limit_seconds is not None
            and not isinstance(component.check, BatchReward)
            and (pickled := _sendable(name, component.check)) is not None
        }
        self._pool: ProcessPool | None = None

    def judge(self, items: Sequence[tuple[Problem, str]]) -> list[dict[str, Score]]:
        """The scores of each completion by component, in the order of ``items``.

        Whatever goes wrong in a check makes its score unscorable, with the reason; nothing is raised.
        """
        waiting = {name: [self._start(name, *item) for item in items] for name in self._pooled}
        columns = {
            name: [self._finish(name, future) for future in waiting[name]]
            if name in waiting
            else _column_here(component.check, items)
            for name, component in self.components.items()
        }
        return _rows(columns, len(items))

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.stop()  # type: ignore[no-untyped-call]
            self._pool.join()
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, name: str, problem: Problem, completion: str) -> ProcessFuture[Score]:
        if self._pool is None:
            self._pool = ProcessPool(self.workers, initializer=_take, initargs=(self._pooled,), context=_Context())
        limit = self.components[name].limit_seconds
        return self._pool.schedule(_judge, args=(name, problem, completion), timeout=limit)

    def _finish(self, name: str, future: ProcessFuture[Score]) -> Score:
        try:
            return future.result()
        except TooLate:
            return Score.unscorable(f"no verdict within limit_seconds = {self.components[name].limit_seconds:g}")
        except ProcessExpired as error:
            return Score.unscorable(f"the check ended its process (exit code {error.exitcode})")


def judge_here(
    components: Mapping[str, RewardComponent], items: Sequence[tuple[Problem, str]]
) -> list[dict[str, Score]]:
    """The scores of each completion by component, judged in this process, one after the other and without a limit."""
    return _rows({name: _column_here(component.check, items) for name, component in components.items()}, len(items))


def _column_here(check: Reward, items: Sequence[tuple[Problem, str]]) -> list[Score]:
    if isinstance(check, BatchReward):
        return judge_batch(check, items)
    return [judge(check, problem, completion) for problem, completion in items]


def _rows(columns: Mapping[str, Sequence[Score]], count: int) -> list[dict[str, Score]]:
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def _sendable(name: str, check: Reward) -> bytes | None:
    """The check as it is sent to a worker; None for a function that only this process has."""
    pickled = _pickled(check)
    if pickled is None and not isinstance(check, FunctionType):
        raise ValueError(
            f"rewards.{name}: {type(check).__qualname__} cannot be sent to a worker process, where its limit holds: "
            "make it picklable, or set limit_seconds to null"
        )
    return pickled


def _pickled(value: object) -> bytes | None:
    with suppress(pickle.PicklingError, TypeError, AttributeError):
        return pickle.dumps(value)
    return None


def _take(pickled: Mapping[str, bytes]) -> None:
    signal.signal(signal.SIGUSR1, _ending(signal.signal(signal.SIGTERM, signal.SIG_IGN)))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    training = multiprocessing.parent_process()
    assert training is not None
    Thread(target=_end_with, args=(training.pid,), daemon=True).start()
    _CHECKS.update({name: pickle.loads(check) for name, check in pickled.items()})


def _judge(name: str, problem: Problem, completion: str) -> Score:
    score = judge(_CHECKS[name], problem, completion)
    if _pickled(score) is None:
        return Score.unscorable("the score holds parts that cannot be sent back from a worker: make them plain data")
    return score


def _ending(of_the_pool: Any) -> Callable[..., None]:
    """The pool's own way to end a worker, and before it of what a check has started, which is as deaf."""

    def end(*args: object) -> None:
        for child in multiprocessing.active_children():
            child.kill()
        of_the_pool(*args)

    return end


def _end_with(training: int | None) -> None:
    """End when the training is gone, even in a check that has no end, unless it never lets go of the interpreter."""
    while os.getppid() == training:
        time.sleep(1.0)
    os._exit(1)
