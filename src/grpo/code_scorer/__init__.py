"""The held-out scorer of programs: does the answer pass the problem's published tests?

Named as ``grpo.code_scorer.code_passes_tests``, with the reading ``final_code``. It runs in the same kind of sandbox as
the reward ``code_tests`` and shares nothing else with it: how tests are read, run and believed is written anew, since
a mistake in the reward's judge would be learnt and then certified.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from grpo.code_scorer.judgement import Bench, NoVerdict
from grpo.code_scorer.published_tests import UnusableTests, published_tests
from grpo.records import Problem, Score
from grpo.rewards.sandbox import Isolation, Limits, SandboxFailed, SandboxUnavailable, require

__all__ = ["CodePassesTests", "code_passes_tests"]


@dataclass(frozen=True)
class CodePassesTests:
    """1 where the program passes every test of its problem, else 0 with the first failure as the reason.

    Unscorable where nothing is known of the program: no tests, or none that can judge, or no sandbox here.

    Args:
        limit_seconds: wall-clock time of one program with all its tests; below the minute that a scorer gets.
        memory_mb: address space of each of its processes.
        processes: processes and threads of one program.
        isolation: as for the reward ``code_tests`` (docs/security.md).
    """

    # How a program is found in a completion, where nobody says otherwise.
    natural_reading: ClassVar[str] = "final_code"

    limit_seconds: float = 10.0
    memory_mb: int = 512
    processes: int = 8
    isolation: Isolation = "bubblewrap"

    def __call__(self, problem: Problem, answer: str | None) -> Score:
        if answer is None:
            return Score(0.0, reason="no answer")
        limits = Limits(seconds=self.limit_seconds, memory_mb=self.memory_mb, processes=self.processes)
        try:
            require(self.isolation)
            tests = published_tests(problem.metadata)
            failure = Bench(limits, self.isolation).failure(tests.before + answer, tests)
        except (UnusableTests, NoVerdict, SandboxFailed, SandboxUnavailable) as error:
            return Score.unscorable(str(error)[:300])
        except OSError as error:  # this machine has no process, file or memory left for one more sandbox
            return Score.unscorable(f"the sandbox cannot be started: {error}"[:300])
        return Score(float(not failure), reason=failure)


code_passes_tests = CodePassesTests()
