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
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["response_mean", "token_mean", "group_mean", "constant"]
Ratio = Literal["token", "sequence"]
KLEstimator = Literal["k1", "k2", "k3"]

# exp(89) is infinite in float32. Past this bound exp goes on along its tangent: finite, still rising,
# and its gradient still points the right way. exp(20) is 5e8, so no healthy run gets there.
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class LossOutput:
    """The loss of one call, and its metrics in a form that adds up.

    Args:
        loss: scalar with a gradient; already weighted, so micro-batches *sum*.
        metrics: detached scalars: counts and float64 sums, except that names in ``_min`` and ``_max``
            hold extremes (of no meaning where nothing was counted). Which names there are depends on the
            options alone, so that processes can reduce them side by side; ``mean_metrics`` reads them.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


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
        reduction: ``response_mean``, the mean over responses of the mean over their tokens (DeepSeekMath);
            ``token_mean``, over all tokens alike (DAPO, arXiv:2503.14476); ``group_mean``, the mean over
            groups of the token mean within each; ``constant``, the sum divided by rows times
            ``constant_length``, so that long wrong answers are not let off (Dr. GRPO, arXiv:2503.20783).
        group_ids: ``[N]`` integers, which rows belong together; for ``group_mean``, else unused.
        constant_length: tokens, usually the longest completion allowed; for ``constant``, else unused.

    Raises:
        ValueError: an unknown reduction, or one whose argument is missing; wrong shapes; a mask of other values.
    """
    counted = _counted(mask).to(torch.float64)
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
        _require_shape("group_ids", group_ids, (mask.shape[0],))
        names, group = torch.unique(group_ids, return_inverse=True)
        group_tokens = lengths.new_zeros(len(names)).index_add(0, group, lengths.squeeze(1))
        return counted / group_tokens.clamp(min=1)[group].unsqueeze(1) / (group_tokens > 0).sum().clamp(min=1)
    raise ValueError(f"reduction is {reduction!r}: choose 'response_mean', 'token_mean', 'group_mean' or 'constant'")


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
    _check_shapes(
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
    _check_clipping(clip_low, clip_high, dual_clip)
    _check_kl(kl_beta, kl_estimator, reference_logprobs is not None)
    _check_entropy_and_mismatch(entropy_bonus, entropy is not None, mismatch_cap, sampling_logprobs is not None)

    dtype = torch.promote_types(policy_logprobs.dtype, torch.float32)
    counted = _counted(mask)
    policy, old = _filled(policy_logprobs, counted, dtype), _filled(old_logprobs.detach(), counted, dtype)
    log_ratio, units = _log_ratio(policy - old, counted, ratio)
    per_token, metrics = _policy_term(log_ratio, advantages, units, clip_low, clip_high, dual_clip)
    metrics |= {"tokens": counted.sum(), "rows": counted.any(dim=1).sum()}
    if sampling_logprobs is not None:
        log_mismatch = old - _filled(sampling_logprobs.detach(), counted, dtype)
        correction, mismatch_metrics = _mismatch(log_mismatch, counted, mismatch_cap)
        metrics |= mismatch_metrics
        per_token = per_token * correction
    if reference_logprobs is not None:
        kl_counted = counted if kl_mask is None else counted & _counted(kl_mask, "kl_mask")
        log_reference = _filled(reference_logprobs.detach(), kl_counted, dtype) - policy.where(kl_counted, 0.0)
        kl, kl_metrics = _kl(log_reference, kl_counted, kl_estimator)
        metrics |= kl_metrics
        if kl_beta > 0.0:
            per_token = per_token + kl_beta * kl
    if entropy is not None:
        nats = _filled(entropy, counted, dtype)
        metrics["entropy_sum"] = _total(nats)
        if entropy_bonus > 0.0:
            per_token = per_token - entropy_bonus * nats
    weights = _update_weights(token_weights, counted, reduction, group_ids, constant_length)
    return LossOutput((weights.to(dtype) * per_token).sum(), metrics)


# reported name -> what was summed, and what it was counted over
_MEANS = {
    "ratio_mean": ("ratio_sum", "ratios"),
    "clip_fraction_low": ("clipped_low", "ratios"),
    "clip_fraction_high": ("clipped_high", "ratios"),
    "dual_clip_fraction": ("dual_clipped", "ratios"),
    "ratio_bounded_fraction": ("ratio_bounded", "ratios"),
    "kl": ("kl_sum", "kl_tokens"),
    "kl_bounded_fraction": ("kl_bounded", "kl_tokens"),
    "entropy": ("entropy_sum", "tokens"),
    "mismatch": ("mismatch_sum", "tokens"),
    "mismatch_capped_fraction": ("mismatch_capped", "tokens"),
}
_EXTREMES = {"ratio_min": "ratios", "ratio_max": "ratios", "mismatch_max": "tokens"}


def mean_metrics(outputs: Sequence[LossOutput]) -> dict[str, float]:
    """The metrics of the micro-batches together, exactly as one batch of all their rows would give them.

    A metric is absent, never NaN, where its input was not given or nothing was counted.

    - ``tokens``, ``rows``: counted tokens, and rows with any.
    - ``ratio_mean``, ``ratio_min``, ``ratio_max``: over tokens, or over rows for ``ratio="sequence"``.
    - ``clip_fraction_low``, ``clip_fraction_high``: share of the ratios where the minimum took the
      clipped side, so the gradient is cut: a ratio below the range with ``A < 0``, above it with ``A > 0``.
    - ``dual_clip_fraction``: share held at ``c * |A|``.
    - ``ratio_bounded_fraction``, ``kl_bounded_fraction``: share past ``LOG_RATIO_BOUND``; anything but 0
      means that log-probabilities disagree badly.
    - ``kl``: mean of the chosen estimator over the tokens of ``kl_mask``.
    - ``entropy``: mean over tokens.
    - ``mismatch``, ``mismatch_max``: ``abs(old - sampling)`` in nats; ``mismatch_capped_fraction``: share
      of the correction's weights that met the cap.
    """
    collected: dict[str, list[float]] = {}
    for output in outputs:
        values = torch.stack([value.to(torch.float64) for value in output.metrics.values()]).tolist()
        for name, value in zip(output.metrics, values, strict=True):
            collected.setdefault(name, []).append(value)
    merged = {name: _how_to_merge(name)(values) for name, values in collected.items()}
    means = {name: merged[name] for name in merged if name in ("tokens", "rows")}
    for name, (value, count) in _MEANS.items():
        if value in merged and merged[count] > 0:
            means[name] = merged[value] / merged[count]
    for name, count in _EXTREMES.items():
        if name in merged and merged[count] > 0:
            means[name] = merged[name]
    return means


def _how_to_merge(name: str) -> Callable[[list[float]], float]:
    return min if name.endswith("_min") else max if name.endswith("_max") else math.fsum


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
    with torch.no_grad():
        metrics = {
            "ratios": units.sum(),
            "ratio_sum": _total(ratio.where(units, 0.0)),
            "ratio_min": ratio.where(units, math.inf).amin(),
            "ratio_max": ratio.where(units, -math.inf).amax(),
            "clipped_low": ((clipped > ratio) & (advantage < 0)).sum(),
            "clipped_high": ((clipped < ratio) & (advantage > 0)).sum(),
            "ratio_bounded": (log_ratio > LOG_RATIO_BOUND).sum(),
        }
        if dual_clip is not None:
            metrics["dual_clipped"] = ((ratio > dual_clip) & (advantage < 0)).sum()
    return term, metrics


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
    return kl, {"kl_sum": _total(kl), "kl_tokens": counted.sum(), "kl_bounded": (d > LOG_RATIO_BOUND).sum()}


def _mismatch(log_mismatch: Tensor, counted: Tensor, cap: float | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The weight ``[N, T]`` on the policy term (1 without a cap) and how far engine and trainer disagree.

    ``log_mismatch`` is ``old - sampling``, detached, and 0 where nothing counts.
    """
    distance = log_mismatch.abs()
    metrics = {"mismatch_sum": _total(distance), "mismatch_max": distance.amax()}
    if cap is None:
        return torch.ones_like(log_mismatch), metrics
    weight = log_mismatch.clamp(max=LOG_RATIO_BOUND).exp()
    return weight.clamp(max=cap), metrics | {"mismatch_capped": ((weight > cap) & counted).sum()}


def _tangent(exponent: Tensor) -> Tensor:
    """What exp's tangent at the bound adds past it; 0 up to the bound."""
    return math.exp(LOG_RATIO_BOUND) * (exponent - LOG_RATIO_BOUND).clamp(min=0.0)


def _filled(values: Tensor, counted: Tensor, dtype: torch.dtype) -> Tensor:
    """``values`` with 0 where nothing counts, put in *before* any arithmetic.

    Were padding masked afterwards, its exp could overflow, and 0 * inf is a NaN gradient.
    """
    return values.to(dtype).masked_fill(~counted, 0.0)


def _counted(mask: Tensor, name: str = "mask") -> Tensor:
    """The mask as a bool tensor of its own (one made in inference mode could not be kept for backward)."""
    if mask.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(mask.shape)}: it must be [rows, tokens]")
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"{name} holds values other than 0 and 1: weights of tokens go into token_weights")
    return mask != 0


def _total(values: Tensor) -> Tensor:
    return values.detach().sum(dtype=torch.float64)


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


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _require_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    _require(tensor.shape == shape, f"{name} has shape {tuple(tensor.shape)}: it must be {tuple(shape)}")


def _check_shapes(policy_logprobs: Tensor, advantages: Tensor, others: Mapping[str, Tensor | None]) -> None:
    shape = policy_logprobs.shape
    _require(
        len(shape) == 2 and shape.numel() > 0,
        f"policy_logprobs has shape {tuple(shape)}: it must be [rows, tokens]; where no row is left, mask one out",
    )
    _require_shape("advantages", advantages, shape[:1])
    for name, tensor in others.items():
        if tensor is not None:
            _require_shape(name, tensor, shape)


def _check_clipping(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        _require(value > 0.0, f"{name} is {value}: it must be positive, or inf to switch this side off")
    _require(
        dual_clip is None or 1.0 < dual_clip < math.inf,
        f"dual_clip is {dual_clip}: it must be above 1 and finite, or None to switch it off",
    )
    if clip_high < clip_low < math.inf:
        warnings.warn(f"clip_high {clip_high} is below clip_low {clip_low}: is the order meant?", stacklevel=3)


def _check_kl(kl_beta: float, kl_estimator: KLEstimator, has_reference: bool) -> None:
    _require(0.0 <= kl_beta < math.inf, f"kl_beta is {kl_beta}: it must be finite and at least 0")
    _require(
        has_reference or kl_beta == 0.0,
        f"reference_logprobs is None, but kl_beta is {kl_beta}: give them, or set kl_beta to 0",
    )
    _require(kl_estimator in ("k1", "k2", "k3"), f"kl_estimator is {kl_estimator!r}: choose 'k1', 'k2' or 'k3'")
    if kl_estimator == "k1" and kl_beta > 0.0:
        warnings.warn("kl_estimator 'k1' in the loss has no expected gradient on-policy: use 'k3'", stacklevel=3)


def _check_entropy_and_mismatch(
    entropy_bonus: float, has_entropy: bool, mismatch_cap: float | None, has_sampling: bool
) -> None:
    _require(0.0 <= entropy_bonus < math.inf, f"entropy_bonus is {entropy_bonus}: it must be finite and at least 0")
    _require(
        has_entropy or entropy_bonus == 0.0,
        f"entropy is None, but entropy_bonus is {entropy_bonus}: give it, or set entropy_bonus to 0",
    )
    _require(
        mismatch_cap is None or mismatch_cap > 0.0,
        f"mismatch_cap is {mismatch_cap}: it must be positive, or None for no correction",
    )
    _require(
        has_sampling or mismatch_cap is None,
        f"sampling_logprobs is None, but mismatch_cap is {mismatch_cap}: give them, or set mismatch_cap to None",
    )
