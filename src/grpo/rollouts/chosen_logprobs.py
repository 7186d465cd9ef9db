"""Log-probabilities and entropies of chosen tokens from hidden states, without a tensor of all logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# A chunk of tokens is as many as have logits of this size together: what fits a processor's caches a few times over,
# and still keeps the matrix product busy.
CHUNK_BYTES = 2**26


@dataclass(frozen=True)
class LogitRule:
    """What lies between the output layer and the logarithm: ``cap * tanh(scale * z / cap) / temperature``.

    Args:
        scale: of the output layer's result.
        cap: of the logits, softly; None for none.
        temperature: that the tokens were drawn at.
    """

    scale: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    def apply_(self, z: Tensor) -> Tensor:
        """The logits ``[C, V]`` of an output layer's ``[C, V]`` result, in its place."""
        if self.cap is None:
            factor = self.scale / self.temperature
            return z if factor == 1.0 else z.mul_(factor)
        return z.mul_(self.scale / self.cap).tanh_().mul_(self.cap / self.temperature)

    def backward_(self, gradient: Tensor, logits: Tensor | None) -> Tensor:
        """The gradient of the output layer's result, in the place of that of the logits."""
        if self.cap is not None:
            assert logits is not None
            slope = logits.mul(self.temperature / self.cap).square_().neg_().add_(1.0)
            gradient.mul_(slope)
        factor = self.scale / self.temperature
        return gradient if factor == 1.0 else gradient.mul_(factor)


def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    rule: LogitRule = LogitRule(),
    entropy_gradient: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """The log-probability of one token for each hidden state, and the entropy of the whole distribution.

    Logits are made for some hidden states at a time, and once more in the backward pass; a chunk is the only tensor
    as wide as the vocabulary. They are computed in the dtype of the hidden states (of autocast, within it), all that
    follows in float32, or in float64 where they are.

    Args:
        hidden: ``[M, H]``.
        weight: ``[V, H]`` of the output layer.
        bias: ``[V]``, or None.
        tokens: ``[M]``.
        rule: from the output layer's result to the logits.
        entropy_gradient: whether the entropies carry a gradient.
        chunk_bytes: of the logits that are held at a time; at least one hidden state's.

    Returns:
        log-probabilities and entropies ``[M]``, in nats.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        logprobs, entropies = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden.to(weight.dtype), weight, bias, tokens, rule, entropy_gradient, chunk_bytes
        )
    return logprobs, entropies


class _ChosenLogprobs(torch.autograd.Function):
    """Keeps hidden states and one normaliser a token for the backward pass, and makes the logits again there."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        rule: LogitRule,
        entropy_gradient: bool,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropies, normalisers = torch.empty(3, len(hidden), dtype=dtype, device=hidden.device)
        for part in _chunks(len(hidden), len(weight), dtype, chunk_bytes):
            logits = _logits(hidden[part], weight, bias, rule, dtype)
            normalisers[part] = torch.logsumexp(logits, dim=-1)
            logprobs[part] = _picked(logits, tokens[part]) - normalisers[part]
            entropies[part] = _entropies(logits.sub_(normalisers[part].unsqueeze(-1)))
        ctx.save_for_backward(hidden, weight, bias, tokens, normalisers, entropies)
        ctx.options = (rule, entropy_gradient, chunk_bytes, dtype)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, on_logprobs: Tensor, on_entropies: Tensor) -> Any:
        hidden, weight, bias, tokens, normalisers, entropies = ctx.saved_tensors
        rule, entropy_gradient, chunk_bytes, dtype = ctx.options
        to_hidden, to_weight, to_bias, *_ = ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden) if to_hidden else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if to_weight else None
        d_bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and to_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _chunks(len(hidden), len(weight), dtype, chunk_bytes):
                logits = _logits(hidden[part], weight, bias, rule, dtype)
                kept = logits.clone() if rule.cap is not None else None
                logprobs = logits.sub_(normalisers[part].unsqueeze(-1))
                if entropy_gradient:
                    on_logits = _on_logits_with_entropy(
                        logprobs, on_logprobs[part], tokens[part], on_entropies[part], entropies[part]
                    )
                else:
                    on_logits = _on_logits(logprobs, on_logprobs[part], tokens[part])
                on_output = rule.backward_(on_logits, kept).to(hidden.dtype)
                if d_hidden is not None:
                    torch.mm(on_output, weight, out=d_hidden[part])
                if d_weight is not None:
                    _add_product_(d_weight, on_output.t(), hidden[part])
                if d_bias is not None:
                    d_bias += on_output.sum(dim=0, dtype=dtype)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(weight.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None


def _chunks(states: int, vocabulary: int, dtype: torch.dtype, chunk_bytes: int) -> list[slice]:
    size = max(1, chunk_bytes // (vocabulary * dtype.itemsize))
    count = -(-states // size)
    even = -(-states // max(1, count))  # no small rest: the weights are read once a chunk
    return [slice(start, min(start + even, states)) for start in range(0, states, max(1, even))]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, rule: LogitRule, dtype: torch.dtype) -> Tensor:
    """``[C, V]``, a tensor of its own."""
    return rule.apply_(torch.nn.functional.linear(hidden, weight, bias).to(dtype))


def _picked(values: Tensor, tokens: Tensor) -> Tensor:
    return values.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _entropies(logprobs: Tensor) -> Tensor:
    """``[C]`` of ``[C, V]`` log-probabilities."""
    probabilities = logprobs.exp()
    entropies: Tensor = -torch.linalg.vecdot(probabilities, logprobs)
    lost = entropies.isnan()
    if bool(lost.any()):  # an impossible token: entr is 0 at probability 0, where p * log p is NaN
        entropies[lost] = torch.special.entr(probabilities[lost]).sum(dim=-1)
    return entropies


def _on_logits(logprobs: Tensor, on_logprobs: Tensor, tokens: Tensor) -> Tensor:
    """The gradient ``[C, V]`` of the logits, in the place of the log-probabilities."""
    on_logits = logprobs.exp_().mul_(on_logprobs.neg().unsqueeze(-1))
    return on_logits.scatter_add_(-1, tokens.unsqueeze(-1), on_logprobs.unsqueeze(-1))


def _on_logits_with_entropy(
    logprobs: Tensor, on_logprobs: Tensor, tokens: Tensor, on_entropies: Tensor, entropies: Tensor
) -> Tensor:
    """Likewise, with that of the entropies: ``-p * (log p + H)`` for each."""
    probabilities = logprobs.exp()
    surprise = logprobs.clamp_(min=torch.finfo(logprobs.dtype).min)  # 0 * -inf is NaN
    factor = surprise.add_(entropies.unsqueeze(-1)).mul_(on_entropies.unsqueeze(-1)).add_(on_logprobs.unsqueeze(-1))
    on_logits = probabilities.mul_(factor).neg_()
    return on_logits.scatter_add_(-1, tokens.unsqueeze(-1), on_logprobs.unsqueeze(-1))


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right``, in the dtype of ``total``: sums of many chunks are not rounded to bfloat16 on the way."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
