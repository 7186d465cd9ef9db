"""What each token of an update counts: the mean that the loss takes, as weights.

Every published variant of the loss is a weighted sum over tokens; they differ in the weights alone. The
weights belong to the whole update, so that it can be cut into micro-batches whose gradients *sum*.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from grpo.maths.loss_checks import counted_tokens, require_shape

Reduction = Literal["response_mean", "token_mean", "group_mean", "constant"]


def token_weights(
    mask: Tensor,
    *,
    reduction: Reduction = "response_mean",
    group_ids: Tensor | None = None,
    constant_length: int | None = None,
) -> Tensor:
    """What each token of an update counts, ``[N, T]`` float64; 0 where ``mask`` is.

    A row without a counted token is in no denominator. All but ``constant`` sum to 1.

    Args:
        mask: ``[N, T]`` bool or 0/1, over the whole update: the tokens that the policy made and that count.
        reduction: ``response_mean``, the mean over responses of the mean over their tokens (DeepSeekMath,
            arXiv:2402.03300); ``token_mean``, over all tokens alike (DAPO, arXiv:2503.14476);
            ``group_mean``, the mean over groups of the token mean within each; ``constant``, the sum
            divided by rows times ``constant_length``, so that long wrong answers are not let off
            (Dr. GRPO, arXiv:2503.20783).
        group_ids: ``[N]`` integers, which rows belong together; for ``group_mean``, else unused.
        constant_length: tokens, usually the longest completion allowed; for ``constant``, else unused.

    Raises:
        ValueError: an unknown reduction, or one whose argument is missing; wrong shapes; a mask of other values.
    """
    counted = counted_tokens(mask).to(torch.float64)
    lengths = counted.sum(dim=1, keepdim=True)
    rows = (lengths > 0).sum().clamp(min=1)
    if reduction == "response_mean":
        return counted / lengths.clamp(min=1) / rows
    if reduction == "token_mean":
        return counted / lengths.sum().clamp(min=1)
    if reduction == "constant":
        if constant_length is None or constant_length < 1:
            raise ValueError(f"constant_length is {constant_length}: reduction 'constant' needs a number of tokens")
        return counted / (rows * constant_length)
    if reduction == "group_mean":
        if group_ids is None:
            raise ValueError("group_ids is None: reduction 'group_mean' needs the group of each row")
        require_shape("group_ids", group_ids, (mask.shape[0],))
        return _mean_within_groups(counted, group_ids)
    raise ValueError(f"reduction is {reduction!r}: choose 'response_mean', 'token_mean', 'group_mean' or 'constant'")


def _mean_within_groups(counted: Tensor, group_ids: Tensor) -> Tensor:
    names, group = torch.unique(group_ids, return_inverse=True)
    tokens = counted.new_zeros(len(names)).index_add(0, group, counted.sum(dim=1))
    return counted / tokens.clamp(min=1)[group].unsqueeze(1) / (tokens > 0).sum().clamp(min=1)
