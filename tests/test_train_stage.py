import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_policy import train_config, write_config

from grpo.__main__ import main
from grpo.records import Problem, Score
from grpo.training import checkpoints, grpo_module, round_update, strategies
from grpo.training.grpo_module import GRPOModule


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("round", "group_size", 1, "round.group_size is 1"),
        ("sampling", "temperature", 0.0, "sampling.temperature is 0"),
        ("sampling", "max_rows", 2, "sampling.max_rows is 2, less than round.group_size = 4"),
        ("optimizer", "micro_batch_tokens", 0, "optimizer.micro_batch_tokens is 0"),
        ("advantages", "std_correction", 3, "std_correction is 3"),
        ("loss", "kl_beta", -1.0, "kl_beta is -1.0"),
        ("loss", "reduction", "constant", "constant_length is None"),
        ("loss", "unknown_key", 1, "unknown_key"),
    ],
)
def test_a_mistake_in_the_config_ends_with_what_to_do_before_a_model_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    section: str,
    key: str,
    value: Any,
    message: str,
) -> None:
    config = train_config(tmp_path)
    config["model"].setdefault(section, {})[key] = value
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(sys, "argv", ["grpo", "train", "--config", write_config(tmp_path / "train.yaml", config)])
    monkeypatch.setattr(grpo_module, "load_policy", lambda _: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "output").exists()


def always_right(_: Problem, _completion: str) -> Score:
    return Score(1.0)


def fails_on_other_text(_: Problem, completion: str) -> Score:
    """Than the answers that it is proved on before training."""
    if completion and not completion.isdigit():
        raise OSError("the grader is away")
    return Score(1.0)


for toy in (always_right, fails_on_other_text):
    toy.graded_on_gold = False  # type: ignore[attr-defined]


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, **sections: dict[str, Any]) -> None:
    """``grpo train`` with these sections of the model set."""
    config = train_config(folder, rounds=2, validation_problems=0)
    for section, values in sections.items():
        config["model"][section] = config["model"].get(section, {}) | values
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(sys, "argv", ["grpo", "train", "--config", write_config(folder / "train.yaml", config)])
    main()


def message_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **sections: dict[str, Any]
) -> str:
    """What a run that fails says, having published nothing."""
    with pytest.raises(SystemExit) as stopped:
        run(folder, monkeypatch, **sections)
    assert stopped.value.code == 2
    assert not (folder / "output").exists()
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    [message] = [line for line in errors.splitlines() if line.startswith("grpo train: ")]
    return message


def test_rewards_that_fail_end_the_run_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fixtures_policy.share_of_lower_case", fails_on_other_text)
    assert "component 'lower_case' failed" in message_of(tmp_path, monkeypatch, capsys)


def test_rewards_that_misjudge_a_known_answer_are_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fixtures_policy.share_of_lower_case", lambda _problem, _completion: Score(1.0))
    message = message_of(tmp_path, monkeypatch, capsys)
    assert "the rewards misjudge known answers (12), first problem p00: the empty answer" in message


def test_groups_that_stay_flat_end_the_run_with_a_message_where_that_is_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fixtures_policy.share_of_lower_case", always_right)
    rounds = {"flat_groups": "resample", "at_limit": "fail", "max_draws": 2}
    assert "round.at_limit is fail" in message_of(tmp_path, monkeypatch, capsys, round=rounds)


def test_a_gradient_that_is_not_finite_ends_the_run_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(torch.nan))
    assert "the gradient's norm is nan at update 1" in message_of(tmp_path, monkeypatch, capsys)


def test_weights_that_are_not_finite_at_the_end_are_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real: Callable[..., float] = strategies.step_optimizer

    def overflow(module: GRPOModule, max_norm: float) -> float:
        norm = real(module, max_norm)
        if module.trainer.global_step == 2:
            module.policy.model.norm.weight.data[0] = torch.inf
        return norm

    monkeypatch.setattr(round_update, "step_optimizer", overflow)
    message = message_of(tmp_path, monkeypatch, capsys)
    assert "the trained weights are not finite: model.norm.weight. Nothing is published" in message


def test_a_fault_of_the_program_keeps_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("not ours")

    monkeypatch.setattr(GRPOModule, "_advantages", broken)
    with pytest.raises(RuntimeError, match="not ours"):
        run(tmp_path, monkeypatch)


def test_a_run_that_is_told_to_end_says_so_by_its_status_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real: Callable[..., Any] = GRPOModule._advantages

    def told_to_end(self: GRPOModule, *args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(GRPOModule, "_advantages", told_to_end)
        with pytest.raises(SystemExit) as stopped:
            run(tmp_path, patch)
    assert stopped.value.code == 75
    assert "training stopped after 1 of 2 rounds: nothing is published; run it again" in capsys.readouterr().err
    assert not (tmp_path / "output").exists()
    run(tmp_path, monkeypatch)
    assert (tmp_path / "output" / "policy").is_dir()


def test_rounds_that_taught_nothing_are_named_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fixtures_policy.share_of_lower_case", always_right)
    run(tmp_path, monkeypatch)
    assert (
        "2 of 2 rounds made no update, since no group in them had rewards that differ: 0, 1" in capsys.readouterr().err
    )


def test_rounds_that_all_taught_are_not_remarked_upon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, monkeypatch)
    assert "made no update" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "content"), [("output", None), ("output/policy", "thesis.txt"), ("output/record", "thesis.txt")]
)
def test_an_output_that_cannot_be_published_to_is_told_before_a_model_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
    content: str | None,
) -> None:
    monkeypatch.setattr(grpo_module, "load_policy", lambda _: pytest.fail("a model was loaded"))
    if content is None:
        (tmp_path / place).write_text("mine")
    else:
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / content).write_text("mine")
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path, monkeypatch)
    assert stopped.value.code == 2
    assert f"output is {tmp_path / 'output'}" in capsys.readouterr().err
    assert (tmp_path / place / (content or "")).read_text() == "mine"


def test_a_disk_that_is_full_at_the_end_leaves_nothing_aside_and_the_run_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.shutil, "copytree", full)
        with pytest.raises(OSError, match="No space left"):
            run(tmp_path, patch)
    assert list((tmp_path / "output").iterdir()) == []
    run(tmp_path, monkeypatch)
    assert {path.name for path in (tmp_path / "output").iterdir()} == {"policy", "record", "metrics.csv", "run.json"}
