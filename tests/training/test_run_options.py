"""Options of the trainer that would break the method are refused by name, before anything is made."""

import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures_policy import train_config, write_config

from grpo import train
from grpo.__main__ import main
from grpo.training import grpo_module


def attempt(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, changes: dict[str, Any] | None = None
) -> int:
    """Exit status of ``grpo train`` with these arguments; no model may be loaded."""
    config = train_config(folder) | (changes or {})
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(grpo_module, "load_policy", lambda _: pytest.fail("a model was loaded"))
    argv = ["grpo", "train", "--config", write_config(folder / "train.yaml", config), *arguments]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not (folder / "output").exists()
    return int(stopped.value.code or 0)


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("trainer.max_epochs", "2", "set data.rounds"),
        ("trainer.max_steps", "3", "set data.rounds"),
        ("trainer.max_time", "00:00:01:00", "take it out"),
        ("trainer.limit_train_batches", "1", "set data.rounds"),
        ("trainer.limit_train_batches", "0.5", "set data.rounds"),
        ("trainer.limit_val_batches", "0", "set data.validation_problems"),
        ("trainer.overfit_batches", "1", "set data.rounds"),
        ("trainer.fast_dev_run", "true", "set data.rounds"),
        ("trainer.num_sanity_val_steps", "2", "the first round"),
        ("trainer.num_sanity_val_steps", "-1", "the first round"),
        ("trainer.check_val_every_n_epoch", "2", "set trainer.val_check_interval"),
        ("trainer.accumulate_grad_batches", "2", "set model.optimizer.micro_batch_rows"),
        ("trainer.gradient_clip_val", "1.0", "set model.optimizer.max_gradient_norm"),
        ("trainer.enable_checkpointing", "false", "set checkpoint_every_n_updates"),
        ("trainer.barebones", "true", "loggers"),
        ("trainer.logger", "false", "wandb.mode"),
        ("trainer.default_root_dir", "elsewhere", "set runs"),
        ("trainer.precision", "16-true", "round most updates away"),
        ("trainer.precision", "bf16-true", "round most updates away"),
        ("trainer.precision", "16-mixed", "set bf16-mixed"),
        ("trainer.devices", "0", "at least 1"),
        ("trainer.devices", "-2", "at least 1"),
        ("trainer.devices", "[]", "at least 1"),
        ("trainer.val_check_interval", "0", "1 to data.rounds = 6"),
        ("trainer.val_check_interval", "0.0", "1 to data.rounds = 6"),
        ("trainer.val_check_interval", "7", "1 to data.rounds = 6"),
        ("trainer.val_check_interval", "1.5", "1 to data.rounds = 6"),
        ("trainer.val_check_interval", "00:00:01:00", "1 to data.rounds = 6"),
        ("seed_everything", "-1", "from 0 to 4294967295"),
        ("seed_everything", "4294967296", "from 0 to 4294967295"),
        ("checkpoint_every_n_updates", "0", "at least 1"),
        ("model.loss.constant_length", "8", "only the reduction constant divides by"),
        ("model.loss.clip_high", "0.1", "swap them"),
    ],
)
def test_an_option_that_breaks_the_method_is_refused_with_the_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
    value: str,
    remedy: str,
) -> None:
    assert attempt(tmp_path, monkeypatch, f"--{option}", value) == 2
    [message] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("grpo train: ")]
    assert message.startswith(f"grpo train: {option} is ")
    assert remedy in message


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model": {"rewards": {}, "round": None}}, "model.round is null"),
        ({"model": {"rewards": {}, "loss": None}}, "model.loss is null"),
        ({"model": {"rewards": {}, "optimizer": 3}}, "model.optimizer is 3"),
        ({"model": {"rewards": {}, "loss": {"kl_beta": None}}}, "model.loss.kl_beta is null"),
        ({"trainer": None}, "trainer is null"),
        ({"wandb": None}, "wandb is null"),
        ({"runs": None}, "runs is null"),
    ],
)
def test_null_where_settings_belong_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    key: str,
) -> None:
    assert attempt(tmp_path, monkeypatch, changes=changes) == 2
    assert f"grpo train: {key}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--optimizer=Adam", "--lr_scheduler=StepLR", "--trainer.bogus=1", "--data.rounds=x"]
)
def test_a_mistake_of_the_parser_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    train_config(tmp_path)
    capsys.readouterr()  # what making the policy printed
    assert attempt(tmp_path, monkeypatch, option) == 2
    errors = capsys.readouterr().err
    assert option.strip("-").partition("=")[0] in errors
    assert "usage:" not in errors
    assert len(errors.splitlines()) == 1


def test_what_is_the_default_anyway_may_be_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = train_config(tmp_path, rounds=1, groups_per_round=1, validation_problems=0)
    del config["trainer"]["num_sanity_val_steps"]
    config["trainer"] |= {"max_epochs": 1, "max_steps": -1, "limit_train_batches": 1.0, "accumulate_grad_batches": 1}
    config["trainer"] |= {"val_check_interval": 1.0, "precision": "32-true", "enable_checkpointing": True}
    config["model"]["loss"] = {"clip_low": float("inf"), "clip_high": 0.2}
    config["model"]["optimizer"]["max_gradient_norm"] = float("inf")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    train.main(["--config", write_config(tmp_path / "train.yaml", config)])
    assert (tmp_path / "output" / "run.json").is_file()


def test_a_check_that_outlasts_the_longest_wait_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = {"slow": {"check": "fixtures_policy.share_of_lower_case", "limit_seconds": 121.0}}
    model = train_config(tmp_path)["model"] | {"rewards": rewards}
    several = ("--trainer.devices=2", "--trainer.strategy=ddp", "--longest_wait_minutes=2")
    assert attempt(tmp_path, monkeypatch, *several, changes={"model": model}) == 2
    assert "grpo train: model.rewards.slow.limit_seconds is 121" in capsys.readouterr().err
