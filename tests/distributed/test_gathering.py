"""Where weights are cut up, sampling with no whole copy of them draws and trains what sampling with one does."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_policy import policy_folder, problem_folder
from fixtures_processes import STRATEGIES, TESTS, rollouts, together, weights, written_config
from fixtures_rounds import Row, read_table

from grpo.export import ExportSettings, export
from tests.distributed import train_each as script
from tests.distributed.test_uneven_processes import assert_lost, in_a_round, long_run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

UNEVEN = (
    "completions_of_very_different_lengths",
    "draws_again_in_one_process",
    "fewer_validation_problems_than_processes",
)
SITUATIONS = ("the_likeliest_tokens", "flat_groups_in_one_process_kept_with_a_reference", *UNEVEN)
WAYS = {"gathered": True, "cut_up": False}


@pytest.fixture(scope="module", params=["fsdp2", "deepspeed_3"])
def sampled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each way, with the trainings of every situation in it."""
    folder = tmp_path_factory.mktemp(request.param)
    for way in WAYS:
        (folder / way).mkdir()
        policy_folder(folder / way / "policy", layers=4)
        problem_folder(folder / way / "problems", train=6, validation=4)
    command = [sys.executable, str(TESTS / "distributed" / "gathering.py"), str(folder), request.param, *SITUATIONS]
    ended = together(command, 2, folder / "printed", 800)
    assert [one.status for one in ended] == [0, 0], "\n".join(one.output[-3000:] for one in ended)
    return folder


def verdicts(folder: Path, way: str, situation: str) -> list[dict[str, Any]]:
    """Of each process."""
    return [json.loads((folder / way / f"{situation}.{rank}.json").read_text()) for rank in range(2)]


def drawn(folder: Path, way: str, situation: str, table: str) -> dict[str, Row]:
    return {row["rollout_id"]: row for row in read_table(folder / way / situation / "record", table)}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_no_whole_copy_changes_no_token_and_no_weight(sampled: Path, situation: str) -> None:
    """Also where a process has no problem to validate on, or alone draws again; probabilities are equal to rounding."""
    for table in ("rollouts", "validation"):
        whole, cut_up = (drawn(sampled, way, situation, table) for way in WAYS)
        assert cut_up.keys() == whole.keys() != set()
        for name, row in whole.items():
            assert cut_up[name]["completion_tokens"] == row["completion_tokens"]
            assert cut_up[name]["old_logprobs"] == pytest.approx(row["old_logprobs"], abs=1e-5)
    (first, second), parts = (verdicts(sampled, way, situation) for way in WAYS)
    assert first["updates"] == parts[0]["updates"] == parts[1]["updates"] == 2
    assert first["weights"] == second["weights"] == parts[0]["weights"] != 0
    assert parts[1]["weights"] != first["weights"]  # it took part in putting them together, and kept its own part


def test_the_situations_are_uneven(sampled: Path) -> None:
    """One process has passes to make where the other has none; without a copy both make as many."""
    for name in UNEVEN:
        one, other = (verdict["passes"] for verdict in verdicts(sampled, "gathered", name))
        assert one != other, name
    for name in SITUATIONS:
        one, other = (verdict["passes"] for verdict in verdicts(sampled, "cut_up", name))
        assert one == other > 0, name


@pytest.mark.parametrize("situation", ["the_likeliest_tokens", "draws_again_in_one_process"])
def test_no_process_holds_a_whole_copy(sampled: Path, situation: str) -> None:
    """All its tensors counted in the midst of a pass: the copy is gone, and what the pass needs is there."""
    for whole, part in zip(*(verdicts(sampled, way, situation) for way in WAYS), strict=True):
        assert part["own_model"]
        assert not whole["own_model"]
        saved = (whole["bytes"] - part["bytes"]) / (4 * whole["all_weights"])
        print(situation, f"{saved:.2f} of the weights saved")
        assert saved > 0.6


# ---- As a user starts them. ----

CUTS_UP = {"class_path": "fixtures_processes.CutsUpEveryWeight"}
TOLD_TO_END = {"class_path": "fixtures_processes.IsToldToEndLast"}
AGAIN = {"flat_groups": "resample", "max_draws": 3, "group_size": 3, "split_groups": True}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {"sampling": {"max_new_tokens": 10}, "optimizer": {"gradient_checkpointing": True}},
    "split": {"round": AGAIN, "rewards": {"made": {"check": "fixtures_policy.starts_with_a_letter"}}},
    "adapted": {"adapter": {"rank": 4, "alpha": 8.0}, "loss": {"reference_refresh_rounds": 1}},
    "told_to_end_in_the_last_round": {},
}


@pytest.fixture(scope="module", params=["fsdp2", "deepspeed_3"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``NAME-WAY`` for each training."""
    folder = tmp_path_factory.mktemp(f"started-{request.param}")
    configs = [
        written_config(
            folder / f"{name}-{way}",
            STRATEGIES[request.param],
            2,
            RUNS[name] | {"engine": {"gather_weights": gathered}},
            callbacks=[CUTS_UP, *([TOLD_TO_END] if name.startswith("told") else [])],
            data={"groups_per_round": 3 if name == "split" else 4},
        )
        for name in RUNS
        for way, gathered in WAYS.items()
    ]
    ended = together([sys.executable, script.__file__, *configs], 2, folder / "printed", 800)
    assert [one.status for one in ended] == [0, 0], "\n".join(one.output[-3000:] for one in ended)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_what_is_published_is_the_same(started: Path, name: str) -> None:
    """Also where layers are checkpointed, groups split over the processes and drawn again, or an adapter is trained."""
    whole, cut_up = (started / f"{name}-{way}" / "output" for way in WAYS)
    made, expected = (
        {key: row["completion_tokens"] for key, row in rollouts(output).items()} for output in (cut_up, whole)
    )
    assert made == expected
    assert torch.equal(weights(cut_up), weights(whole))
    assert not torch.equal(weights(cut_up), weights(cut_up.parent))


def test_a_kept_state_exports_to_what_was_published(started: Path, tmp_path: Path) -> None:
    run = started / "plain-cut_up"
    export(ExportSettings(run / "kept", run / "policy", tmp_path / "output" / "policy"))
    assert torch.equal(weights(tmp_path / "output"), weights(run / "output"))


@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed_3"])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_lost_leaves_no_other_waiting(tmp_path: Path, strategy: str, sent: signal.Signals) -> None:
    folder = tmp_path / "run"
    lose = in_a_round(folder, lambda started: started[1].send_signal(sent))
    command = long_run(folder, strategy, minutes=0.2, model={"engine": {"gather_weights": False}})
    ended = together(command, 2, tmp_path / "printed", 40, lose)
    assert_lost(ended[0])
