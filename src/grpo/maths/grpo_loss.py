"""The GRPO loss: a clipped policy-gradient term, a KL term beside it, and the weights of the tokens.

For token t of rollout i, with the ratio ``r = exp(log pi - log pi_old)`` and the advantage ``A_i``
(DeepSeekMath, arXiv:2402.03300, equation 3; the clipping is PPO's, arXiv:1707.06347, equation 7):

    loss = sum_it  w_it * ( -min(r_it * A_i, clip(r_it, 1 - clip_low, 1 + clip_high) * A_i)
                            + kl_beta * KL_it - entropy_bonus * H_it )

The weights ``w`` say which mean is taken. They belong to the *whole update*: compute them once with
``token_weights``, cut them with the rows, and the micro-batches sum to the gradient of one batch.

Shapes: N rollouts, T completion positions. Log-probabilities, KL and entropy are in nats. The
arithmetic is float32, or float64 where the policy's log-probabilities are.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from grpo.maths.loss_checks import (
    check_clipping,
    check_entropy_and_mismatch,
    check_kl,
    check_shapes,
    counted_tokens,
)
from grpo.maths.loss_metrics import LossOutput, mean_metrics, ratio_metrics, row_sums
from grpo.maths.token_weights import Reduction, token_weights

__all__ = [
    "LOG_RATIO_BOUND",
    "KLEstimator",
    "LossOutput",
    "Ratio",
    "Reduction",
    "grpo_loss",
    "mean_metrics",
    "token_weights",
]

Ratio = Literal["token", "sequence"]
KLEstimator = Literal["k1", "k2", "k3"]

# exp(89) is infinite in float32. Past this bound exp goes on along its tangent: finite, still rising,
# and its gradient still points the right way. exp(20) is 5e8, so no healthy run gets there.
LOG_RATIO_BOUND = 20.0


def grpo_loss(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    reference_logprobs: Tensor | None = None,
    group_ids: Tensor | None = None,
    token_weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    ratio: Ratio = "token",
    reduction: Reduction = "response_mean",
    constant_length: int | None = None,
    kl_beta: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    kl_mask: Tensor | None = None,
    entropy: Tensor | None = None,
    entropy_bonus: float = 0.0,
    sampling_logprobs: Tensor | None = None,
    mismatch_cap: float | None = None,
) -> LossOutput:
    """The loss to minimise, and its metrics.

    On the first pass over fresh rollouts every ratio is 1, and as the advantages of a group sum to 0
    so may the loss: it is the gradient that teaches, ``-A * grad log pi``, not the value. A batch
    without a counted token gives exactly 0 and finite (zero) gradients; what stands at masked
    positions, NaN included, has no influence.

    Args:
        policy_logprobs: ``[N, T]`` log-probabilities of the sampled tokens; the only input with a
            gradient besides ``entropy``.
        old_logprobs: ``[N, T]``, the same tokens under the full softmax, at the sampling temperature,
            of the policy that sampled.
        advantages: ``[N]``.
        mask: ``[N, T]`` bool or 0/1: the policy-made tokens that count. The sampled end token does;
            prompt, padding and tool output do not.
        reference_logprobs: ``[N, T]`` under the frozen reference. Needed for ``kl_beta > 0``; without it
            no KL is measured, with it and ``kl_beta=0`` it is only measured.
        group_ids, reduction, constant_length: as in :func:`token_weights`; unused where that is given.
        token_weights: ``[N, T]``, these rows' share of the whole update's weights. By default
            this call is taken for the whole update.
        clip_low, clip_high: how far below and above 1 a ratio still gains; ``inf`` switches a side off,
            ``clip_high=None`` means ``clip_low``. A higher ``clip_high`` is DAPO's (arXiv:2503.14476).
        dual_clip: ``c > 1`` bounds a negative advantage's term at ``c * |A|`` (arXiv:1912.09729), which
            is otherwise unbounded as the ratio grows.
        ratio: ``token``, or ``sequence``: one ratio a row, the geometric mean over its tokens (GSPO,
            arXiv:2507.18071, equation 7), so a row must not be cut. Its clip range is far
            narrower, about 3e-4.
        kl_beta, kl_estimator: the KL term and its form (Schulman, "Approximating KL divergence", 2020),
            see :func:`_kl`. It stands beside the policy term, never in the reward, and has no ratio on
            it: over several epochs on the same rollouts it is an off-policy estimate.
        kl_mask: ``[N, T]``, default ``mask``: where, within ``mask``, KL is measured and charged; the
            weights stay, so leaving flat groups out changes no denominator.
        entropy, entropy_bonus: ``[N, T]`` nats, and how much of it is taken off the loss.
        sampling_logprobs, mismatch_cap: ``[N, T]`` as the engine that drew the tokens gives them
            (renormalised where top-p, top-k or min-p cut). They are compared with ``old_logprobs``, and
            with a cap the policy term is multiplied by the detached ``min(exp(old - sampling), cap)``:
            truncated importance sampling (Ionides, 2008; for engines, Yao et al., 2025).

    Raises:
        ValueError: wrong or empty shapes, options out of range, an option whose tensor is missing.
    """
    clip_high = clip_low if clip_high is None else clip_high
    check_shapes(
        policy_logprobs,
        advantages,
        {
            "old_logprobs": old_logprobs,
            "mask": mask,
            "reference_logprobs": reference_logprobs,
            "token_weights": token_weights,
            "kl_mask": kl_mask,
            "entropy": entropy,
            "sampling_logprobs": sampling_logprobs,
        },
    )
    check_clipping(clip_low, clip_high, dual_clip)
    check_kl(kl_beta, kl_estimator, reference_logprobs is not None)
    check_entropy_and_mismatch(entropy_bonus, entropy is not None, mismatch_cap, sampling_logprobs is not None)

    dtype = torch.promote_types(policy_logprobs.dtype, torch.float32)
    counted = counted_tokens(mask)
    policy, old = _filled(policy_logprobs, counted, dtype), _filled(old_logprobs.detach(), counted, dtype)
    log_ratio, units = _log_ratio(policy - old, counted, ratio)
    per_token, metrics = _policy_term(log_ratio, advantages, units, clip_low, clip_high, dual_clip)
    metrics |= {"tokens": counted.sum(dim=1), "rows": counted.any(dim=1)}
    if sampling_logprobs is not None:
        log_mismatch = old - _filled(sampling_logprobs.detach(), counted, dtype)
        correction, mismatch_metrics = _mismatch(log_mismatch, counted, mismatch_cap)
        metrics |= mismatch_metrics
        per_token = per_token * correction
    if reference_logprobs is not None:
        kl_counted = counted if kl_mask is None else counted & counted_tokens(kl_mask, "kl_mask")
        log_reference = _filled(reference_logprobs.detach(), kl_counted, dtype) - policy.where(kl_counted, 0.0)
        kl, kl_metrics = _kl(log_reference, kl_counted, kl_estimator)
        metrics |= kl_metrics
        if kl_beta > 0.0:
            per_token = per_token + kl_beta * kl
    if entropy is not None:
        nats = _filled(entropy, counted, dtype)
        metrics["entropy_sum"] = row_sums(nats)
        if entropy_bonus > 0.0:
            per_token = per_token - entropy_bonus * nats
    weights = _update_weights(token_weights, counted, reduction, group_ids, constant_length)
    return LossOutput((weights.to(dtype) * per_token).sum(), metrics)


def _log_ratio(log_ratio: Tensor, counted: Tensor, ratio: Ratio) -> tuple[Tensor, Tensor]:
    """Log-ratios and which of them count: ``[N, T]`` a token, or ``[N, 1]`` a row (GSPO).

    The row's is the mean over its tokens, so the gradient flows through every one of them.
    """
    if ratio == "token":
        return log_ratio, counted
    if ratio == "sequence":
        lengths = counted.sum(dim=1, keepdim=True)
        return log_ratio.sum(dim=1, keepdim=True) / lengths.clamp(min=1), lengths > 0
    raise ValueError(f"ratio is {ratio!r}: choose 'token' or 'sequence'")


def _policy_term(
    log_ratio: Tensor, advantages: Tensor, units: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """``-min(r A, clip(r) A)``, bounded by ``c |A|`` for ``A < 0``; in the shape of ``log_ratio``."""
    ratio = log_ratio.clamp(max=LOG_RATIO_BOUND).exp() + _tangent(log_ratio)
    advantage = advantages.detach().to(ratio.dtype).unsqueeze(1).where(units, 0.0)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    term = -torch.minimum(ratio * advantage, clipped * advantage)
    if dual_clip is not None:
        term = torch.minimum(term, dual_clip * advantage.abs())  # a positive advantage's term is below 0 anyway
    metrics = ratio_metrics(ratio, clipped, advantage, units, dual_clip)
    return term, metrics | {"ratio_bounded": (log_ratio > LOG_RATIO_BOUND).sum(dim=1)}


def _kl(log_reference_ratio: Tensor, counted: Tensor, estimator: KLEstimator) -> tuple[Tensor, dict[str, Tensor]]:
    """Estimates ``[N, T]`` of KL(policy || reference) from ``d = log reference - log policy``.

    ``k3 = exp(d) - d - 1`` is unbiased and never negative; its gradient on-policy is that of
    KL(reference || policy). ``k2 = d^2 / 2`` is biased, but its gradient on-policy is the KL's own.
    ``k1 = -d`` is unbiased, but its gradient on-policy is 0 in expectation.
    """
    d = log_reference_ratio
    if estimator == "k1":
        kl = -d
    elif estimator == "k2":
        kl = d.square() / 2
    else:
        # expm1 keeps the digits that exp(d) - 1 loses near 0; what rounding is left must not go below 0
        kl = (d.clamp(max=LOG_RATIO_BOUND).expm1() + _tangent(d) - d).clamp(min=0.0)
    return kl, {
        "kl_sum": row_sums(kl),
        "kl_tokens": counted.sum(dim=1),
        "kl_bounded": (d > LOG_RATIO_BOUND).sum(dim=1),
    }


def _mismatch(log_mismatch: Tensor, counted: Tensor, cap: float | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The weight ``[N, T]`` on the policy term (1 without a cap) and how far engine and trainer disagree.

    ``log_mismatch`` is ``old - sampling``, detached, and 0 where nothing counts.
    """
    distance = log_mismatch.abs()
    metrics = {"mismatch_sum": row_sums(distance), "mismatch_max": distance.amax(dim=1)}
    if cap is None:
        return torch.ones_like(log_mismatch), metrics
    weight = log_mismatch.clamp(max=LOG_RATIO_BOUND).exp()
    return weight.clamp(max=cap), metrics | {"mismatch_capped": ((weight > cap) & counted).sum(dim=1)}


def _tangent(exponent: Tensor) -> Tensor:
    """What exp's tangent at the bound adds past it; 0 up to the bound."""
    return math.exp(LOG_RATIO_BOUND) * (exponent - LOG_RATIO_BOUND).clamp(min=0.0)


def _filled(values: Tensor, counted: Tensor, dtype: torch.dtype) -> Tensor:
    """``values`` with 0 where nothing counts, put in *before* any arithmetic.

    Were padding masked afterwards, its exp could overflow, and 0 * inf is a NaN gradient.
    """
    return values.to(dtype).masked_fill(~counted, 0.0)


def _update_weights(
    given: Tensor | None,
    counted: Tensor,
    reduction: Reduction,
    group_ids: Tensor | None,
    constant_length: int | None,
) -> Tensor:
    if given is None:
        return token_weights(counted, reduction=reduction, group_ids=group_ids, constant_length=constant_length)
    return given.detach().where(counted, 0.0)
