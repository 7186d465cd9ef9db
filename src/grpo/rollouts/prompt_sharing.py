"""Whether a model's rows can attend to a prompt that is kept once, found out by trying."""

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
from grpo.rollouts.shared_prompts import TAKEN_APART, shared_attention

_SHARES: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()

# Of the kinds of layers that are sampled from at all: not chunks of positions, nor layers without keys of their own.
SHARING_LAYERS = frozenset({"full_attention", "sliding_attention"})


def can_share_prompts(model: PreTrainedModel) -> bool:
    """Whether sharing gives the logits that copies give; tried the first time a model is asked about."""
    if model not in _SHARES:
        _SHARES[model] = _is_of_known_kind(model) and _gives_the_same(model)
    return _SHARES[model]


def _is_of_known_kind(model: PreTrainedModel) -> bool:
    return (
        model.config._attn_implementation == TAKEN_APART
        and set(layer_kinds(model)) <= SHARING_LAYERS
        and not has_windows_of_its_own(model)
        and model._can_set_attn_implementation()
    )


def _gives_the_same(model: PreTrainedModel) -> bool:
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False), evaluating(model):
        copied = _logits(model, share_prompts=False)
        try:
            difference = "the logits are others" if not alike(_logits(model, share_prompts=True), copied) else None
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            difference = str(error)
    if difference is not None:
        warnings.warn(
            f"{type(model).__name__} cannot attend to a prompt that is kept once ({difference}): while sampling, its "
            "keys and values are copied for every completion, as with sampling.shared_prompt: false",
            stacklevel=4,
        )
    return difference is None


def _logits(model: PreTrainedModel, share_prompts: bool) -> Tensor:
    """Those of two uneven prompts with two rows each, after two tokens."""
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, torch.nn.Embedding)
    tokens = [1 + (7 * i) % min(len(embeddings.weight) - 1, 64) for i in range(9)]
    groups = [PromptGroup(Problem(str(length), "", "", ""), "", "", tuple(tokens[:length])) for length in (2, 4)]
    with shared_attention(model) if share_prompts else nullcontext():
        rows = GrowingRows(model, WaitingGroups(groups, 2, 4), 3, share_prompts)
        rows.admit(groups, [[0, 1], [2, 3]])
        for step in (4, 5):
            rows.append(torch.tensor([tokens[(step + row) % 9] for row in range(4)], device=model.device))
    return rows.logits
