"""What the loss refuses: each error names the argument, its value and the remedy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def require_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    require(tensor.shape == shape, f"{name} has shape {tuple(tensor.shape)}: it must be {tuple(shape)}")


def counted_tokens(mask: Tensor, name: str = "mask") -> Tensor:
    """The mask as a bool tensor of its own (one made in inference mode could not be kept for backward)."""
    require(mask.ndim == 2, f"{name} has shape {tuple(mask.shape)}: it must be [rows, tokens]")
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"{name} holds values other than 0 and 1: weights of tokens go into token_weights")
    return mask != 0


def check_shapes(policy_logprobs: Tensor, advantages: Tensor, others: Mapping[str, Tensor | None]) -> None:
    shape = policy_logprobs.shape
    require(
        len(shape) == 2 and shape.numel() > 0,
        f"policy_logprobs has shape {tuple(shape)}: it must be [rows, tokens]; where no row is left, mask one out",
    )
    require_shape("advantages", advantages, shape[:1])
    for name, tensor in others.items():
        if tensor is not None:
            require_shape(name, tensor, shape)


def check_clipping(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        require(value > 0.0, f"{name} is {value}: it must be positive, or inf to switch this side off")
    require(
        dual_clip is None or 1.0 < dual_clip < math.inf,
        f"dual_clip is {dual_clip}: it must be above 1 and finite, or None to switch it off",
    )
    if clip_high < clip_low < math.inf:
        warnings.warn(f"clip_high {clip_high} is below clip_low {clip_low}: is the order meant?", stacklevel=3)


def check_kl(kl_beta: float, kl_estimator: str, has_reference: bool) -> None:
    require(0.0 <= kl_beta < math.inf, f"kl_beta is {kl_beta}: it must be finite and at least 0")
    require(
        has_reference or kl_beta == 0.0,
        f"reference_logprobs is None, but kl_beta is {kl_beta}: give them, or set kl_beta to 0",
    )
    require(kl_estimator in ("k1", "k2", "k3"), f"kl_estimator is {kl_estimator!r}: choose 'k1', 'k2' or 'k3'")
    if kl_estimator == "k1" and kl_beta > 0.0:
        warnings.warn("kl_estimator 'k1' in the loss has no expected gradient on-policy: use 'k3'", stacklevel=3)


def check_entropy_and_mismatch(
    entropy_bonus: float, has_entropy: bool, mismatch_cap: float | None, has_sampling: bool
) -> None:
    require(0.0 <= entropy_bonus < math.inf, f"entropy_bonus is {entropy_bonus}: it must be finite and at least 0")
    require(
        has_entropy or entropy_bonus == 0.0,
        f"entropy is None, but entropy_bonus is {entropy_bonus}: give it, or set entropy_bonus to 0",
    )
    require(
        mismatch_cap is None or mismatch_cap > 0.0,
        f"mismatch_cap is {mismatch_cap}: it must be positive, or None for no correction",
    )
    require(
        has_sampling or mismatch_cap is None,
        f"sampling_logprobs is None, but mismatch_cap is {mismatch_cap}: give them, or set mismatch_cap to None",
    )
