"""Small models of several families, prompts of uneven lengths, and what a sampler's answers are held against."""

from __future__ import annotations

from typing import Any

import torch
from fixtures_policy import TOKENIZER, key, prompt
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from grpo.records import PromptGroup, Rollout
from grpo.rollouts.sampling import Sampler, SamplingSettings

END = TOKENIZER.eos_token_id
DIGITS = tuple(TOKENIZER("0123456789").input_ids)
SOME_ENDS = (END, *range(2, 22))  # so many that rows end at every step

SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": END,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    # not tied: random tied weights of this size only repeat the last token
    "gemma": GemmaConfig(**SIZES, head_dim=8, tie_word_embeddings=False),
    # windows shorter than the prompts, so that what has left them matters
    "gemma2": Gemma2Config(**SIZES, head_dim=8, sliding_window=4, tie_word_embeddings=False),
    "gemma3": Gemma3TextConfig(
        **SIZES,
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        tie_word_embeddings=False,
    ),
    "gpt_neox": GPTNeoXConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
    "gpt2": GPT2Config(
        vocab_size=len(TOKENIZER),
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=64,
        initializer_range=0.3,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
    ),
}
PROMPTS = [prompt("1+2=", "a"), prompt("12345 + 67890 =", "b"), prompt("x", "c")]
KEYS = [key("a"), key("b"), key("c")]
MANY = [prompt(f"{i}" * (1 + 5 * i % 13) + f"+{i}=", f"m{i}") for i in range(9)]
MANY_KEYS = [key(group.problem.id) for group in MANY]


def build(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(3)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype)
    return model.eval()


def sampler(model: PreTrainedModel, ends: tuple[int, ...] = (END,), **settings: Any) -> Sampler:
    return Sampler(model, TOKENIZER, ends, SamplingSettings(**settings))


def drawn(groups: list[list[Rollout]]) -> list[list[tuple[int, ...]]]:
    return [[rollout.tokens for rollout in group] for group in groups]


def flat(groups: list[list[Rollout]]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group]


def full_logprobs(model: PreTrainedModel, rollout: Rollout, temperature: float = 1.0) -> torch.Tensor:
    """By one plain pass over prompt and completion, without padding, cache or sharing."""
    ids = torch.tensor([[*rollout.group.prompt_tokens, *rollout.tokens]])
    start = len(rollout.group.prompt_tokens)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[0, start:, None])[:, 0]


def left_padded(groups: list[PromptGroup]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts and mask as ``model.generate`` takes them."""
    width = max(len(group.prompt_tokens) for group in groups)
    ids = torch.full((len(groups), width), END)
    mask = torch.zeros_like(ids)
    for row, group in enumerate(groups):
        ids[row, width - len(group.prompt_tokens) :] = torch.tensor(group.prompt_tokens)
        mask[row, width - len(group.prompt_tokens) :] = 1
    return ids, mask
