import json
from pathlib import Path

import pytest
import torch
from fixtures_policy import TEMPLATE, TOKENIZER, policy_folder, prompt, random_llama
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from grpo.rollouts.policies import (
    LoadedPolicy,
    load_policy,
    load_tokenizer,
    save_policy,
    switch_dropout_off,
)

PROMPTS = [prompt("1+2=").prompt_tokens, prompt("12345 + 67890 =").prompt_tokens]


def test_dropout_is_off_once_a_policy_is_loaded(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=len(TOKENIZER), n_embd=16, n_layer=1, n_head=2, n_positions=64, eos_token_id=0)
    assert config.attn_pdrop > 0
    model = GPT2LMHeadModel(config)
    model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0)
    save_policy(tmp_path / "policy", LoadedPolicy(model, TOKENIZER, TEMPLATE, (0,)), {})
    loaded = load_policy(tmp_path / "policy").model.train()
    ids = torch.tensor([PROMPTS[1]])
    assert torch.equal(loaded(ids).logits, loaded(ids).logits)
    assert not torch.equal(model.train()(ids).logits, model(ids).logits)


def test_attention_dropout_is_off_too() -> None:
    model = random_llama().train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    ids = torch.tensor([PROMPTS[1]])
    assert not torch.equal(model(ids).logits, model(ids).logits)
    switch_dropout_off(model)
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_a_saved_policy_comes_back_whole(tmp_path: Path) -> None:
    folder = policy_folder(tmp_path / "policy")
    loaded = load_policy(folder)
    original = random_llama()
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), original.parameters(), strict=True))
    assert loaded.template == TEMPLATE
    assert loaded.end_token_ids == (TOKENIZER.eos_token_id, *TOKENIZER("\n").input_ids)
    assert loaded.tokenizer("1+2=").input_ids == TOKENIZER("1+2=").input_ids
    assert json.loads((folder / "provenance.json").read_text()) == {"made": "for tests"}


def test_saving_replaces_the_folder_and_leaves_nothing_aside(tmp_path: Path) -> None:
    folder = policy_folder(tmp_path / "policy")
    (folder / "stale.txt").write_text("from an earlier run")
    save_policy(folder, load_policy(folder), {"made": "again"}, config="seed: 1\n")
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert not (folder / "stale.txt").exists()
    assert (folder / "resolved_config.yaml").read_text() == "seed: 1\n"
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in folder.iterdir())


def test_what_is_no_policy_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a policy folder .* `grpo policy`"):
        load_policy(tmp_path)
    folder = policy_folder(tmp_path / "policy")
    (folder / "prompt_template.json").unlink()
    with pytest.raises(ValueError, match=r"has no prompt_template\.json"):
        load_tokenizer(folder)


def test_a_policy_without_end_tokens_is_refused(tmp_path: Path) -> None:
    folder = policy_folder(tmp_path / "policy")
    settings = json.loads((folder / "generation_config.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": None}))
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    with pytest.raises(ValueError, match="eos_token_id: completions could not end"):
        load_policy(folder)
