"""A tiny ``GRPOTrainer`` of TRL's for the tests that compare with it; imported only where TRL is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from grpo.maths.grpo_loss import LossOutput, Reduction, grpo_loss

ROWS, WIDTH, GROUP, LONGEST = 6, 5, 3, 8
SAME_REDUCTION: list[tuple[str, Reduction]] = [
    ("grpo", "response_mean"),
    ("bnpo", "token_mean"),
    ("dapo", "token_mean"),
    ("dr_grpo", "constant"),
]


def policy(folder: Path) -> Path:
    words = {"<pad>": 0, "<end>": 1} | {str(digit): digit + 2 for digit in range(10)}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_trainer(folder: Path, reward: Callable[..., list[float | None]], **options: Any) -> GRPOTrainer:
    declared = {
        "output_dir": str(folder / "run"),
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": ROWS,
        "num_generations": GROUP,
        "max_completion_length": LONGEST,
        "use_bias_correction_kl": False,
        "disable_tqdm": True,
    }
    return GRPOTrainer(
        model=str(policy(folder / "policy")),
        reward_funcs=reward,
        args=GRPOConfig(**(declared | options)),
        train_dataset=Dataset.from_dict({"prompt": ["1 2 3", "4 5"] * 4}),
    )


def our_loss(tensors: dict[str, Tensor], **options: Any) -> tuple[float, tuple[Tensor, ...], LossOutput]:
    policy, entropy = tensors["policy"].clone().requires_grad_(), tensors["entropy"].clone().requires_grad_()
    output = grpo_loss(
        policy,
        tensors["old"],
        tensors["advantages"],
        tensors["mask"],
        reference_logprobs=tensors["reference"],
        entropy=entropy,
        constant_length=LONGEST,
        **options,
    )
    return output.loss.item(), torch.autograd.grad(output.loss, [policy, entropy], materialize_grads=True), output
