import warnings
from typing import Any

import pytest
import torch
from fixtures_policy import TOKENIZER, prompt, random_llama
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from grpo.rollouts import completion_logprobs as rooms
from grpo.rollouts.collate import pad
from grpo.rollouts.completion_logprobs import completion_logprobs, traits_of

PROMPTS = [prompt("1+2=").prompt_tokens, prompt("12345 + 67890 =").prompt_tokens]
COMPLETIONS = [(5, 6, 7, 0), (8, 0), (9,), (30, 31, 32, 33, 34)]  # two of each prompt
WEIGHTS = torch.tensor([1.0, -2.0, 0.5, 3.0])


def shared(
    model: PreTrainedModel, temperature: float = 1.0, extra: int = 0, rows: list[int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and mask of the batch, with ``extra`` more columns of padding on both sides."""
    prompts, prompt_mask = pad(PROMPTS if rows is None else [PROMPTS[i] for i in rows], torch.long, "left")
    completions, mask = pad(COMPLETIONS, torch.long, "right")
    prompts, prompt_mask = (torch.nn.functional.pad(t, (extra, 0)) for t in (prompts, prompt_mask.long()))
    completions, mask = (torch.nn.functional.pad(t, (0, extra)) for t in (completions, mask))
    logprobs, entropies = completion_logprobs(model, prompts, prompt_mask, completions, mask, temperature)
    return logprobs, entropies, mask


def plain(model: PreTrainedModel, temperature: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    """The same by one whole pass a row: no cache, no padding, nothing shared, and the model's own logits."""
    results = []
    for i, completion in enumerate(COMPLETIONS):
        context = PROMPTS[i // 2]
        ids = torch.tensor([[*context, *completion]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(context) - 1 : -1]
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        entropy = torch.distributions.Categorical(logits=logits.detach() / temperature).entropy()
        results.append((logprobs[range(len(completion)), completion], entropy))
    return results


def shared_gradient(model: PreTrainedModel, rows: list[int] | None = None) -> dict[str, Tensor]:
    model.zero_grad()
    logprobs, _, mask = shared(model, rows=rows)
    (logprobs * mask * WEIGHTS.unsqueeze(1)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_gradient(model: PreTrainedModel) -> dict[str, Tensor]:
    model.zero_grad()
    torch.stack([w * rows.sum() for w, (rows, _) in zip(WEIGHTS, plain(model), strict=True)]).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def apart(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The difference of two gradients in units of the second's norm."""
    assert got.keys() == expected.keys()
    one, other = (torch.cat([values[name].flatten() for name in expected]).double() for values in (got, expected))
    return float((one - other).norm() / other.norm())


SMALL: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
    "max_position_embeddings": 128,
}
LAYERS = ["sliding_attention", "full_attention"]
GPT2 = {"vocab_size": len(TOKENIZER), "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "eos_token_id": 0}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.3}
MODELS: dict[str, Any] = {
    "llama": lambda: random_llama(spread=0.3),
    "qwen2 with biases": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen2 with a window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=6, layer_types=LAYERS)
    ),
    "mistral with a window": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=6)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2, **NO_DROPOUT)),
    "gemma2, capped, with a window": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SMALL, sliding_window=6, layer_types=LAYERS, final_logit_softcapping=2.0)
    ),
    "gemma3, with a window": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, sliding_window=6, layer_types=LAYERS)),
    "cohere, scaled": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)),
    "granite, divided": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    made: PreTrainedModel = MODELS[request.param]().train()
    return made


def test_a_models_logprobs_and_gradients_are_those_of_its_own_whole_logits(model: PreTrainedModel) -> None:
    model = model.double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is fallen back on
        logprobs, entropies, mask = shared(model, 0.7)
    for i, (expected, entropy) in enumerate(plain(model, 0.7)):
        torch.testing.assert_close(logprobs[i][mask[i]], expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(entropies[i][mask[i]], entropy, atol=1e-6, rtol=1e-6)
    # architectures that compute norms or rotations in float32 whatever they are given agree to its digits
    assert apart(shared_gradient(model), plain_gradient(model)) < 1e-5


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_shared_prompts_give_the_logprobs_of_a_whole_pass(temperature: float, extra: int) -> None:
    model = random_llama(spread=0.3)
    logprobs, entropies, mask = shared(model, temperature, extra)
    assert (logprobs[~mask] == 0).all()
    for i, (expected, entropy) in enumerate(plain(model, temperature)):
        torch.testing.assert_close(logprobs[i][mask[i]], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropies[i][mask[i]], entropy, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [None, [0, 0, 1, 1]])
def test_shared_or_not_the_gradient_is_that_of_a_whole_pass(rows: list[int] | None) -> None:
    model = random_llama(spread=0.3).train()
    assert apart(shared_gradient(model, rows), plain_gradient(model)) < 1e-5
    torch.manual_seed(0)
    model = MODELS["gpt2"]().train().double()  # its norms are in float64 too, where a Llama's are in float32
    assert apart(shared_gradient(model, rows), plain_gradient(model)) < 1e-10


def test_completions_of_one_token_need_their_prompt_alone() -> None:
    model = random_llama()
    prompts, prompt_mask = pad(PROMPTS, torch.long, "left")
    completions = torch.tensor([[5], [6]])
    logprobs, _ = completion_logprobs(model, prompts, prompt_mask.long(), completions, torch.ones(2, 1))
    for i in range(2):
        logits = model(input_ids=torch.tensor([PROMPTS[i]])).logits[0, -1]
        expected = torch.log_softmax(logits, -1)[completions[i]]
        torch.testing.assert_close(logprobs[i], expected, atol=1e-5, rtol=1e-5)


def tokens_read(model: PreTrainedModel, call: Any) -> int:
    """Tokens that enter the layers in a call, padding included."""
    seen: list[int] = []
    handle = model.model.layers[0].register_forward_pre_hook(
        lambda _module, inputs: seen.append(inputs[0][..., 0].numel())
    )
    call()
    handle.remove()
    return sum(seen)


@pytest.mark.parametrize("members", [2, 8, 16])
def test_a_prompt_costs_as_much_for_many_completions_as_for_one(members: int) -> None:
    model = random_llama()
    traits_of(model)
    prompts, prompt_mask = pad(PROMPTS[1:], torch.long, "left")
    completions = torch.full((members, 5), 7)
    call = lambda: completion_logprobs(model, prompts, prompt_mask.long(), completions, torch.ones(members, 5))  # noqa: E731
    assert tokens_read(model, call) == len(PROMPTS[1]) + members * 4


def test_padding_and_tokens_that_do_not_count_need_no_output_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_llama()
    made: list[int] = []
    real = rooms.chosen_logprobs
    monkeypatch.setattr(rooms, "chosen_logprobs", lambda hidden, *rest: made.append(len(hidden)) or real(hidden, *rest))
    whole, _, mask = shared(model)
    assert made == [int(mask.sum())]
    # a tool's tokens in the middle of the last row: read, and not predicted
    prompts, prompt_mask = pad(PROMPTS, torch.long, "left")
    completions, _ = pad(COMPLETIONS, torch.long, "right")
    mask[3, 1:3] = False
    mask[0] = False
    some, _ = completion_logprobs(model, prompts, prompt_mask.long(), completions, mask)
    assert made[1] == int(mask.sum())
    torch.testing.assert_close(some, whole.where(mask, 0.0), atol=1e-6, rtol=1e-6)


def test_what_no_wanted_token_follows_is_not_read() -> None:
    model = random_llama()
    traits_of(model)
    prompts, prompt_mask = pad(PROMPTS[:1], torch.long, "left")
    mask = torch.tensor([[True, True, False, False], [False] * 4])
    call = lambda: completion_logprobs(model, prompts, prompt_mask.long(), torch.full((2, 4), 9), mask)  # noqa: E731
    assert tokens_read(model, call) == len(PROMPTS[0]) + 1


def test_an_idle_batch_gives_every_weight_a_gradient_of_zero() -> None:
    """Processes wait for each other's gradients, also for those of nothing."""
    model = random_llama().train()
    prompts, prompt_mask = pad(PROMPTS, torch.long, "left")
    nothing = torch.zeros(2, 3)
    logprobs, _ = completion_logprobs(model, prompts, prompt_mask.long(), nothing.long(), nothing)
    (logprobs * nothing).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_an_impossible_token_leaves_the_entropy_finite() -> None:
    model = random_llama()
    with torch.no_grad():
        model.lm_head.bias = torch.nn.Parameter(
            torch.zeros(len(TOKENIZER)).index_fill(0, torch.tensor([50]), -torch.inf)
        )
    assert shared(model)[1].isfinite().all()


class OddHead(LlamaForCausalLM):
    """Does something to its logits that no field of its configuration tells."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.sin()
        return output


def test_a_head_that_cannot_be_seen_is_fallen_back_from_and_said() -> None:
    torch.manual_seed(0)
    model = OddHead(random_llama(spread=0.3).config).train()
    with pytest.warns(UserWarning, match="OddHead makes its logits in an unknown way"):
        logprobs, _, mask = shared(model)
    for i, (expected, _) in enumerate(plain(model)):
        torch.testing.assert_close(logprobs[i][mask[i]], expected, atol=1e-5, rtol=1e-5)
    assert apart(shared_gradient(model), plain_gradient(model)) < 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        shared(model)


def test_a_model_that_would_mix_siblings_up_runs_them_apart_and_says_so() -> None:
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=len(TOKENIZER), hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
    model = BloomForCausalLM(config).eval()
    with pytest.warns(UserWarning, match="BloomForCausalLM does not keep completions apart"):
        logprobs, _, mask = shared(model)
    for i, (expected, _) in enumerate(plain(model)):
        torch.testing.assert_close(logprobs[i][mask[i]], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [None, [0, 0, 1, 1]])
def test_checkpointed_layers_give_the_same_gradient(rows: list[int] | None) -> None:
    model = random_llama(spread=0.3).train().double()
    expected = shared_gradient(model, rows)
    model.activation_checkpointing_enable({"use_reentrant": False})
    passes: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    assert apart(shared_gradient(model, rows), expected) < 1e-12
    assert len(passes) == 2  # it was computed again
    assert model.training


def test_values_made_without_gradients_can_enter_a_loss() -> None:
    model = random_llama().train()
    with torch.inference_mode():
        old, _, _ = shared(model)
    logprobs, _, mask = shared(model)
    ratio = (logprobs - torch.tensor(old.tolist())).exp()
    (ratio * mask).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert torch.equal(old, logprobs)


def test_bfloat16_models_give_float32_logprobs() -> None:
    model = random_llama(spread=0.3).train()
    exact = shared(model)[0].detach()
    low = random_llama(spread=0.3).bfloat16().train()
    logprobs, entropies, mask = shared(low)
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert (logprobs - exact)[mask].abs().max() < 0.1
    rounded = logprobs.bfloat16().float()
    assert (logprobs != rounded)[mask].any()  # more digits than bfloat16 has
    logprobs.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in low.parameters())


def test_autocast_gives_float32_logprobs_and_float32_gradients() -> None:
    model = random_llama(spread=0.3).train()
    exact = shared_gradient(model)
    with torch.autocast("cpu", torch.bfloat16):
        got = shared_gradient(model)
        assert shared(model)[0].dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in got.values())
    assert apart(got, exact) < 0.1


def test_a_window_that_goes_by_columns_is_not_packed() -> None:
    """A short trial cannot show it: the siblings stand further apart than the window only in real groups."""
    layers = {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4}
    config = GPTNeoConfig(vocab_size=len(TOKENIZER), hidden_size=32, num_heads=4, **layers)
    with pytest.warns(UserWarning, match="GPTNeoForCausalLM does not keep completions apart"):
        assert not traits_of(GPTNeoForCausalLM(config).eval()).packs
