"""A damaged policy folder is an error that names the file; nothing is filled in."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_policy import policy_folder, random_llama
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from grpo.policy import FolderPolicy
from grpo.rollouts import policies
from grpo.rollouts.policies import load_policy, load_tokenizer, save_policy
from grpo.rollouts.policy_files import (
    DamagedPolicy,
    NonFiniteWeights,
    context_length,
    read_end_tokens,
    require_replaceable,
)
from grpo.rollouts.prompts import PromptTemplate

Damage = Callable[[Path], object]


def weights(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def text(name: str, content: str) -> Damage:
    return lambda folder: (folder / name).write_text(content)


def setting(name: str, **values: Any) -> Damage:
    def damage(folder: Path) -> None:
        fields = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(fields | values))

    return damage


def without(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def cut(name: str, size: int) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


# What can be told without the weights, and so is told before any model is loaded.
LIGHT = [
    (without("config.json"), r"is not a policy folder"),
    (text("config.json", "{"), r"config\.json is damaged .*dvc repro policy"),
    (text("config.json", "[]"), r"config\.json holds \[\]: it must be a JSON object"),
    (setting("config.json", hidden_size="wide"), r"config\.json describes no model .*hidden_size"),
    (setting("config.json", model_type="nothing"), r"config\.json describes no model .*nothing"),
    (without("generation_config.json"), r"has no generation_config\.json, which declares the end tokens"),
    (text("generation_config.json", "{"), r"generation_config\.json is damaged"),
    (setting("generation_config.json", eos_token_id=None), r"names no eos_token_id: completions could not end"),
    (setting("generation_config.json", eos_token_id=99999), r"has the eos_token_id 99999: .* 0 to \d+"),
    (setting("generation_config.json", eos_token_id=[0, -1]), r"has the eos_token_id -1"),
    (setting("generation_config.json", eos_token_id="end"), r"has the eos_token_id 'end'"),
    (without("prompt_template.json"), r"has no prompt_template\.json"),
    (text("prompt_template.json", "{"), r"prompt_template\.json is damaged"),
    (text("prompt_template.json", "[]"), r"prompt_template\.json holds \[\]"),
    (text("prompt_template.json", "3"), r"prompt_template\.json holds 3"),
    (text("prompt_template.json", '{"id": 1, "text": "{question}"}'), r"prompt_template\.json .* must be text"),
    (without("tokenizer.json"), r"has no tokenizer that can be read"),
    (cut("tokenizer.json", 100), r"tokenizer\.json is damaged"),
    (text("tokenizer.json", "{}"), r"has no tokenizer that can be read"),
    (text("tokenizer_config.json", "{"), r"tokenizer_config\.json is damaged"),
    (without("model.safetensors"), r"has no weights"),
    (cut("model.safetensors", 3000), r"model\.safetensors is cut off or damaged"),
    (cut("model.safetensors", 0), r"model\.safetensors is cut off or damaged"),
]


@pytest.mark.parametrize(("damage", "message"), LIGHT)
def test_a_damaged_file_is_named_before_a_model_is_loaded(tmp_path: Path, damage: Damage, message: str) -> None:
    folder = policy_folder(tmp_path / "policy")
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(folder)


WEIGHTS = [
    (weights(lambda w: w.pop("model.norm.weight")), r"missing are model\.norm\.weight\."),
    (weights(lambda w: w.update(extra=torch.zeros(2))), r"not of this model are extra"),
    (weights(lambda w: w.update({"model.norm.weight": torch.zeros(2)})), r"of another shape are model\.norm\.weight"),
    (setting("config.json", num_hidden_layers=3), r"missing are model\.layers\.2\..* and \d more"),
    (setting("config.json", num_hidden_layers=1), r"not of this model are model\.layers\.1\..* and \d more"),
]


@pytest.mark.parametrize(("damage", "message"), WEIGHTS)
def test_no_weight_is_made_up_or_left_out(tmp_path: Path, damage: Damage, message: str) -> None:
    folder = policy_folder(tmp_path / "policy")
    damage(folder)
    with pytest.raises(DamagedPolicy, match=message):
        load_policy(folder)
    with pytest.raises(DamagedPolicy, match=rf"{message}.*source\.folder again"):
        FolderPolicy(folder).load(PromptTemplate("bare", "{question}"))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    folder = policy_folder(tmp_path / "policy")
    weights(lambda w: w["model.norm.weight"][3:4].fill_(value))(folder)
    with pytest.raises(NonFiniteWeights, match=r"weights that are not finite: model\.norm\.weight"):
        load_policy(folder)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    policy = load_policy(policy_folder(tmp_path / "policy"))
    next(policy.model.parameters()).data[0, 0] = torch.inf
    with pytest.raises(NonFiniteWeights, match="Nothing is written"):
        save_policy(tmp_path / "new" / "policy", policy, {})
    assert not (tmp_path / "new").exists()


def test_a_disk_that_is_full_leaves_the_earlier_policy_and_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = policy_folder(tmp_path / "policy")
    policy = load_policy(folder)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        save_policy(folder, policy, {})
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert load_policy(folder).end_token_ids == policy.end_token_ids


def test_end_tokens_and_places_are_read_from_the_files(tmp_path: Path) -> None:
    folder = policy_folder(tmp_path / "policy")
    setting("generation_config.json", eos_token_id=5)(folder)
    assert read_end_tokens(folder) == load_policy(folder).end_token_ids == (5,)
    assert context_length(folder) == random_llama().config.max_position_embeddings


@pytest.mark.parametrize(("kind", "expected"), [("dynamic", 64), ("longrope", 64), ("linear", 128)])
def test_a_context_ends_where_positions_begin_to_hang_on_the_neighbours(
    tmp_path: Path, kind: str, expected: int
) -> None:
    """Scaled by the longest row of a batch, the positions of a row would change with the rows beside it."""
    folder = policy_folder(tmp_path / "policy")
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 128
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    config["rope_parameters"] = {
        "rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64, **factors
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    assert context_length(folder) == expected


@pytest.mark.parametrize("kind", ["file", "link", "other", "here", "above"])
def test_nothing_but_a_policy_is_ever_replaced(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "output"
    if kind == "file":
        folder.write_text("mine")
    elif kind == "link":
        folder.symlink_to(policy_folder(tmp_path / "policy"))
    else:
        folder.mkdir()
        (folder / "thesis.txt").write_text("mine")
        (folder / "sub").mkdir()
    if kind in ("here", "above"):
        monkeypatch.chdir(folder if kind == "here" else folder / "sub")
        folder = Path() if kind == "here" else Path("..")
    with pytest.raises(ValueError, match=r"output is "):
        require_replaceable(folder, "output")
    with pytest.raises(ValueError, match=r"the policy's folder is "):
        save_policy(folder, load_policy(policy_folder(tmp_path / "new")), {})
    assert (tmp_path / "output").read_text() == "mine" if kind == "file" else (tmp_path / "output").exists()
    assert kind in ("file", "link") or (tmp_path / "output" / "thesis.txt").exists()


def test_an_empty_folder_and_an_earlier_policy_may_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "none" / "yet", policy_folder(tmp_path / "policy")):
        require_replaceable(folder, "output")
    assert policies.load_policy(tmp_path / "policy")
