"""The number of processes is no part of the method: 1, 2 and 4 draw, compare and learn the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fixtures_processes import STRATEGIES, assert_same_weights, rollouts, table, train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

# Several passes over a round's rollouts, fast enough that ratios leave the clip's range.
SEVERAL_PASSES = {"round": {"epochs": 4}, "optimizer": {"learning_rate": 3e-3}}
UNLIKE = {
    "a halved clip": {"model": {"loss": {"clip_low": 0.1}}},
    "a dropped micro-batch": {"callbacks": [{"class_path": "fixtures_processes.DropsAMicroBatch"}]},
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("one") / "run", "auto", 1)


def trained(folder: Path, strategy: Any, processes: int, **options: Any) -> Path:
    model = {section: dict(values) for section, values in SEVERAL_PASSES.items()} | options.pop("model", {})
    train(folder, strategy, processes, model, **options)
    return folder / "output"


@pytest.mark.parametrize(
    ("strategy", "processes"), [("ddp", 2), ("ddp", 4), ("fsdp2", 4), ("deepspeed_2", 4), ("deepspeed_3", 4)]
)
def test_the_same_rollouts_advantages_and_weights(tmp_path: Path, one: Path, strategy: str, processes: int) -> None:
    many = trained(tmp_path / "run", STRATEGIES[strategy], processes)
    drawn, alone = rollouts(many), rollouts(one)
    assert len({path.name for path in (many / "record" / "rollouts").glob("round-00000-rank-*")}) == processes
    assert drawn.keys() == alone.keys()
    compared, compared_alone = table(many, "updates"), table(one, "updates")
    for name, row in alone.items():
        assert drawn[name]["completion_tokens"] == row["completion_tokens"], name
        assert compared[name]["advantage"] == compared_alone[name]["advantage"], name
    assert_same_weights(many, one)


@pytest.mark.parametrize("name", UNLIKE)
def test_the_comparison_of_weights_can_fail(tmp_path: Path, one: Path, name: str) -> None:
    other = trained(tmp_path / "run", "auto", 1, **UNLIKE[name])
    assert rollouts(other).keys() == rollouts(one).keys()
    with pytest.raises(AssertionError):
        assert_same_weights(other, one)


def test_the_comparison_passes_for_the_same(tmp_path: Path, one: Path) -> None:
    assert_same_weights(trained(tmp_path / "run", "auto", 1), one)


def killed_in_round_1(folder: Path, strategy: str) -> dict[str, Any]:
    """A run of two processes that ends after the state of round 0; gives what it takes to go on with it."""
    dying = {"class_path": "fixtures_policy.DiesOnce", "init_args": {"marker": str(folder / "died"), "calls": 18}}
    changes = {"rewards": {"lower_case": {"check": dying, "limit_seconds": None}}}
    train(folder / "run", STRATEGIES[strategy], 2, changes, fails=True)
    assert (folder / "died").exists()
    return changes


@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_run_whose_state_is_whole_goes_on_with_another_number_of_processes(
    tmp_path: Path, strategy: str, processes: int
) -> None:
    train(tmp_path / "straight", "auto", 1)
    changes = killed_in_round_1(tmp_path, strategy)
    assert "going on from" in train(tmp_path / "run", STRATEGIES[strategy], processes, changes)
    [_] = (tmp_path / "run" / "runs").iterdir()
    straight, resumed = (rollouts(tmp_path / name / "output") for name in ("straight", "run"))
    assert resumed.keys() == straight.keys()
    for name, row in straight.items():
        assert resumed[name]["completion_tokens"] == row["completion_tokens"], name
    assert_same_weights(tmp_path / "run" / "output", tmp_path / "straight" / "output")


@pytest.mark.parametrize(("strategy", "processes"), [("deepspeed_2", 1), ("deepspeed_2", 4), ("deepspeed_3", 4)])
def test_a_state_of_other_parts_is_refused_before_a_model_loads(tmp_path: Path, strategy: str, processes: int) -> None:
    changes = killed_in_round_1(tmp_path, strategy)
    output = train(tmp_path / "run", STRATEGIES[strategy], processes, changes, fails=True)
    assert f"trainer.devices (by trainer.num_nodes) makes {processes} processes, but 2 wrote" in output
    assert "grpo export --checkpoint" in output
    assert "Loading weights" not in output
