"""The reward of a program: does it pass the problem's tests?

The program runs in a sandbox, the tests in another, and only plain data passes between the two, so a program is
paid for what its functions return and for nothing else. docs/security.md says what that promises.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from grpo.records import Problem, Score
from grpo.rewards.code_blocks import program_of
from grpo.rewards.code_problems import BadTests, read_problem
from grpo.rewards.code_worker import JudgeFailed, Outcomes, Worker
from grpo.rewards.sandbox import Isolation, Limits, require


class CodeTests:
    """1.0 where the program in a completion passes every test of its problem, else 0.0 (see ``code_problems``).

    Without tests in the problem's metadata the check is not applicable. Where the tests cannot be run, for a
    fault of theirs or of the machinery, the score is unscorable; a hostile program cannot bring that about by
    what it does to itself.

    Args:
        limit_seconds: wall-clock time of one program, all its calls or runs (``stdin_stdout``) together.
        memory_mb: address space of each of its processes.
        partial_credit: the share of the tests passed, instead of all or nothing.
        isolation: ``bubblewrap``, or in so many words none.
        workers: programs at a time; as many as there are processors, by default.
        processes: processes and threads of one program.

    Raises:
        SandboxUnavailable: programs cannot be isolated here.
    """

    def __init__(
        self,
        limit_seconds: float = 5.0,
        memory_mb: int = 256,
        partial_credit: bool = False,
        isolation: Isolation = "bubblewrap",
        workers: int | None = None,
        processes: int = 8,
    ) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers is {workers}: give 1 or more, or null for one a processor")
        self.limits = Limits(seconds=limit_seconds, memory_mb=memory_mb, processes=processes)
        self.partial_credit = partial_credit
        self.isolation: Isolation = isolation
        self.workers = workers or len(os.sched_getaffinity(0))
        self._pool: _Pool | None = None
        require(isolation)

    def __call__(self, problem: Problem, completion: str) -> Score:
        return self.score_batch([(problem, completion)])[0]

    def score_batch(self, items: Sequence[tuple[Problem, str]]) -> list[Score]:
        """The scores in the order of ``items``, several programs at a time."""
        if self._pool is None or self._pool.process != os.getpid():  # a fork copies no threads
            self._pool = _Pool(self.workers, self.limits, self.isolation)
        pool = self._pool
        return list(pool.threads.map(lambda item: self._score(pool.worker(), *item), items))

    def close(self) -> None:
        """End the workers; the next score starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_pool": None}

    def _score(self, worker: Worker, problem: Problem, completion: str) -> Score:
        try:
            task = read_problem(problem.metadata)
            if task is None:
                return Score.not_applicable("the problem's metadata holds no tests")
            program = program_of(completion, task.form, task.prompt)
            if program is None:
                return Score(0.0, reason="no fenced block of Python")
            return self._valued(worker.run(program, task.tests))
        except (BadTests, JudgeFailed) as error:
            return Score.unscorable(str(error)[:300])
        except OSError as error:  # this machine has no process, file or memory left for one more sandbox
            return Score.unscorable(f"the sandbox cannot be started: {error}"[:300])

    def _valued(self, outcomes: Outcomes) -> Score:
        share = outcomes.passed / len(outcomes.failures)
        score = Score(
            share if self.partial_credit else float(share == 1),
            parts={"tests": len(outcomes.failures), "passed": outcomes.passed},
        )
        first = next((failure for failure in outcomes.failures if failure), "")
        return replace(score, reason=first)


class _Pool:
    """Threads that each keep a worker."""

    def __init__(self, workers: int, limits: Limits, isolation: Isolation) -> None:
        self.process = os.getpid()
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix="code-tests")
        self._limits = limits
        self._isolation: Isolation = isolation
        self._own = threading.local()
        self._workers: list[Worker] = []
        self._end = weakref.finalize(self, _close, self.process, self.threads, self._workers)

    def close(self) -> None:
        """Wait for the work at hand and end the judges; happens by itself when the pool goes."""
        self._end()

    def worker(self) -> Worker:
        """The calling thread's."""
        worker: Worker | None = getattr(self._own, "worker", None)
        if worker is None:
            worker = self._own.worker = Worker(self._limits, self._isolation)
            self._workers.append(worker)
        return worker


def _close(process: int, threads: ThreadPoolExecutor, workers: list[Worker]) -> None:
    if process != os.getpid():  # a fork's copy: the judges are not its own
        return
    threads.shutdown()
    for worker in workers:
        worker.close()
