"""An engine and a training that do not go together are refused; runs with one end as they should, and go on with it."""

from __future__ import annotations

import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures_engines import stand_in
from fixtures_policy import problem_folder, train_config, write_config
from fixtures_rounds import LOWER_CASE
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from grpo.__main__ import main
from grpo.problem_files import read_problems, write_problems
from grpo.rewards.judging import Judges
from grpo.rollouts import engine_settings
from grpo.rollouts.adapter_files import AdapterSettings
from grpo.rollouts.engine_settings import EngineSettings
from grpo.rollouts.sampling import SamplingSettings
from grpo.training import grpo_module
from grpo.training.engines import make_engine
from grpo.training.grpo_module import GRPOModule
from grpo.training.prompt_group_datamodule import problem_order
from grpo.training.settings import LossSettings
from grpo.training.strategies import CPUDeepSpeedStrategy, FullyShardedStrategy


def test_probabilities_that_nobody_recorded_are_not_put_under_the_ratio() -> None:
    settings: dict[str, Any] = {"sampling": SamplingSettings(top_p=0.9), "loss": LossSettings(old_logprobs="recorded")}
    with pytest.raises(ValueError, match=r"loss\.old_logprobs is recorded with engine\.name vllm_server and a cut"):
        GRPOModule(Path("nowhere"), LOWER_CASE, **settings, engine=EngineSettings("vllm_server"))
    GRPOModule(Path("nowhere"), LOWER_CASE, **settings)


def test_an_adapter_is_not_handed_over_in_silence() -> None:
    with pytest.raises(ValueError, match=r"adapter is given with engine\.name vllm_server"):
        GRPOModule(Path("nowhere"), LOWER_CASE, adapter=AdapterSettings(), engine=EngineSettings("vllm_server"))


def test_what_the_engine_cannot_do_is_refused_with_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_settings, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"the package vllm is not installed here"):
        GRPOModule(Path("nowhere"), LOWER_CASE, engine=EngineSettings("vllm"))


def test_an_engine_in_the_process_is_refused_where_there_are_several() -> None:
    module: Any = SimpleNamespace(trainer=SimpleNamespace(strategy=DDPStrategy()))
    with pytest.raises(ValueError, match=r"engine\.name is vllm with trainer\.strategy DDPStrategy: .*vllm_server"):
        make_engine(module, Path("nowhere"), EngineSettings("vllm"), SamplingSettings(), 1.0)


@pytest.mark.parametrize("strategy", [DDPStrategy(), SingleDeviceStrategy("cpu"), CPUDeepSpeedStrategy(2)])
def test_doing_without_a_copy_is_refused_where_there_is_none(strategy: Strategy) -> None:
    module: Any = SimpleNamespace(trainer=SimpleNamespace(strategy=strategy))
    expected = rf"engine\.gather_weights is false with trainer\.strategy {type(strategy).__name__}, .* set it to true"
    with pytest.raises(ValueError, match=expected):
        make_engine(module, Path("nowhere"), EngineSettings(gather_weights=False), SamplingSettings(), 1.0)
    assert make_engine(module, Path("nowhere"), EngineSettings(), SamplingSettings(), 1.0) is None


@pytest.mark.parametrize("strategy", [FullyShardedStrategy(), CPUDeepSpeedStrategy(3)])
def test_doing_without_a_copy_is_taken_where_weights_are_cut_up(strategy: Strategy) -> None:
    module: Any = SimpleNamespace(trainer=SimpleNamespace(strategy=strategy))
    assert make_engine(module, Path("nowhere"), EngineSettings(gather_weights=False), SamplingSettings(), 1.0) is None


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, address: str = "http://127.0.0.1:1") -> int:
    """The exit status of ``grpo train`` with the completions of a server at this address."""
    config = train_config(folder)
    config["model"]["engine"] = {"name": "vllm_server", "address": address}
    monkeypatch.setenv("WANDB_MODE", "disabled")
    argv = ["grpo", "train", "--config", write_config(folder / "train.yaml", config), *arguments]
    monkeypatch.setattr(sys, "argv", argv)
    try:
        main()
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


def test_a_run_whose_engine_fails_can_be_started_again_wherever_the_server_stands_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = stand_in(monkeypatch, loses_after=5)
    assert run(tmp_path, monkeypatch) == 75
    assert re.search(r"grpo train: vLLM drew with the weights another .*\. Run the training", capsys.readouterr().err)
    assert not (tmp_path / "output").exists()
    going_on = stand_in(monkeypatch)
    assert run(tmp_path, monkeypatch, address="http://127.0.0.1:2") == 0
    assert "going on from" in capsys.readouterr().out
    [_] = (tmp_path / "runs").iterdir()
    assert [engine.closed for engine in (*failing, *going_on)] == [1, 1]


def test_a_run_does_not_go_on_with_another_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, "vllm 1 float32", loses_after=5)
    assert run(tmp_path, monkeypatch) == 75
    stand_in(monkeypatch, "vllm 1 bfloat16")
    assert run(tmp_path, monkeypatch) == 2
    expected = "sampled by vllm 1 float32 until its newest state, and engine.name gives vllm 1 bfloat16 now: go on with"
    assert expected in capsys.readouterr().err


def test_a_prompt_of_the_last_round_that_leaves_no_room_is_told_before_a_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = problem_folder(tmp_path / "problems")
    asked = problem_order(read_problems(folder / "train.jsonl"), seed=1, occurrence=0)
    asked[-1] = replace(asked[-1], question="7" * 30)
    write_problems(folder / "train.jsonl", asked)
    made = stand_in(monkeypatch, context=30)
    monkeypatch.setattr(grpo_module, "load_policy", lambda _: pytest.fail("a model was loaded"))
    assert run(tmp_path, monkeypatch, "--data.rounds=3") == 2
    assert re.search(r"a prompt has \d+ tokens .* that vLLM makes room for: raise engine", capsys.readouterr().err)
    assert [engine.closed for engine in made] == [1]


class Broken(Exception):
    pass


def breaks(*_: object) -> None:
    raise Broken


def is_told_to_end(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("place", "name"), [(grpo_module, "load_policy"), (GRPOModule, "configure_optimizers"), (GRPOModule, "_advantages")]
)
def test_however_a_run_ends_its_engine_and_its_judges_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str
) -> None:
    closed: list[Judges] = []

    class Watched(Judges):
        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr(grpo_module, "Judges", Watched)
    made = stand_in(monkeypatch)
    monkeypatch.setattr(place, name, breaks)
    with pytest.raises(Broken):
        run(tmp_path, monkeypatch)
    assert [engine.closed for engine in made] == [1]
    assert closed


def test_a_module_may_be_closed_before_it_is_set_up_and_once_more() -> None:
    module = GRPOModule(Path("nowhere"), LOWER_CASE)
    module.close()
    module.close()


def test_a_run_that_is_told_to_end_lets_go_of_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = stand_in(monkeypatch)
    monkeypatch.setattr(GRPOModule, "_log_round", is_told_to_end)
    assert run(tmp_path, monkeypatch, "--longest_wait_minutes=2") == 75
    assert [engine.closed for engine in made] == [1]
    assert [engine.longest_wait for engine in made] == [120.0]
