"""Two processes that are handed uneven work, or lose each other, never wait for ever.

Most situations go one after the other through one pair of processes a strategy, in ``situations.py``: starting Python
takes longer than most of them.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures_policy import policy_folder, problem_folder
from fixtures_processes import STRATEGIES, Ended, run_launched, together, written_config

from tests.distributed import situations

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

SCRIPT = Path(situations.__file__)
LIMIT = situations.LIMIT_SECONDS
EVEN = ("flat_groups_everywhere",)
REFUSALS = {
    "groups_that_cannot_be_shared": "ValueError: data.groups_per_round is 3, which 2 processes cannot share evenly: "
    "make it 2 or 4",
    "rewards_that_fail_in_one_process": "RewardFailure: rewards failed on 8 of 16 rollouts",
    "a_reward_that_raises_in_one_process": "'made' failed on 8, first with: KeyError: 'a fault of the reward'",
    "groups_that_may_not_stay_flat_in_one_process": "OnlyFlatGroups: 2 groups stayed flat",
    "a_gradient_that_is_not_finite_in_one_process": "NonFiniteGradient: the gradient's norm is",
}


@pytest.fixture(scope="module", params=["ddp", "fsdp2", "deepspeed_1", "deepspeed_2", "deepspeed_3"])
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Of each process, by situation."""
    folder = tmp_path_factory.mktemp(request.param)
    policy_folder(folder / "policy")
    problem_folder(folder / "problems", train=6, validation=4)
    count = len(situations.THROUGH) + len(situations.REFUSED)
    ended = together([sys.executable, str(SCRIPT), str(folder), request.param], 2, folder / "printed", count * LIMIT)
    assert [one.status for one in ended] == [0, 0], "\n".join(one.output[-2000:] for one in ended)
    names = [situation.__name__ for situation in (*situations.THROUGH, *situations.REFUSED)]
    return {name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(2)] for name in names}


@pytest.mark.parametrize("name", [situation.__name__ for situation in situations.THROUGH])
def test_an_uneven_situation_goes_through(verdicts: dict[str, list[Any]], name: str) -> None:
    """In time, with every round and the same weights in both processes, and it was uneven indeed."""
    one, two = verdicts[name]
    print(name, one, two)
    rounds = 3 if name.startswith("resumed") else 2
    for verdict in (one, two):
        assert not verdict["error"]
        assert verdict["seconds"] < LIMIT
        assert verdict["rounds"] == rounds
    assert one["updates"] == two["updates"] == expected_updates(name, rounds)
    assert one["weights"] == two["weights"] != 0
    assert (one["own"] == two["own"]) is (name in EVEN)


def expected_updates(name: str, rounds: int) -> int:
    """Two epochs of two minibatches with rows, of three, in each of two rounds; none where nothing can be learnt."""
    return {"flat_groups_everywhere": 0, "minibatches_that_are_empty_in_one_process": 8}.get(name, rounds)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_go_on_ends_with_the_same_error_in_both(verdicts: dict[str, list[Any]], name: str) -> None:
    for verdict in verdicts[name]:
        assert REFUSALS[name] in verdict["error"]
        assert verdict["seconds"] < LIMIT
        assert verdict["rounds"] == 0
        assert verdict["loaded"] is (name != "groups_that_cannot_be_shared")


# ---- Processes that end, each started by itself, so that nobody ends the others for them. ----


def long_run(folder: Path, strategy: str, minutes: float = 30.0, **options: Any) -> list[str]:
    """The command of a run that would take far longer than the test."""
    changes = {"data": {"rounds": 2000}, "checkpoint_every_n_updates": 1000, "longest_wait_minutes": minutes}
    config = written_config(folder, STRATEGIES[strategy], 2, **options, **changes)
    return [sys.executable, "-m", "grpo", "train", "--config", config]


def in_a_round(folder: Path, do: Callable[[list[subprocess.Popen[bytes]]], None]) -> Callable[..., None]:
    """Do it when the first round is recorded and the second is under way."""

    def meanwhile(started: list[subprocess.Popen[bytes]]) -> None:
        deadline = time.monotonic() + 120
        while not list(folder.glob("runs/*/record/updates/round-00000-rank-*")):
            assert time.monotonic() < deadline
            assert all(process.poll() is None for process in started)
            time.sleep(0.05)
        do(started)

    return meanwhile


def assert_lost(one: Ended) -> None:
    assert one.seconds < LIMIT
    assert one.status == 75, one.output[-2000:]
    assert "grpo train: another process of this run ended, or did not come within longest_wait_minutes" in one.output


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("strategy", ["ddp", "deepspeed_2", "deepspeed_3"])
def test_a_process_whose_neighbour_is_killed_ends_and_says_so(tmp_path: Path, strategy: str, rank: int) -> None:
    folder = tmp_path / "run"
    kill = in_a_round(folder, lambda started: started[rank].kill())
    ended = together(long_run(folder, strategy), 2, tmp_path / "printed", 2 * LIMIT, kill)
    assert ended[rank].status == -signal.SIGKILL
    assert_lost(ended[1 - rank])


@pytest.mark.parametrize("strategy", ["ddp", "deepspeed_3"])
def test_a_process_that_stands_still_is_given_up_after_the_longest_wait(tmp_path: Path, strategy: str) -> None:
    folder = tmp_path / "run"
    stop = in_a_round(folder, lambda started: started[1].send_signal(signal.SIGSTOP))
    ended = together(long_run(folder, strategy, minutes=0.2), 2, tmp_path / "printed", 40, stop)
    assert ended[1].status == -signal.SIGKILL  # by the test, at its limit
    assert 12 <= ended[0].seconds < 40
    assert_lost(ended[0])


@pytest.mark.parametrize(("strategy", "rank"), [("ddp", 0), ("ddp", 1), ("deepspeed_3", 1)])
def test_a_fault_in_one_process_ends_both(tmp_path: Path, strategy: str, rank: int) -> None:
    fails = {"class_path": "fixtures_processes.FailsIn", "init_args": {"rank": rank}}
    command = long_run(tmp_path / "run", strategy, callbacks=[fails])
    ended = together(command, 2, tmp_path / "printed", 2 * LIMIT)
    assert ended[rank].status == 1
    assert "no space left on the device" in ended[rank].output
    assert_lost_since(ended[1 - rank], ended[rank])


def assert_lost_since(one: Ended, other: Ended) -> None:
    assert one.seconds - other.seconds < LIMIT / 2
    assert_lost(Ended(one.status, 0.0, one.output))


@pytest.mark.parametrize(("strategy", "rank"), [("ddp", 0), ("ddp", 1), ("deepspeed_3", 1)])
def test_a_signal_to_one_process_ends_both_after_the_round(tmp_path: Path, strategy: str, rank: int) -> None:
    folder = tmp_path / "run"
    ask = in_a_round(folder, lambda started: started[rank].terminate())
    ended = together(long_run(folder, strategy), 2, tmp_path / "printed", LIMIT, ask)
    for one in ended:
        assert one.status == 75, one.output[-2000:]
        assert one.seconds < LIMIT
        assert "of 2000 rounds: nothing is published; run it again to go on" in one.output


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher_ends_all(tmp_path: Path, sent: signal.Signals) -> None:
    """Lightning's own, which is the first process."""
    folder = tmp_path / "run"
    tell = in_a_round(folder, lambda started: started[0].send_signal(sent))
    [ended] = run_launched(long_run(folder, "ddp"), tmp_path / "printed", LIMIT, tell)
    assert ended.status == (75 if sent == signal.SIGTERM else -sent)
    assert ended.seconds < LIMIT
    assert "of 2000 rounds: nothing is published" in ended.output or sent == signal.SIGKILL
