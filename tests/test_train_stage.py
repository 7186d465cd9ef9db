import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures_policy import train_config, write_config

from grpo.__main__ import main
from grpo.training import grpo_module


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("round", "group_size", 1, "round.group_size is 1"),
        ("sampling", "temperature", 0.0, "sampling.temperature is 0"),
        ("sampling", "max_rows", 2, "sampling.max_rows is 2, less than round.group_size = 4"),
        ("optimizer", "micro_batch_rows", 2, "optimizer.micro_batch_rows is 2, less than round.group_size = 4"),
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
