"""A saved state becomes a policy folder with the weights that were trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures_policy import train_config, write_config
from transformers import AutoModelForCausalLM

from grpo.export import ExportError, ExportSettings, export, main, policy_weights
from grpo.rollouts.policies import load_policy
from grpo.train import main as train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds whose last state was set aside before it was published."""
    folder = tmp_path_factory.mktemp("run")
    config = train_config(folder, rounds=2)
    config["checkpoint_every_n_updates"] = 1
    config["trainer"]["callbacks"] = [
        {"class_path": "fixtures_policy.KeepsState", "init_args": {"to": str(folder / "kept.ckpt")}}
    ]
    train(["--config", write_config(folder / "train.yaml", config)])
    return folder


def test_the_exported_weights_are_the_trained_ones(run: Path, tmp_path: Path) -> None:
    places = {"checkpoint": run / "kept.ckpt", "policy": run / "policy", "output": tmp_path / "exported"}
    main([f"--{name}={place}" for name, place in places.items()])
    trained = load_policy(run / "output" / "policy").model
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    for (name, mine), theirs in zip(exported.named_parameters(), trained.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    tokens = torch.tensor([[5, 6, 7]])
    drawn = [m.generate(tokens, max_new_tokens=8, do_sample=False) for m in (exported.eval(), trained.eval())]
    assert torch.equal(*drawn)


def test_a_state_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"no\.ckpt, which is not there"):
        policy_weights(tmp_path / "no.ckpt")


def test_a_broken_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.ckpt").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(ExportError, match="no state of a training"):
        policy_weights(tmp_path / "broken.ckpt")


def test_weights_of_another_model_are_refused_and_nothing_is_written(run: Path, tmp_path: Path) -> None:
    state = torch.load(run / "kept.ckpt", weights_only=True)["state_dict"]
    less = {name: weight for name, weight in state.items() if "layers.0.mlp.up_proj" not in name}
    torch.save({"state_dict": less}, tmp_path / "less.ckpt")
    with pytest.raises(ExportError, match=r"missing \[.model\.layers\.0\.mlp\.up_proj"):
        export(ExportSettings(tmp_path / "less.ckpt", run / "policy", tmp_path / "exported"))
    assert not (tmp_path / "exported").exists()
