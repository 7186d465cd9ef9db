"""A run that was stopped ends as the straight run does."""

import csv
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from fixtures_policy import train_config, write_config

from grpo import train
from grpo.rollouts.policies import load_policy
from grpo.run_identity import weights_digest
from grpo.training.checkpoints import newest_checkpoint
from grpo.training.grpo_module import GRPOModule
from grpo.training.run_folder import RunInUse, only_trainer


class Killed(BaseException):
    """As abrupt as a signal: no handler for ordinary exceptions meets it."""


def run(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = train_config(folder)
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "disabled")
        train.main(["--config", write_config(folder / "train.yaml", config)])
    return Path(config["output"])


def run_and_kill(folder: Path, round_index: int, method: str) -> Path:
    """Start a run that dies at this place; give the folder of its state."""
    real: Callable[..., Any] = getattr(GRPOModule, method)

    def dying(self: GRPOModule, *args: Any) -> Any:
        if self.trainer.fit_loop.epoch_loop.batch_idx == round_index:
            raise Killed
        return real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOModule, method, dying)
        with pytest.raises(Killed):
            run(folder)
    [run_folder] = (folder / "runs").iterdir()
    return run_folder


def metrics(output: Path) -> list[dict[str, str]]:
    with (output / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if not name.startswith("seconds")} for row in rows]


def record(output: Path, table: str) -> dict[str, list[dict[str, Any]]]:
    """By file, without the names that differ from run to run."""
    return {
        path.name: [{k: v for k, v in row.items() if k != "run_id"} for row in pq.read_table(path).to_pylist()]
        for path in sorted((output / "record" / table).iterdir())
    }


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("straight"))


def test_a_finished_run_leaves_its_results_and_no_resumable_state(straight: Path) -> None:
    assert {path.name for path in straight.iterdir()} == {"policy", "record", "metrics.csv", "run.json"}
    assert [int(row["round"]) for row in metrics(straight)] == list(range(6))
    assert [bool(row["validation/reward/mean"]) for row in metrics(straight)] == [False, False, True] * 2
    assert len(record(straight, "rollouts")) == len(record(straight, "updates")) == 6
    assert list(record(straight, "validation")) == [f"round-0000{number}-rank-0.parquet" for number in (2, 5)]
    [run_folder] = (straight.parent / "runs").iterdir()
    assert newest_checkpoint(run_folder) is None
    resolved = yaml.safe_load((straight / "policy" / "resolved_config.yaml").read_text())
    assert resolved["model"]["loss"]["kl_beta"] == 0.04  # a default, written out


@pytest.mark.parametrize(
    ("round_index", "method"),
    [
        (1, "_count"),  # before the first state was kept
        (3, "_advantages"),  # past a state, in the middle of a round
        (4, "_log_round"),  # the round's record written, its metrics not
        (2, "validation_step"),
    ],
)
def test_a_run_that_was_killed_ends_as_the_straight_one(
    straight: Path, tmp_path: Path, round_index: int, method: str
) -> None:
    run_folder = run_and_kill(tmp_path, round_index, method)
    assert not (tmp_path / "output").exists()
    assert (newest_checkpoint(run_folder) is None) is (round_index == 1)
    resumed = run(tmp_path)
    assert weights_digest(resumed / "policy") == weights_digest(straight / "policy")
    assert metrics(resumed) == metrics(straight)
    for table in ("rollouts", "updates", "validation"):
        assert record(resumed, table) == record(straight, table)
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_one_state_is_kept_and_it_holds_no_reference(tmp_path: Path) -> None:
    run_folder = run_and_kill(tmp_path, 5, "_advantages")
    [kept] = (run_folder / "checkpoints").iterdir()
    assert kept == newest_checkpoint(run_folder)
    assert kept.name == "update-4.ckpt"
    names = torch.load(kept, weights_only=False)["state_dict"]
    assert names
    assert all(name.startswith("policy.") for name in names)


def test_two_runs_in_one_process_keep_apart(tmp_path: Path) -> None:
    outputs = [
        run(tmp_path, data__rounds=2, seed_everything=seed, output=str(tmp_path / f"out{seed}")) for seed in (1, 2)
    ]
    assert len(list((tmp_path / "runs").iterdir())) == 2
    ids = [next(iter(record_ids(output))) for output in outputs]
    assert ids[0] != ids[1]
    assert metrics(outputs[0]) != metrics(outputs[1])
    assert [len(metrics(output)) for output in outputs] == [2, 2]


def record_ids(output: Path) -> set[str]:
    files = (output / "record" / "rollouts").iterdir()
    return {run_id for path in files for run_id in pq.read_table(path)["run_id"].to_pylist()}


def test_the_newest_state_is_told_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for number in (2, 10, 9):
        (tmp_path / "checkpoints" / f"update-{number}.ckpt").touch()
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.name == "update-10.ckpt"
    assert newest_checkpoint(tmp_path / "none") is None


def test_a_folder_that_deepspeed_had_not_finished_is_no_state(tmp_path: Path) -> None:
    for number in (2, 4):
        (tmp_path / "checkpoints" / f"update-{number}.ckpt" / "checkpoint").mkdir(parents=True)
    assert newest_checkpoint(tmp_path) is None
    (tmp_path / "checkpoints" / "update-2.ckpt" / "latest").write_text("checkpoint")
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.name == "update-2.ckpt"


def test_an_edited_reward_outside_the_package_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not go on from the state that the earlier reward made."""
    source = "from fixtures_policy import share_of_lower_case\n\n\ndef reward(problem, completion):\n    return "
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for body in ("share_of_lower_case(problem, completion)", "share_of_lower_case(problem, completion.lower())"):
        (tmp_path / "edited_reward.py").write_text(source + body + "\n\n\nreward.graded_on_gold = False\n")
        importlib.invalidate_caches()
        sys.modules.pop("edited_reward", None)
        rewards = {"mine": {"check": "edited_reward.reward", "limit_seconds": None}}
        run(tmp_path, data__rounds=1, model__rewards=rewards)
    assert len(list((tmp_path / "runs").iterdir())) == 2
    told = json.loads((tmp_path / "output" / "run.json").read_text())["named_code"]
    assert "edited_reward" in told


def test_a_second_training_of_the_same_run_is_refused(tmp_path: Path) -> None:
    run(tmp_path, data__rounds=1)
    [run_folder] = (tmp_path / "runs").iterdir()
    with only_trainer(run_folder), pytest.raises(RunInUse, match="is being trained by another process"):
        run(tmp_path, data__rounds=1)


def test_more_than_one_pass_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer\.max_epochs is 3: .* set data\.rounds"):
        run(tmp_path, trainer__max_epochs=3)


def test_a_round_without_validation_problems_keeps_its_state(tmp_path: Path) -> None:
    """A validation that is due and has nothing to validate must not swallow the save."""
    changes = {"data__validation_problems": 0, "trainer__val_check_interval": 1, "checkpoint_every_n_updates": 1}
    real: Callable[..., Any] = GRPOModule._advantages

    def dying(self: GRPOModule, *args: Any) -> Any:
        if self.trainer.fit_loop.epoch_loop.batch_idx == 3:
            raise Killed
        return real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOModule, "_advantages", dying)
        with pytest.raises(Killed):
            run(tmp_path, **changes)
    [run_folder] = (tmp_path / "runs").iterdir()
    kept = newest_checkpoint(run_folder)
    assert kept is not None
    assert kept.name == "update-3.ckpt"


def test_a_run_that_was_interrupted_twice_keeps_its_newest_state_alone(tmp_path: Path) -> None:
    """Lightning by itself spares the state that was resumed from."""
    for round_index in (3, 5):
        run_folder = run_and_kill(tmp_path, round_index, "_advantages")
    assert [path.name for path in (run_folder / "checkpoints").iterdir()] == ["update-4.ckpt"]


def test_a_resumed_run_has_its_reference_from_the_policy_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_and_kill(tmp_path, 4, "_advantages")
    found: list[dict[str, torch.Tensor]] = []
    real = GRPOModule.on_train_start

    def looking(self: GRPOModule) -> None:
        assert self.reference is not None
        assert self.trainer.global_step > 0
        found.append({name: weight.clone() for name, weight in self.reference.state_dict().items()})
        real(self)

    monkeypatch.setattr(GRPOModule, "on_train_start", looking)
    run(tmp_path)
    base = load_policy(tmp_path / "policy").model.state_dict()
    assert found[0].keys() == base.keys()
    assert all(torch.equal(found[0][name], weight) for name, weight in base.items())
