"""Checks in worker processes: what a check does to its process must not be done to ours."""

import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from grpo.records import Problem, Score
from grpo.rewards import Reward, RewardComponent, judge, judge_batch
from grpo.rewards.judging import Judges

PROBLEM = Problem("p", "1 + 1 =", "2", "sums")


def right(problem: Problem, completion: str) -> Score:
    return Score(float(completion == problem.answer))


def obeys(_: Problem, completion: str) -> Score:
    """Does what the completion says."""
    if completion == "loop":
        while True:
            pass
    if completion == "sleep":
        time.sleep(60)
    if completion == "exit":
        os._exit(7)
    if completion == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "leave":
        sys.exit(0)
    if completion == "raise":
        raise RuntimeError("no")
    if completion == "unsendable":
        return Score(1.0, parts={"f": lambda: 0})
    if completion == "nan":
        return Score(float("nan"))
    return Score(0.5, parts={"process": os.getpid()})


def takes_half_a_second(_problem: Problem, _completion: str) -> Score:
    time.sleep(0.5)
    return Score(0.5, parts={"process": os.getpid()})


class Batch:
    def __init__(self, lose: int = 0) -> None:
        self.lose = lose
        self.batches: list[int] = []

    def __call__(self, problem: Problem, completion: str) -> Score:
        return self.score_batch([(problem, completion)])[0]

    def score_batch(self, items: Sequence[tuple[Problem, str]]) -> list[Score]:
        self.batches.append(len(items))
        if any(text == "raise" for _, text in items):
            raise RuntimeError("the server is down")
        for problem, _ in items:
            problem.metadata.get("tests", []).clear()
        return [Score(float(len(text))) for _, text in items][self.lose :]


@pytest.fixture(scope="module")
def judges() -> Iterator[Judges]:
    with Judges({"right": RewardComponent(right), "obeys": RewardComponent(obeys, limit_seconds=1.0)}) as made:
        yield made


def said(judges: Judges, *completions: str) -> list[dict[str, Score]]:
    return judges.judge([(PROBLEM, text) for text in completions])


def test_scores_come_in_the_order_of_the_completions_from_other_processes(judges: Judges) -> None:
    scores = said(judges, *(str(i % 3) for i in range(50)))
    assert [score["right"].value for score in scores] == [float(i % 3 == 2) for i in range(50)]
    assert os.getpid() not in {score["obeys"].parts["process"] for score in scores}


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("loop", "no verdict within limit_seconds = 1"),
        ("sleep", "no verdict within limit_seconds = 1"),
        ("exit", r"ended its process \(exit code 7\)"),
        ("die", r"ended its process \(exit code -9\)"),
        ("leave", "SystemExit: 0"),
        ("raise", "RuntimeError: no"),
        ("unsendable", "parts that cannot be sent back from a worker"),
        ("nan", "the reward's value is nan"),
    ],
)
def test_what_one_completion_does_costs_it_its_score_and_no_other(judges: Judges, order: str, reason: str) -> None:
    start = time.monotonic()
    before, bad, after = (score["obeys"] for score in said(judges, "a", order, "b"))
    assert time.monotonic() - start < 1.0 + 5.0  # the limit, and a busy machine's new worker
    assert (before.value, bad.value, after.value) == (0.5, None, 0.5)
    assert re.search(reason, bad.reason), bad.reason


def test_a_check_that_cannot_be_sent_away_runs_here(judges: Judges) -> None:
    here: list[int] = []

    def local(_: Problem, completion: str) -> Score:
        here.append(os.getpid())
        return Score(float(len(completion)))

    with Judges({"local": RewardComponent(local), "unlimited": RewardComponent(obeys, limit_seconds=None)}) as judges:
        [scores] = said(judges, "abc")
    assert scores["local"].value == 3.0
    assert here == [os.getpid()]
    assert scores["unlimited"].parts["process"] == os.getpid()


def test_a_batch_is_judged_at_once_and_here() -> None:
    check = Batch()
    with Judges({"batch": RewardComponent(check)}) as judges:
        assert [score["batch"].value for score in said(judges, "a", "bb", "")] == [1.0, 2.0, 0.0]
        assert check.batches == [3]
        assert said(judges) == []


def test_one_that_makes_its_batch_raise_is_alone_unscored() -> None:
    check = Batch()
    with Judges({"batch": RewardComponent(check)}) as judges:
        scores = [score["batch"] for score in said(judges, "a", "raise", "bb")]
    assert [score.value for score in scores] == [1.0, None, 2.0]
    assert "RuntimeError: the server is down" in scores[1].reason
    assert check.batches == [3, 1, 1, 1]


def test_a_batch_of_another_number_leaves_every_completion_unscored() -> None:
    check = Batch(lose=1)
    with Judges({"batch": RewardComponent(check)}) as judges:
        scores = [score["batch"] for score in said(judges, "a", "b")]
    assert [score.value for score in scores] == [None, None]
    assert all("returned 1 scores for 2 completions" in score.reason for score in scores)
    assert check.batches == [2]


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, _: Problem, completion: str) -> Score:
        return Score(1.0)


def test_a_check_that_would_lose_its_limit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rewards\.locked: .* make it picklable, or set limit_seconds to null"):
        Judges({"locked": RewardComponent(Locked())})
    with Judges({"locked": RewardComponent(Locked(), limit_seconds=None)}) as judges:
        assert said(judges, "a")[0]["locked"].value == 1.0


def test_no_process_outlives_its_judges() -> None:
    before = set(psutil.Process().children(recursive=True))
    with Judges({"obeys": RewardComponent(obeys, limit_seconds=0.5)}) as judges:
        said(judges, "a")
        assert set(psutil.Process().children(recursive=True)) - before
        said(judges, "loop", "sleep", "exit")
    assert not set(psutil.Process().children(recursive=True)) - before


@pytest.mark.parametrize("delay", [0.0, 0.15, 1.5])
def test_a_signal_to_all_processes_of_a_job_costs_no_completion_its_score(delay: float) -> None:
    """The training ends after its round then, and the round needs its checks, whose workers may only be starting."""
    before = set(psutil.Process().children(recursive=True))
    told = set()

    def stop_all() -> None:
        deadline = time.monotonic() + 10
        while not told and time.monotonic() < deadline:
            told.update(set(psutil.Process().children(recursive=True)) - before)
            for worker in told:
                worker.send_signal(signal.SIGTERM)

    stopping = threading.Timer(delay, stop_all)
    with Judges({"slow": RewardComponent(takes_half_a_second, limit_seconds=20.0)}) as judges:
        stopping.start()
        scores = said(judges, *"abcdefgh")
        stopping.join()
    assert told
    assert {row["slow"].value for row in scores} == {0.5}


def starts_a_process(_problem: Problem, completion: str) -> Score:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,), daemon=True)
    child.start()
    Path(completion).write_text(str(child.pid))
    time.sleep(60)
    return Score(1.0)


def test_what_a_check_has_started_ends_with_it(tmp_path: Path) -> None:
    with Judges({"starts": RewardComponent(starts_a_process, limit_seconds=2.0)}, workers=1) as judges:
        assert said(judges, str(tmp_path / "child"))[0]["starts"].value is None
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_worker_in_an_endless_check_ends_with_a_training_that_was_killed() -> None:
    program = (
        "from test_judging import *\n"
        "if __name__ == '__main__':\n"
        "    judges = Judges({'obeys': RewardComponent(obeys, limit_seconds=600.0)}, workers=1)\n"
        "    print(said(judges, 'a')[0]['obeys'].parts['process'], flush=True)\n"
        "    said(judges, 'loop')\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    started = [sys.executable, "-c", program]
    with subprocess.Popen(started, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    worker.wait(timeout=20)


def test_nothing_is_started_that_is_not_needed() -> None:
    judges = Judges({"batch": RewardComponent(Batch())})
    said(judges, "a")
    assert judges._pool is None
    judges.close()


def test_imports_take_no_time_off_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker unpickles its checks before any clock runs."""
    (tmp_path / "slow_to_import.py").write_text(
        "import time\ntime.sleep(1.5)\nfrom grpo.records import Score\n\n\ndef check(problem, completion):\n"
        "    return Score(1.0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    import slow_to_import  # type: ignore[import-not-found]

    check: Reward = slow_to_import.check
    with Judges({"slow": RewardComponent(check, limit_seconds=1.0)}, workers=1) as judges:
        assert said(judges, "a")[0]["slow"].value == 1.0


def draws(_: Problem, completion: str) -> Score:
    return Score(random.random(), parts={"text": completion})


def test_a_check_that_draws_says_the_same_of_the_same_and_here_as_in_a_worker() -> None:
    random.seed(5)
    state = random.getstate()
    with Judges({"pooled": RewardComponent(draws), "here": RewardComponent(draws, limit_seconds=None)}) as judges:
        first, other, again = said(judges, "a", "b", "a")
    assert first["pooled"].value == first["here"].value == again["pooled"].value != other["pooled"].value
    assert random.getstate() == state


def test_a_check_cannot_change_the_problem() -> None:
    problem = Problem("p", "q", "2", "sums", {"tests": ["a"]})

    def changes(seen: Problem, _: str) -> Score:
        seen.metadata["tests"].clear()
        return Score(1.0)

    judge(changes, problem, "")
    judge_batch(Batch(), [(problem, "a")])
    assert problem.metadata == {"tests": ["a"]}
