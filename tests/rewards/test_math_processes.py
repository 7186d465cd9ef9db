"""The checking processes: the limit holds, from wherever they are called, and nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest

from grpo.records import Problem
from grpo.rewards import math_processes
from grpo.rewards.math_answer import MathAnswer, math_answer
from grpo.rewards.math_processes import CHECKER, CheckFailed

PAIRS = [
    (r"\sqrt{12}", r"\boxed{2\sqrt{3}}"),
    (r"\sqrt{12}", r"\boxed{3\sqrt{2}}"),
    ("x^2-4", "$(x-2)(x+2)$"),
    ("x<3", r"\boxed{(-\infty,3)}"),
    (r"\{1,2\}", r"\boxed{2, 1}"),
    ("(1,2)", r"\boxed{(2,1)}"),
    ("5", "So 5 in all."),
    ("5", ""),
]
VERDICTS = [1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0]
# What sympy cannot finish, and no rule of ours refuses.
HOSTILE = [
    r"e^{e^{e^{e^{e}}}}",
    r"\Gamma(10^{10})",
    r"\sin(\sin(\sqrt{x}))" * 12,
    r"(x+y+z)^{300}",
    r"\sqrt[3]{" * 30 + "2" + "}" * 30,
]


def verdicts() -> list[float | None]:
    return [math_answer(Problem("p", "q", gold, "s"), completion).value for gold, completion in PAIRS]


def put_verdicts(queue: SimpleQueue[list[float | None]]) -> None:
    queue.put(verdicts())


def gone(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def children(pid: int) -> list[int]:
    return [int(child) for child in (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text().split()]


def test_the_main_thread() -> None:
    assert verdicts() == VERDICTS


def test_eight_threads_at_once() -> None:
    with ThreadPoolExecutor(8) as threads:
        assert [one.result() for one in [threads.submit(verdicts) for _ in range(16)]] == [VERDICTS] * 16


@pytest.mark.parametrize("daemon", [True, False])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_process(method: str, daemon: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts() == VERDICTS  # so that a forked process inherits a helper in use
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=put_verdicts, args=(queue,), daemon=daemon)
    process.start()
    process.join()  # before the queue is read, which would wait for ever for a process that fails
    assert process.exitcode == 0
    assert queue.get() == VERDICTS
    assert verdicts() == VERDICTS


@pytest.mark.parametrize("answer", HOSTILE)
@pytest.mark.parametrize("gold", ["5", r"x\sqrt{2}"])
def test_what_cannot_be_finished_is_answered_in_time(gold: str, answer: str) -> None:
    start = time.monotonic()
    score = MathAnswer(limit_seconds=1.0)(Problem("p", "q", gold, "s"), f"\\boxed{{{answer}}}")
    assert time.monotonic() - start < 1.0 + 1.0
    assert score.value in (0.0, None)
    assert score.value == 0.0 or score.reason == "no verdict within 1 s"


def test_after_a_hang_all_goes_on_and_no_process_stays() -> None:
    check = MathAnswer(limit_seconds=0.5, workers=4)
    hanging = [(Problem("p", "q", "x", "s"), rf"\boxed{{\Gamma({i}*10^{{9}})}}") for i in range(2, 10)]
    scores = check.score_batch(hanging)
    assert {score.value for score in scores} == {None}
    assert check.failures == 8
    assert verdicts() == VERDICTS
    helper = CHECKER.helper
    assert helper is not None
    assert eventually(lambda: len(children(helper.pid)) == len(CHECKER.idle))
    assert not any(gone(child) for child in children(helper.pid))  # no zombies


def test_a_worker_that_is_killed_makes_one_row_unscorable() -> None:
    CHECKER.close()
    assert verdicts() == VERDICTS
    assert CHECKER.helper is not None
    for child in children(CHECKER.helper.pid):
        os.kill(child, signal.SIGKILL)
    with pytest.raises(CheckFailed, match="the checking process died"):
        CHECKER.same(gold="x", answer="2x-x", limit_seconds=5.0)
    assert CHECKER.same(gold="x", answer="2x-x", limit_seconds=5.0)


def test_a_helper_that_is_killed_is_replaced() -> None:
    assert verdicts() == VERDICTS
    helper = CHECKER.helper
    assert helper is not None
    helper.kill()
    helper.wait()
    while CHECKER.idle:
        CHECKER.idle.pop().close()
    assert verdicts() == VERDICTS
    assert CHECKER.helper is not helper


OWNER = """
import os, sys, threading, time
from grpo.records import Problem
from grpo.rewards.math_answer import math_answer
from grpo.rewards.math_processes import CHECKER
problem = Problem("p", "q", r"\\sqrt8", "s")
assert math_answer(problem, r"\\boxed{2\\sqrt2}").value == 1.0
if "hang" in sys.argv:
    threading.Thread(target=math_answer, args=(problem, r"\\boxed{e^{e^{e^{e^{e}}}}}"), daemon=True).start()
    time.sleep(0.3)
pid = CHECKER.helper.pid
print(pid, *open(f"/proc/{pid}/task/{pid}/children").read().split(), flush=True)
if "wait" in sys.argv:
    time.sleep(60)
if "nothing" in sys.argv:
    os._exit(1)
"""


@pytest.mark.parametrize("arguments", [[], ["hang"], ["nothing"], ["wait"], ["hang", "wait"]], ids=" ".join)
def test_nothing_outlives_its_owner(arguments: list[str]) -> None:
    """Whether it ends by itself, at once without tidying up, or is killed, and with a check under way."""
    path = os.pathsep.join(path for path in sys.path if path)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    if "wait" in arguments:
        owner.kill()
    _, errors = owner.communicate()
    assert len(pids) >= 2
    assert errors == ""
    assert eventually(lambda: all(map(gone, pids)))


def test_a_thousand_bad_answers_write_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    problem = Problem("p", "q", r"\sqrt{2}", "s")
    bad = [(problem, f"\\boxed{{\\frac{{{i}}}{{ \\sqrt}} ]] \\foo }}") for i in range(1000)]
    scores = math_answer.score_batch(bad)
    assert {score.value for score in scores} == {0.0}
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def slow_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A helper that takes two seconds longer to start, as on a busy machine."""
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    CHECKER.close()
    yield
    CHECKER.close()


@pytest.mark.usefixtures("slow_start")
def test_the_start_is_not_in_the_first_items_time() -> None:
    start = time.monotonic()
    assert CHECKER.same(gold="x", answer="2x-x", limit_seconds=0.5)
    assert time.monotonic() - start > 2.0
    start = time.monotonic()
    with pytest.raises(CheckFailed, match=r"no verdict within 0\.5 s"):
        CHECKER.same(gold="x", answer=r"\Gamma(2*10^{9})", limit_seconds=0.5)
    assert time.monotonic() - start < 0.5 + 1.0


@pytest.mark.usefixtures("slow_start")
def test_the_start_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_processes, "START_SECONDS", 0.5)
    with ThreadPoolExecutor(3) as threads:
        start = time.monotonic()
        asked = [threads.submit(CHECKER.same, gold="x", answer="2x-x", limit_seconds=5.0) for _ in range(3)]
        reasons = {str(one.exception()) for one in asked}
    assert time.monotonic() - start < 10
    assert "the checking process was not ready within 0.5 s" in reasons
    assert reasons <= {"the checking process was not ready within 0.5 s", "the checking process died"}
    monkeypatch.setattr(math_processes, "START_SECONDS", 60.0)
    assert CHECKER.same(gold="x", answer="2x-x", limit_seconds=5.0)


@pytest.mark.usefixtures("slow_start")
def test_a_reward_sent_to_another_process_starts_what_it_needs_before_any_item() -> None:
    check: MathAnswer = pickle.loads(pickle.dumps(MathAnswer()))
    start = time.monotonic()
    assert check(Problem("p", "q", "x", "s"), r"\boxed{2x-x}").value == 1.0
    assert time.monotonic() - start < 1.5


def test_ordinary_answers_go_fast() -> None:
    """Hundreds a second at least, even on a busy machine: plain numbers, fractions, and some surds."""
    verdicts()
    items = [(Problem("p", "q", f"{i}", "s"), f"That makes {i}.0 in all.") for i in range(400)]
    items += [(Problem("p", "q", rf"\frac{{{i}}}{{7}}", "s"), rf"\boxed{{\frac{{{2 * i}}}{{14}}}}") for i in range(190)]
    items += [(Problem("p", "q", rf"{i}\sqrt{{2}}", "s"), rf"\boxed{{\sqrt{{2}}\cdot {i}}}") for i in range(2, 12)]
    start = time.monotonic()
    scores = math_answer.score_batch(items)
    assert len(items) / (time.monotonic() - start) > 200
    assert {score.value for score in scores} == {1.0}


def test_the_helper_starts_light() -> None:
    """What it imports is waited for by the first comparison of a run."""
    heavy = "{'torch', 'transformers', 'lightning'}"
    code = f"import sys, grpo.rewards.math_worker; sys.exit(bool({heavy} & set(sys.modules)))"
    path = os.pathsep.join(path for path in sys.path if path)
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}).returncode == 0
