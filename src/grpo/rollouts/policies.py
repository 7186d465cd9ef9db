"""A policy: weights, tokenizer, prompt template and end tokens, kept in one Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from grpo.rollouts.policy_files import (
    load_whole_model,
    load_whole_tokenizer,
    read_end_tokens,
    read_template,
    require_finite,
    require_policy_files,
    require_replaceable,
)
from grpo.rollouts.prompts import PromptTemplate
from grpo.run_identity import CONFIG_FILE, PROVENANCE_FILE


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy in memory. ``end_token_ids`` end a completion when sampled, and count as part of it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    template: PromptTemplate
    end_token_ids: tuple[int, ...]


def load_policy(folder: Path) -> LoadedPolicy:
    """Load a policy folder, float32, without dropout.

    Raises:
        ValueError: the folder is not a policy folder, or something in it is missing or damaged.
    """
    tokenizer, template = load_tokenizer(folder)
    model = load_whole_model(folder)
    switch_dropout_off(model)
    return LoadedPolicy(model, tokenizer, template, read_end_tokens(folder))


def load_tokenizer(folder: Path) -> tuple[PreTrainedTokenizerBase, PromptTemplate]:
    """The light part of a policy folder: enough to make prompts, and to find most damage before the weights are read.

    Raises:
        ValueError: the folder is not a policy folder, or a file of it is missing or damaged.
    """
    require_policy_files(folder)
    return load_whole_tokenizer(folder), read_template(folder)


def switch_dropout_off(model: PreTrainedModel) -> None:
    """Dropout draws another network at every pass: the ratio would compare two policies that differ by chance."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if "attention_dropout" in vars(module):  # a rate that the attention function is called with
            vars(module)["attention_dropout"] = 0.0


def save_policy(folder: Path, policy: LoadedPolicy, provenance: Mapping[str, Any], config: str | None = None) -> None:
    """Write a policy folder aside and move it in, so that neither a killed run nor a full disk leaves half of one.

    Args:
        folder: an earlier policy there is replaced.
        policy: what to write.
        provenance: what it was made from.
        config: the resolved configuration of the run that made it, YAML.

    Raises:
        NonFiniteWeights: nothing is written.
        ValueError: something else than a policy stands there; it is left alone.
    """
    require_finite(policy.model, f"the weights for {folder} are not finite", "Nothing is written")
    require_replaceable(folder, "the policy's folder")
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        _write_policy(aside, policy, provenance, config)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_policy(aside: Path, policy: LoadedPolicy, provenance: Mapping[str, Any], config: str | None) -> None:
    aside.mkdir(parents=True)
    policy.model.save_pretrained(aside)
    # How it was fetched would stand in its file, and an offline machine would make another policy than one online.
    for name in ("is_local", "local_files_only"):
        policy.tokenizer.init_kwargs.pop(name, None)
    policy.tokenizer.save_pretrained(aside)
    policy.template.save(aside)
    text = json.dumps(provenance, indent=2, sort_keys=True, ensure_ascii=False)
    (aside / PROVENANCE_FILE).write_text(text + "\n", encoding="utf-8")
    if config is not None:
        (aside / CONFIG_FILE).write_text(config, encoding="utf-8")
    for path in aside.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, which another user of a mounted clone cannot read


def completion_logprobs(
    model: PreTrainedModel,
    prompts: Tensor,
    prompt_mask: Tensor,
    completions: Tensor,
    mask: Tensor,
    temperature: float = 1.0,
    rows_per_prompt: Tensor | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of given completions, each prompt run once for all its completions.

    Args:
        model: the policy or the reference.
        prompts: ``[P, L]`` left-padded prompt tokens.
        prompt_mask: ``[P, L]``, 1 at prompt tokens.
        completions: ``[N, T]`` right-padded, those of a prompt side by side.
        mask: ``[N, T]``, 1 at completion tokens.
        temperature: divides the logits, as it did when the tokens were drawn.
        rows_per_prompt: ``[P]``, completions of each prompt; by default ``N / P`` of each.
        entropy_gradient: whether the entropies carry a gradient, which keeps a ``[N, T, V]`` tensor.

    Returns:
        log-probabilities ``[N, T]`` and entropies ``[N, T]`` in nats, float32; padding holds finite
        values that mean nothing.
    """
    # Checkpointed layers drop their cache while they train, and the completions would not see their prompt.
    assert not (model.training and model.is_activation_checkpointing), (
        "shared prompts need activation checkpointing off"
    )
    repeats = _repeats(rows_per_prompt, len(prompts), len(completions))
    positions = (prompt_mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache()
    first = model(
        input_ids=prompts,
        attention_mask=prompt_mask,
        position_ids=positions,
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    logits = first.repeat_interleave(repeats, dim=0)
    steps = completions.shape[1] - 1
    if steps > 0:
        cache.batch_repeat_interleave(repeats)
        start = positions[:, -1:].repeat_interleave(repeats, dim=0) + 1
        context = prompt_mask.repeat_interleave(repeats, dim=0)
        rest = model(
            input_ids=completions[:, :-1],
            attention_mask=torch.cat([context, mask[:, :-1].to(context.dtype)], dim=1),
            position_ids=start + torch.arange(steps, device=start.device),
            cache=cache,
            use_cache=True,
        ).logits
        logits = torch.cat([logits, rest], dim=1)
        del rest
    # Each [N, T, V] tensor weighs as much as all activations of some layers: none is kept or made without need.
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    del first, logits
    logprobs = torch.log_softmax(scaled, dim=-1)
    del scaled
    return logprobs.gather(-1, completions.unsqueeze(-1)).squeeze(-1), _entropies(logprobs, entropy_gradient)


def _repeats(rows_per_prompt: Tensor | None, prompts: int, rows: int) -> Any:
    """How often each prompt is repeated: one number where it is the same for all, which is the faster way."""
    if rows_per_prompt is None:
        return rows // prompts
    return int(rows_per_prompt[0]) if bool((rows_per_prompt == rows_per_prompt[0]).all()) else rows_per_prompt


def _entropies(logprobs: Tensor, gradient: bool) -> Tensor:
    """``[N, T]`` of ``[N, T, V]`` log-probabilities."""
    if gradient:
        return -(logprobs.exp() * logprobs).sum(dim=-1)
    with torch.no_grad():  # row by row; entr is 0 at probability 0, where p * log p is NaN
        return torch.stack([torch.special.entr(row.exp()).sum(dim=-1) for row in logprobs])
