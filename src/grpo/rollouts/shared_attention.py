"""Attention of rows to a prompt that is kept once for all of them, and to their own tokens: the arithmetic.

With scores s over the prompt and t over a row's own tokens, and m the largest of both, the row's attention is

    (sum exp(s - m) v_prompt + sum exp(t - m) v_own) / (sum exp(s - m) + sum exp(t - m)),

which is what one softmax over both gives. The first sums are made for all rows of a prompt in one product, so its keys
and values are read once and never copied. What scaled_dot_product_attention rounds in half precision is rounded here,
and nothing else: the sums are in float32.

transformers calls an attention by name with a layer's query, keys and values. The cache therefore hands itself over as
an attribute of the keys (see :class:`grpo.rollouts.shared_prompts.OwnTokensLayer`); a step whose keys come without it
is an error, since it would see a row's own tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "shared_prompts"
# The implementation that is computed in parts here. Others may do more to the scores (cap them, add a learnt sink).
COMPUTED = "sdpa"

# Sums of a part: of the exponentials [..., 1], and of the values that they weigh [..., E].
Sums = tuple[Tensor, Tensor]


def masked_scores(query: Tensor, keys: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """``[B, heads, Q, S]`` in float32 or finer, of ``query [B, heads, Q, D]`` and ``keys [B, heads, S, D]``.

    Args:
        query: of each row.
        keys: of what is seen.
        mask: added.
        scaling: multiplied.
    """
    scores = product(query, keys.mT).mul_(scaling)
    return scores if mask is None else scores.add_(mask)


def weighed_sums(scores: Tensor, largest: Tensor, values: Tensor) -> Sums:
    """The sum of the scores' exponentials over that of the row's ``largest``, and the sum of values so weighed."""
    weights = scores.sub_(largest).exp_()
    return weights.sum(-1, keepdim=True), product(weights.to(values.dtype), values)


def product(one: Tensor, other: Tensor) -> Tensor:
    """``one @ other``, in float32 at least, whatever both are in."""
    if other.dtype not in (torch.bfloat16, torch.float16):
        return one @ other
    if other.is_cuda:  # half precision in, float32 out, without a copy
        made: Tensor = torch.bmm(one.flatten(0, 1), other.flatten(0, 1), out_dtype=torch.float32)
        return made.view(*one.shape[:2], *made.shape[1:])
    return one.float() @ other.float()


def hiding(hidden: Tensor) -> Tensor:
    """What is added to scores to hide columns: ``[N, 1, 1, columns]`` of ``hidden [N, columns]``.

    The lowest number and not minus infinity: of a part in which nothing is seen the exponentials are then 0, not NaN.
    """
    nothing = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return nothing.masked_fill_(hidden, torch.finfo(torch.float32).min)[:, None, None]


def pass_on(device: torch.device) -> Tensor:
    """A mask that transformers hands to the attention as it is; the cache knows what is seen."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention of transformers, by its interface, for rows with shared prompts; the plain one for prompts.

    Raises:
        ValueError: the layer changes its keys after the cache, or its scores, in a way that is not known here.
    """
    attend: Callable[..., Tensor] | None = getattr(key, "attend", None)
    if attend is None:
        if attention_mask is not None and attention_mask.numel() == 1:
            raise ValueError(f"{type(module).__name__} changes its keys between the cache and the attention")
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    for name in ("softcap", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} has {name} in its attention")
    rows, heads, _, size = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size).to(key.dtype)
    with torch.autocast(key.device.type, enabled=False):  # which would round the scores
        output = attend(grouped, key, value, size**-0.5 if scaling is None else scaling)
    return output.to(query.dtype).reshape(rows, 1, heads, -1), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def shared_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within it the model can attend to shared prompts; afterwards each of its parts has its own attention again."""
    configs = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
    text = model.config.get_text_config(decoder=True)
    before = [(config, config._attn_implementation) for config in (*configs.values(), text)]
    text._attn_implementation = NAME
    try:
        yield
    finally:
        for config, implementation in before:  # the whole before its parts: setting it sets theirs
            config._attn_implementation = implementation
