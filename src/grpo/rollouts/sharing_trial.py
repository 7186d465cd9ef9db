"""Whether a model's rows can attend to a prompt that is kept once: by what is known of it, and by trying."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.records import Problem, PromptGroup
from grpo.rollouts.completion_logprobs import alike, evaluating, has_windows_of_its_own
from grpo.rollouts.growing_rows import GrowingRows, WaitingGroups
from grpo.rollouts.row_cache import layer_kinds
from grpo.rollouts.shared_attention import COMPUTED, shared_attention

# Of the kinds of layers that are sampled from at all: not chunks of positions, nor layers without keys of their own.
SHARING_LAYERS = frozenset({"full_attention", "sliding_attention"})

# Why a model that was tried cannot; empty where it can.
_TRIED: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()
_WARNED: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()


def can_share_prompts(model: PreTrainedModel) -> bool:
    """Whether sharing gives the logits that copies give; where it does not, a warning says why, once a model."""
    why = _known_obstacle(model)
    if why is None:
        if model not in _TRIED:
            _TRIED[model] = _obstacle_found(model)
        why = _TRIED[model]
    if why and _WARNED.get(model) != why:
        _WARNED[model] = why
        warnings.warn(
            f"{type(model).__name__} {why}: while sampling, each completion has a copy of its prompt's keys and "
            "values, as with sampling.shared_prompt: false",
            stacklevel=3,
        )
    return not why


def _known_obstacle(model: PreTrainedModel) -> str | None:
    """Looked at each time: a model can be given another attention."""
    config = model.config.get_text_config(decoder=True)
    others = sorted(set(layer_kinds(model)) - SHARING_LAYERS)
    if config._attn_implementation != COMPUTED:
        return f"has the attention {config._attn_implementation!r}, and {COMPUTED!r} alone is computed in parts"
    if others or has_windows_of_its_own(model):
        return f"has layers that see the past in a way of their own ({', '.join(others) or 'windows'})"
    if getattr(config, "attn_temperature_tuning", False):
        return "scales its attention by how much its cache holds"
    if not model._can_set_attn_implementation():
        return "does not take its attention from transformers' interface"
    return None


def _obstacle_found(model: PreTrainedModel) -> str:
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False), evaluating(model):
        copied = _logits(model, share_prompts=False)
        try:
            return "" if alike(_logits(model, share_prompts=True), copied) else "gives other logits with shared prompts"
        except torch.OutOfMemoryError:
            raise
        except (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
            return f"cannot share prompts ({error})"


def _logits(model: PreTrainedModel, share_prompts: bool) -> Tensor:
    """Of rows that grow from two uneven prompts, after one of them has left and a third prompt's have joined."""
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, torch.nn.Embedding)
    tokens = [1 + (7 * i) % min(embeddings.num_embeddings - 1, 64) for i in range(9)]
    groups = [PromptGroup(Problem(str(n), "", "", ""), "", "", tuple(tokens[:n])) for n in (2, 7, 5)]

    def append(step: int) -> None:
        rows.append(torch.tensor([tokens[(step + row) % 9] for row in rows.rows], device=model.device))

    with shared_attention(model) if share_prompts else nullcontext():
        rows = GrowingRows(model, WaitingGroups(groups, 2, 6), 4, share_prompts)
        rows.admit(groups[:2], [[0, 1], [2, 3]])
        append(0)
        rows.keep([0, 2, 3])
        append(1)
        rows.admit(groups[2:], [[4, 5]])
        append(2)
    return rows.logits
