"""A policy of random weights in any shape, which never ends a completion."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.count_up import set_end_token
from grpo.problem_files import write_problems
from grpo.records import Problem
from grpo.rollouts.policies import LoadedPolicy, save_policy
from grpo.rollouts.prompts import PromptTemplate
from grpo.training.tiny_policy import character_tokenizer

# Whatever the width: it must be a multiple of twice as many.
HEADS = 4


def make_random_policy(folder: Path, width: int, vocabulary: int, positions: int, layers: int = 4) -> None:
    """A Llama over characters, its vocabulary filled up with tokens that stand for nothing."""
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=max(vocabulary, len(tokenizer)),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=positions + 1,
        tie_word_embeddings=False,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    end = int(tokenizer.eos_token_id)
    forbid(model, end)
    set_end_token(model, tokenizer, end)
    save_policy(folder, LoadedPolicy(model, tokenizer, PromptTemplate("bare", "{question}"), (end,)), {"made": "here"})


@torch.no_grad()
def forbid(model: LlamaForCausalLM, token: int) -> None:
    """One coordinate of the residual stream is the same everywhere; the token's logit is far below 0 along it."""
    model.model.embed_tokens.weight[:, 0] = 1.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    model.lm_head.weight[token] = 0.0
    model.lm_head.weight[token, 0] = -100.0


def write_prompts(folder: Path, length: int, count: int = 64) -> None:
    """Questions of ``length`` characters, each another."""
    folder.mkdir(parents=True)
    texts = [f"{number:08d}"[-length:].ljust(length, "x") for number in range(count)]
    problems = [Problem(f"p{i}", text, "1", "made") for i, text in enumerate(texts)]
    write_problems(folder / "train.jsonl", problems)
    write_problems(folder / "validation.jsonl", problems[:1])  # asked for, not used
