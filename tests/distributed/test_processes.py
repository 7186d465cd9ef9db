"""Several processes on this machine make the updates that one makes."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from fixtures_processes import (
    OFFLOADED_2,
    STRATEGIES,
    assert_same_weights,
    environment,
    rollouts,
    run,
    table,
    train,
    weights,
    written_config,
)
from safetensors.torch import load_file

from grpo.export import ExportSettings, export
from grpo.rollouts.policies import load_policy

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    train(folder, "auto", 1)
    return folder / "output"


@pytest.fixture(scope="module", params=STRATEGIES)
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "run"
    train(folder, STRATEGIES[request.param], 2)
    (folder / "strategy").write_text(request.param)
    return folder / "output"


def test_two_processes_make_the_updates_of_one(one: Path, two: Path) -> None:
    alone, together = rollouts(one), rollouts(two)
    assert together.keys() == alone.keys()
    for name, row in alone.items():
        assert together[name]["completion_tokens"] == row["completion_tokens"]
    assert_same_weights(two, one)


@pytest.mark.parametrize(
    ("strategy", "checkpointed"), [*((name, False) for name in STRATEGIES | OFFLOADED_2), ("deepspeed_3", True)]
)
def test_a_process_with_less_to_update_changes_no_number(tmp_path: Path, strategy: str, checkpointed: bool) -> None:
    """A micro-batch a row, and rows that were cut off are masked: one process then has fewer micro-batches."""
    changes = {
        "loss": {"mask_truncated": True},
        "optimizer": {"micro_batch_rows": 1, "gradient_checkpointing": checkpointed},
        "sampling": {"max_new_tokens": 12},
    }
    outputs = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        train(folder, (STRATEGIES | OFFLOADED_2)[strategy] if processes == 2 else "auto", processes, changes)
        outputs[processes] = folder / "output"
    tables = [pq.read_table(path).to_pylist() for path in sorted((outputs[2] / "record" / "updates").iterdir())]
    work = [sum(row["loss_tokens"] > 0 for row in rows) for rows in tables]
    assert any(work[i] != work[i + 1] for i in range(0, len(work), 2)), work
    run = [row for rows in tables for row in rows if row["reference_logprobs"] is not None]
    assert len(run) == sum(work)
    for row in run:
        assert max(row["reference_logprobs"]) < 0
        assert max(row["recomputed_old_logprobs"]) < 0
    assert_same_weights(outputs[2], outputs[1])
    one, two = (list(csv.DictReader((outputs[n] / "metrics.csv").read_text().splitlines())) for n in (1, 2))
    for ours, theirs in zip(one, two, strict=True):
        for name in ("loss/kl", "loss/gradient_norm", "loss/ratio_min", "loss/tokens"):
            assert float(ours[name]) == pytest.approx(float(theirs[name]), rel=1e-3, abs=1e-5), name


def test_two_processes_leave_one_run(two: Path) -> None:
    [_] = (two.parent / "runs").iterdir()
    names = sorted(path.name for path in (two / "record" / "updates").iterdir())
    assert names == [f"round-{r:05d}-rank-{rank}.parquet" for r in range(2) for rank in range(2)]
    drawn = list(rollouts(two).values())
    assert len(drawn) == 2 * 4 * 4
    assert len({tuple(row["completion_tokens"]) for row in drawn}) == len(drawn)  # no process draws another's
    assert [line.split(",")[0] for line in (two / "metrics.csv").read_text().splitlines()] == ["round", "0", "1"]


def test_a_sharded_run_that_was_killed_ends_as_the_straight_one(two: Path, tmp_path: Path) -> None:
    """Under the strategy that made ``two``; round 1 has begun, and round 0's state was kept."""
    strategy = STRATEGIES[(two.parent / "strategy").read_text()]
    dying = {"class_path": "fixtures_policy.DiesOnce", "init_args": {"marker": str(tmp_path / "died"), "calls": 18}}
    changes = {"rewards": {"lower_case": {"check": dying, "limit_seconds": None}}}
    assert "going on from" not in train(tmp_path / "run", strategy, 2, changes, fails=True)
    assert (tmp_path / "died").exists()
    assert "going on from" in train(tmp_path / "run", strategy, 2, changes)
    assert_same_weights(tmp_path / "run" / "output", two)
    assert torch.equal(weights(tmp_path / "run" / "output"), weights(two))


def test_the_comparison_can_fail(one: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", "auto", 1, {"loss": {"reduction": "response_mean"}})
    with pytest.raises(AssertionError):
        assert_same_weights(tmp_path / "run" / "output", one)


def test_a_kept_state_becomes_a_policy_folder(two: Path, tmp_path: Path) -> None:
    """Whole from its parts, without the reference, and with the weights that were published, to the last bit."""
    kept = two.parent / "kept"
    export(ExportSettings(kept, two.parent / "policy", tmp_path / "exported"))
    models = [load_policy(folder).model.eval() for folder in (tmp_path / "exported", two / "policy")]
    for (name, exported), published in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(exported, published), name
    written = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(tensor.numel() for tensor in written.values())
    assert sum(t.numel() for t in written.values()) == sum(p.numel() for p in models[0].parameters())
    drawn = [m.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False) for m in models]
    assert torch.equal(*drawn)
    names = kept_names(kept)
    assert any(name.startswith("policy.") for name in names)
    assert not [name for name in names if name.startswith("reference.")]


def kept_names(kept: Path) -> list[str]:
    """Of the weights in a state, those that nothing trains among them: DeepSpeed keeps the latter in lists apart."""
    if kept.is_file():
        return list(torch.load(kept, weights_only=True)["state_dict"])
    states = [torch.load(path, weights_only=False) for path in sorted(kept.rglob("*model_states.pt"))]
    parts = ("frozen_param_shapes", "frozen_param_fragments")
    shapes = [name for state in states for group in state["param_shapes"] for name in group]
    return shapes + [name for state in states for part in ("module", *parts) for name in state[part] or ()]


def test_ddp_exchanges_the_gradient_of_an_update_once(tmp_path: Path) -> None:
    """Of more than one backward pass each: a micro-batch a row."""
    counts = {"class_path": "fixtures_policy.CountsExchanges", "init_args": {"to": str(tmp_path / "counted")}}
    train(tmp_path / "run", "ddp", 2, {"optimizer": {"micro_batch_rows": 1}}, callbacks=[counts])
    exchanges, updates = map(int, (tmp_path / "counted").read_text().split())
    assert exchanges == updates == 2


def test_a_strategy_that_is_not_handled_is_refused(tmp_path: Path) -> None:
    strategy = STRATEGIES["deepspeed_2"] | {"init_args": {"stage": 0}}
    output = train(tmp_path / "run", strategy, 1, fails=True)
    assert "grpo train: trainer.strategy is CPUDeepSpeedStrategy, whose gradients and weights are not handled" in output


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed_2", "deepspeed_3"])
def test_a_renewed_reference_is_the_same_in_two_processes(tmp_path: Path, strategy: str) -> None:
    """Renewed after two rounds, kept in the state after the third, and asked in the fourth."""
    changes = {"loss": {"reference_refresh_rounds": 2}, "optimizer": {"learning_rate": 3e-3}}
    for name, chosen, processes in (("one", "auto", 1), ("two", STRATEGIES[strategy], 2)):
        config = written_config(
            tmp_path / name, chosen, processes, changes, data={"rounds": 4}, checkpoint_every_n_updates=3
        )
        printed, code = run([sys.executable, "-m", "grpo", "train", "--config", config], environment())
        assert code == 0, printed[-3000:]
    one, two = (table(tmp_path / name / "output", "updates") for name in ("one", "two"))
    last = [name for name, row in one.items() if row["round"] == 3 and row["reference_logprobs"]]
    assert last
    for name in last:
        assert one[name]["reference_version"] == two[name]["reference_version"] == 2
        assert two[name]["reference_logprobs"] == pytest.approx(one[name]["reference_logprobs"], abs=1e-3)


SHARDED = [name for name in STRATEGIES | OFFLOADED_2 if name.startswith("deepspeed")]


@pytest.mark.parametrize("strategy", SHARDED)
def test_eight_passes_by_fours_are_two_steps_of_the_engine(tmp_path: Path, strategy: str) -> None:
    """A round: eight rows a process, two to a pass, twice over; and there are two rounds."""
    counts = {"class_path": "fixtures_processes.CountsSteps", "init_args": {"to": str(tmp_path / "counted")}}
    changes = {"round": {"epochs": 2}, "optimizer": {"micro_batch_rows": 2}}
    train(tmp_path / "run", (STRATEGIES | OFFLOADED_2)[strategy], 2, changes, callbacks=[counts])
    for rank in range(2):
        assert (tmp_path / f"counted.{rank}").read_text() == "16 4 4"


@pytest.mark.parametrize("strategy", ["ddp", "deepspeed_2", "deepspeed_3"])
def test_twenty_saves_leave_one_state(tmp_path: Path, strategy: str) -> None:
    """A file under DDP, a folder under DeepSpeed."""
    counts = {"class_path": "fixtures_processes.CountsStates", "init_args": {"to": str(tmp_path / "counted")}}
    config = written_config(tmp_path / "run", STRATEGIES[strategy], 2, callbacks=[counts], data={"rounds": 20})
    printed, code = run([sys.executable, "-m", "grpo", "train", "--config", config], environment())
    assert code == 0, printed[-3000:]
    saved, most = map(int, (tmp_path / "counted").read_text().split())
    assert saved >= 15  # a round of flat groups alone makes no update
    assert most == 1
