"""An engine and a training that do not go together are refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures_rounds import LOWER_CASE
from lightning.pytorch.strategies import DDPStrategy

from grpo.rollouts import engine_settings
from grpo.rollouts.adapter_files import AdapterSettings
from grpo.rollouts.engine_settings import EngineSettings
from grpo.rollouts.sampling import SamplingSettings
from grpo.training.engines import make_engine
from grpo.training.grpo_module import GRPOModule
from grpo.training.settings import LossSettings


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
        make_engine(module, Path("nowhere"), EngineSettings("vllm"), SamplingSettings())
