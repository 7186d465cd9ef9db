"""The reward of a program, from a problem's metadata and a completion to a score."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from grpo.records import Problem, Score
from grpo.rewards import BatchReward, code_worker, sandbox, sandbox_bubblewrap
from grpo.rewards.code_tests import CodeTests
from grpo.rewards.sandbox import SandboxUnavailable
from grpo.rewards.sandbox_process import Sandbox

ADD = {"tests": [f"assert add({n}, 1) == {n + 1}" for n in (1, 2, 3, 4)]}
RIGHT = "def add(a, b): return a + b"
# Right for the first two of the four tests.
HALF = "def add(a, b): return a + b if a < 3 else 0"


@pytest.fixture(scope="module")
def check() -> Iterator[CodeTests]:
    check = made(limit_seconds=5.0, workers=2)
    yield check
    check.close()


def made(**settings: Any) -> CodeTests:
    try:
        return CodeTests(**settings)
    except SandboxUnavailable as error:
        pytest.skip(f"programs cannot be isolated on this machine: {error}")


def problem(metadata: dict[str, Any]) -> Problem:
    return Problem("p", "q", "", "s", metadata)


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


def score(check: CodeTests, metadata: dict[str, Any], program: str) -> Score:
    return check(problem(metadata), fenced(program))


def test_a_right_program_gets_full_marks(check: CodeTests) -> None:
    assert score(check, ADD, RIGHT) == Score(1.0, parts={"tests": 4, "passed": 4})


def test_half_right_is_nothing_or_half(check: CodeTests) -> None:
    found = score(check, ADD, HALF)
    assert (found.value, found.parts) == (0.0, {"tests": 4, "passed": 2})
    assert found.reason == "test 3: AssertionError"
    partial = made(partial_credit=True, workers=1)
    assert score(partial, ADD, HALF).value == 0.5
    assert score(partial, ADD, RIGHT).value == 1.0
    assert score(partial, ADD, "").value == 0.0
    partial.close()


def test_each_test_runs_once(check: CodeTests) -> None:
    """The program numbers the calls it gets: were a test run twice, the numbers would not fit."""
    counting = "import itertools\nnumbers = itertools.count(1)\ndef number(): return next(numbers)"
    tests = {"tests": ["assert number() == 1", "assert number() == 2", "assert number() == 3"]}
    assert score(check, tests, counting).value == 1.0


def test_a_failure_does_not_hide_the_tests_after_it() -> None:
    partial = made(partial_credit=True, workers=1)
    tests = {"tests": ["assert f(0) == 1", "assert f(1) == 1", "assert f(2) == 1", "assert f(3) == 1"]}
    assert score(partial, tests, "def f(x): return 1 // (x % 2)").value == 0.5
    partial.close()


def test_the_last_python_block_counts(check: CodeTests) -> None:
    wrong, right = fenced("def add(a, b): return 0"), fenced(RIGHT)
    assert check(problem(ADD), f"{wrong}\n{right}").value == 1.0
    assert check(problem(ADD), f"{right}\n{wrong}").value == 0.0
    assert check(problem(ADD), f"{right}\n```bash\nrm -rf /\n```").value == 1.0
    assert check(problem(ADD), RIGHT) == Score(0.0, reason="no fenced block of Python")


def test_a_batch_keeps_its_order(check: CodeTests) -> None:
    assert isinstance(check, BatchReward)
    programs = [(RIGHT, 1.0), (HALF, 0.0), ("import time; time.sleep(0.3)\n" + RIGHT, 1.0), ("", 0.0)] * 5
    found = check.score_batch([(problem(ADD), fenced(program)) for program, _ in programs])
    assert [each.value for each in found] == [value for _, value in programs]
    assert check.score_batch([]) == []


@pytest.mark.parametrize(
    ("test", "program"),
    [
        ("assert f((1, 2), {'a': [None, True]}) == {1: 'x', None: (1, 2)}", "def f(a, b): return {1: 'x', None: a}"),
        ("assert f() == {1, 2} and isinstance(f(), set)", "def f(): return {1, 2}"),
        ("assert list(f(3)) == [0, 1, 2]", "def f(n):\n    for i in range(n): yield i"),
        ("assert list(f(3)) == [0, 1, 2]", "def f(n): return range(n)"),
        ("assert f(a=1, b=2) == 3", "def f(a, b): return a + b"),
        ("assert f(2) == 2 ** 5000", "def f(n): return n ** 5000"),
        ("assert abs(f(2) - 1.4142) < 1e-4", "import math\ndef f(n): return math.sqrt(n)"),
        ("assert f(f(f(1))) == 4 and f(g(1)) == 1", "def f(n): return n + 1\ndef g(n): return n - 1"),
        ("assert sorted(map(f, [3, 1])) == [2, 6]", "f = lambda n: 2 * n"),
        ("try:\n    f(-1)\nexcept ValueError as e:\n    assert 'small' in str(e)\nelse:\n    assert False",
         "def f(n):\n    if n < 0: raise ValueError('too small')"),
        ("assert f('é\\ud800') == 'é\\ud800!'", "def f(t): return t + '!'"),
        ("assert f(2) == (1, 2)",
         "from dataclasses import dataclass, astuple\n@dataclass\nclass P:\n    x: int\n    y: int\n"
         "def f(n): return astuple(P(1, n))"),
        ("assert f([3, 1]) == [1, 3]",
         "import threading\ndef f(v):\n    t = threading.Thread(target=v.sort); t.start(); t.join(); return v"),
        ("assert f('a') == 'a'", "def f(t):\n    open('x', 'w').write(t)\n    return open('/tmp/x').read()"),
        ("assert f() == '1'", "import json, re, random, datetime, heapq, functools\ndef f(): return json.dumps(1)"),
        ("assert f() == 1", "if __name__ == '__main__': raise SystemExit('a demonstration')\ndef f(): return 1"),
        ("assert f(1000) == 500500", "import sys\nsys.setrecursionlimit(5000)\ndef f(n): return n and n + f(n - 1)"),
    ],
)  # fmt: skip
def test_what_programs_ordinarily_do_works(check: CodeTests, test: str, program: str) -> None:
    assert score(check, {"tests": [test]}, program) == Score(1.0, parts={"tests": 1, "passed": 1})


def test_a_name_of_the_tests_cannot_be_taken_over(check: CodeTests) -> None:
    tests = {"setup": "def near(a, b): return abs(a - b) < 0.1", "tests": ["assert all([near(f(1), 2)])"]}
    takes_over = "all = near = isinstance = lambda *a: True\ndef f(x): return 0"
    assert score(check, tests, takes_over).value == 0.0
    assert score(check, tests, "def f(x): return 2.01").value == 1.0


def test_arguments_go_by_value(check: CodeTests) -> None:
    tests = {"tests": ["x = [3, 1]\nassert f(x) == x == [3, 1]"]}
    assert score(check, tests, "def f(x):\n    copy = list(x)\n    x.clear()\n    return copy").value == 1.0


def test_tests_that_draw_their_examples_draw_the_same(check: CodeTests) -> None:
    tests = {"tests": ["import random\nassert f(random.random()) == 1"]}
    first = score(check, tests, "def f(x): raise ValueError(x)").reason
    assert score(check, tests, "def f(x): raise ValueError(x)").reason == first


PAIRS = {"stdin_stdout": [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "20 22", "stdout": "42"}]}


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", 2),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())), ' \\n\\n')", 2),
        ("if __name__ == '__main__': print(sum(map(int, input().split())))", 2),
        ("print(sum(map(int, input().split())))\nexit()\n1 / 0", 2),
        ("print(3)", 1),
        ("print(3)\nraise SystemExit(1)", 0),
        ("print(3, flush=True)\n1 / 0", 0),
        ("print(3, flush=True)\nimport os\nos.kill(os.getpid(), 9)", 0),
        ("print(' 3')", 0),
        ("import sys\nsys.stderr.write('3')", 0),
        ("", 0),
    ],
)
def test_pairs_of_input_and_output(check: CodeTests, program: str, passed: int) -> None:
    assert score(check, PAIRS, program).parts == {"tests": 2, "passed": passed}


def test_a_script_without_end_fails() -> None:
    check = made(limit_seconds=0.5, workers=1)
    start = time.monotonic()
    assert "within the time limit" in score(check, PAIRS, "while True: pass").reason
    assert "without end" in score(check, PAIRS, "while True: print('x' * 1000)").reason
    assert (
        "within the time limit"
        in score(check, PAIRS, "import os, time\nif os.fork() == 0: time.sleep(99)\nos.close(1); time.sleep(99)").reason
    )
    assert time.monotonic() - start < 3 * 2 * 0.5 + 2
    check.close()


def test_the_limit_is_on_all_runs_of_a_script_together() -> None:
    check = made(limit_seconds=1.0, workers=1, partial_credit=True)
    pairs = {"stdin_stdout": [{"stdin": str(n), "stdout": str(n)} for n in range(20)]}
    start = time.monotonic()
    found = score(check, pairs, "import time\nprint(input(), flush=True)\ntime.sleep(0.4)")
    assert time.monotonic() - start < 4.0
    assert found.parts["passed"] in (1, 2)
    assert found.reason == "the program did not end within the time limit"
    check.close()


def test_a_loop_of_the_tests_cannot_be_ended_by_the_program(check: CodeTests) -> None:
    tests = {"tests": ["assert all(map(is_even, [2, 4]))"]}
    assert score(check, tests, "def is_even(n): raise StopIteration").value == 0.0
    assert score(check, tests, "def is_even(n): return n % 2 == 0").value == 1.0


def test_a_machine_that_starts_no_process_gives_no_zero_and_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    check = made(workers=1)
    start = Sandbox._popen

    def sometimes(self: Sandbox, *words: Any, **settings: Any) -> Any:
        failures.append("")
        if len(failures) == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return start(self, *words, **settings)

    failures: list[str] = []
    monkeypatch.setattr(Sandbox, "_popen", sometimes)
    one, other = check.score_batch([(problem(PAIRS), fenced("print(3)")), (problem(ADD), fenced(RIGHT))])
    assert (one.value, other.value) == (None, 1.0)
    assert "temporarily unavailable" in one.reason
    check.close()


def test_a_background_process_does_not_delay_a_verdict(check: CodeTests) -> None:
    leaves_one = "import os, time\nif os.fork() == 0: time.sleep(1000)\n"
    start = time.monotonic()
    assert score(check, ADD, leaves_one + RIGHT).value == 1.0
    assert score(check, PAIRS, leaves_one + "print(sum(map(int, input().split())))").value == 1.0
    assert time.monotonic() - start < 4.0


def test_without_tests_it_is_not_applicable(check: CodeTests) -> None:
    assert not score(check, {}, RIGHT).applicable


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"tests": []}, "metadata.tests"),
        ({"tests": ["assert True"]}, "never calls the solution"),
        ({"tests": ["assert add(open)"]}, "other than plain data"),
        ({"tests": ["assert add == add"]}, "other than by calling it"),
        ({"tests": ["assert add.name"]}, "other than by calling it"),
        ({"tests": ["assert add(1)"], "setup": "1 / 0"}, "the setup of the tests fails: ZeroDivisionError"),
        ({"tests": ["while True: pass"]}, "a test does not end, and never called the solution before"),
        ({"tests": ["assert add(1)=="]}, "a test or its setup is no Python"),
    ],
)
def test_what_is_wrong_with_the_tests_is_no_zero(check: CodeTests, metadata: dict[str, Any], reason: str) -> None:
    found = score(check, metadata, RIGHT)
    assert found.value is None
    assert found.applicable
    assert reason in found.reason


@pytest.mark.parametrize("lazy", [True, False])
def test_a_program_gets_its_zero_where_it_had_its_part_in_the_tests_hanging(lazy: bool) -> None:
    """It leaves them no time, or they call it before: no program can choose to be without a score."""
    check = made(limit_seconds=0.8, workers=1)
    program = f"import time\ntime.sleep({0.6 if lazy else 0})\ndef add(a, b):\n    return a + b\n"
    found = score(check, {"tests": ["while True: pass" if lazy else "add(1, 2)\nwhile True: pass"]}, program)
    check.close()
    assert found.value == 0.0
    assert "did not end within the time limit" in found.reason


def judge_pid(check: CodeTests) -> int:
    """The first process inside the judge's sandbox, by its handle."""
    pool = check._pool
    assert pool is not None
    handle = pool._workers[0]._judge._first_process  # type: ignore[union-attr]
    with open(f"/proc/self/fdinfo/{handle}", encoding="utf-8") as file:  # noqa: PTH123
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))


def test_a_judge_that_is_killed_gives_no_zero_and_is_replaced() -> None:
    check = made(workers=1)
    assert score(check, ADD, RIGHT).value == 1.0
    os.kill(judge_pid(check), signal.SIGKILL)
    found = score(check, ADD, RIGHT)
    assert found.value is None
    assert "the judge gave no verdict" in found.reason
    assert score(check, ADD, RIGHT).value == 1.0
    check.close()


def test_a_sandbox_that_does_not_come_up_gives_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    check = made(workers=1)
    assert score(check, ADD, RIGHT).value == 1.0
    monkeypatch.setattr(sandbox_bubblewrap, "SYSTEM_LIBRARIES", ())
    sandbox_bubblewrap._visible.cache_clear()
    for metadata in (ADD, PAIRS):
        found = score(check, metadata, RIGHT)
        assert found.value is None
        assert "bwrap:" in found.reason
    monkeypatch.undo()
    sandbox_bubblewrap._visible.cache_clear()
    assert score(check, ADD, RIGHT).value == 1.0
    check.close()


def test_it_can_be_copied_and_sent(check: CodeTests) -> None:
    assert score(check, ADD, RIGHT).value == 1.0
    for other in (copy.deepcopy(check), pickle.loads(pickle.dumps(check))):
        assert score(other, ADD, RIGHT).value == 1.0
        other.close()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"limit_seconds": 0.0}, "seconds is 0"),
        ({"memory_mb": -1}, "memory_mb is -1"),
        ({"isolation": "none"}, "isolation is 'none': choose bubblewrap or none_i_accept"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        CodeTests(**settings)


@pytest.fixture
def no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PATH", "/nowhere")
    sandbox._trial.cache_clear()
    yield
    monkeypatch.undo()
    sandbox._trial.cache_clear()


@pytest.mark.usefixtures("no_bubblewrap")
def test_without_bubblewrap_nothing_runs() -> None:
    with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap") as caught:
        CodeTests()
    assert "isolation: none_i_accept_that_completions_run_as_me" in str(caught.value)


@pytest.mark.usefixtures("no_bubblewrap")
def test_without_isolation_where_that_is_said_in_so_many_words() -> None:
    check = CodeTests(limit_seconds=1.0, isolation="none_i_accept_that_completions_run_as_me", workers=1)
    assert score(check, ADD, RIGHT).value == 1.0
    assert score(check, ADD, HALF).value == 0.0
    assert score(check, ADD, "while True: pass").value == 0.0
    assert score(check, PAIRS, "print(sum(map(int, input().split())))").value == 1.0
    leaves_one = "import os, time\nif os.fork() == 0: time.sleep(1000)\n"
    start = time.monotonic()
    assert score(check, ADD, leaves_one + RIGHT).value == 1.0
    assert time.monotonic() - start < 3.0
    check.close()


def test_a_judge_that_is_stuck_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setup code that never ends is the data's fault, and the next program finds a judge again."""
    monkeypatch.setattr(code_worker, "START_SECONDS", 1.0)
    monkeypatch.setattr(code_worker, "_PATIENCE_SECONDS", 0.2)
    check = made(limit_seconds=0.5, workers=1)
    found = score(check, {"setup": "while True: pass", "tests": ["assert add(1)"]}, RIGHT)
    assert found.value is None
    assert "the judge gave no verdict" in found.reason
    assert score(check, ADD, RIGHT).value == 1.0
    check.close()


def test_what_the_program_makes_of_a_test_is_bounded() -> None:
    """A test that runs for ever on what a program answers is ended, against the program."""
    check = made(limit_seconds=0.5, workers=1)
    start = time.monotonic()
    found = score(check, {"tests": ["assert sum(range(f())) == 0"]}, "def f(): return 10**12")
    assert (found.value, "within the time limit" in found.reason) == (0.0, True)
    assert time.monotonic() - start < 2.5
    assert score(check, ADD, RIGHT).value == 1.0
    check.close()
