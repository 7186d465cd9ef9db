import json
from pathlib import Path

import pytest
import torch
from fixtures_policy import TEMPLATE, TOKENIZER, policy_folder, prompt, random_llama
from torch import Tensor
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from grpo.rollouts.collate import pad
from grpo.rollouts.policies import (
    LoadedPolicy,
    completion_logprobs,
    load_policy,
    load_tokenizer,
    save_policy,
    switch_dropout_off,
)

PROMPTS = [prompt("1+2=").prompt_tokens, prompt("12345 + 67890 =").prompt_tokens]
COMPLETIONS = [(5, 6, 7, 0), (8, 0), (9,), (30, 31, 32, 33, 34)]  # two of each prompt


def shared(model: PreTrainedModel, temperature: float = 1.0, extra: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and mask of the batch, with ``extra`` more columns of padding on both sides."""
    prompts, prompt_mask = pad(PROMPTS, torch.long, "left")
    completions, mask = pad(COMPLETIONS, torch.long, "right")
    prompts, prompt_mask = (torch.nn.functional.pad(t, (extra, 0)) for t in (prompts, prompt_mask.long()))
    completions, mask = (torch.nn.functional.pad(t, (0, extra)) for t in (completions, mask))
    logprobs, entropies = completion_logprobs(model, prompts, prompt_mask, completions, mask, temperature)
    return logprobs, entropies, mask


def plain(model: PreTrainedModel, temperature: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    """The same by one whole pass a row: no cache, no padding, nothing shared."""
    results = []
    for i, completion in enumerate(COMPLETIONS):
        context = PROMPTS[i // 2]
        ids = torch.tensor([[*context, *completion]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(context) - 1 : -1]
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        entropy = torch.distributions.Categorical(logits=logits.detach() / temperature).entropy()
        results.append((logprobs[range(len(completion)), completion], entropy))
    return results


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_shared_prompts_give_the_logprobs_of_a_whole_pass(temperature: float, extra: int) -> None:
    model = random_llama(spread=0.3)
    logprobs, entropies, mask = shared(model, temperature, extra)
    assert logprobs.isfinite().all()
    for i, (expected, entropy) in enumerate(plain(model, temperature)):
        torch.testing.assert_close(logprobs[i][mask[i]], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropies[i][mask[i]], entropy, atol=1e-5, rtol=1e-5)


def test_shared_prompts_give_the_gradient_of_a_whole_pass() -> None:
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0])
    model = random_llama(spread=0.3).train()
    logprobs, _, mask = shared(model)
    (logprobs * mask * weights.unsqueeze(1)).sum().backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    torch.stack([w * rows.sum() for w, (rows, _) in zip(weights, plain(model), strict=True)]).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        distance = (got[name] - parameter.grad).norm() / parameter.grad.norm()
        assert distance < 1e-5, name


def test_completions_of_one_token_need_one_pass() -> None:
    model = random_llama()
    prompts, prompt_mask = pad(PROMPTS, torch.long, "left")
    completions = torch.tensor([[5], [6]])
    logprobs, _ = completion_logprobs(model, prompts, prompt_mask.long(), completions, torch.ones(2, 1))
    for i in range(2):
        logits = model(input_ids=torch.tensor([PROMPTS[i]])).logits[0, -1]
        expected = torch.log_softmax(logits, -1)[completions[i]]
        torch.testing.assert_close(logprobs[i], expected, atol=1e-5, rtol=1e-5)


def test_logits_are_made_for_completions_alone() -> None:
    model = random_llama()
    made: list[int] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: made.append(output[..., 0].numel()))
    logprobs, _, _ = shared(model)
    # 1 of each of 2 prompts, then all but the last token of 4 completions
    assert made == [2, 4 * (logprobs.shape[1] - 1)]


def test_an_impossible_token_leaves_the_entropy_finite() -> None:
    model = random_llama()
    with torch.no_grad():
        model.lm_head.bias = torch.nn.Parameter(
            torch.zeros(len(TOKENIZER)).index_fill(0, torch.tensor([50]), -torch.inf)
        )
    assert shared(model)[1].isfinite().all()


def test_activation_checkpointing_is_refused_where_it_would_lose_the_prompt() -> None:
    model = random_llama().train()
    model.activation_checkpointing_enable()
    with pytest.raises(AssertionError, match="activation checkpointing"):
        shared(model)


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
