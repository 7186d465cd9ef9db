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
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.rollouts.adapter_files import AdapterWeights
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

# In a policy folder: the adapter that its weights hold, apart from them.
ADAPTER = "adapter"


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy in memory.

    Args:
        model: the weights.
        tokenizer: of prompts and completions.
        template: of prompts.
        end_token_ids: they end a completion when sampled, and count as part of it.
        adapter: what training added to the weights, where that was an adapter; written beside them too.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    template: PromptTemplate
    end_token_ids: tuple[int, ...]
    adapter: AdapterWeights | None = None


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
    if policy.adapter is not None:
        policy.adapter.save(aside / ADAPTER)
    text = json.dumps(provenance, indent=2, sort_keys=True, ensure_ascii=False)
    (aside / PROVENANCE_FILE).write_text(text + "\n", encoding="utf-8")
    if config is not None:
        (aside / CONFIG_FILE).write_text(config, encoding="utf-8")
    for path in (p for p in aside.rglob("*") if p.is_file()):
        path.chmod(0o644)  # safetensors writes 0600, which another user of a mounted clone cannot read
