"""From logits and a keyed uniform number to a token: the inverse of the cumulative distribution, cut or whole.

One uniform number a position makes each token a pure function of the rollout's key and the distribution
(Devroye, "Non-Uniform Random Variate Generation", 1986, section II.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper

from grpo.records import RolloutKey

# What transformers calls a logits processor with; a cut looks at the distribution alone.
_NO_TOKENS = torch.LongTensor()


@dataclass(frozen=True)
class Draws:
    """Tokens and their log-probabilities, all ``[rows]`` (one step) or all ``[rows, steps]``.

    Args:
        tokens: what each row goes on with.
        logprobs: under the full softmax at the sampling temperature.
        sampling_logprobs: under the cut distribution; None where nothing cuts.
    """

    tokens: Tensor
    logprobs: Tensor
    sampling_logprobs: Tensor | None = None

    @classmethod
    def zeros(cls, shape: torch.Size, device: torch.device, *, cut: bool) -> Draws:
        tokens = torch.zeros(shape, dtype=torch.long, device=device)
        return cls(tokens, *(torch.zeros(shape, dtype=torch.float32, device=device) for _ in range(1 + cut)))

    def put(self, places: Tensor, drawn: Draws) -> None:
        """Write one step at these places of ``[rows, steps]``, counted row by row."""
        self.tokens.view(-1)[places], self.logprobs.view(-1)[places] = drawn.tokens, drawn.logprobs
        if self.sampling_logprobs is not None and drawn.sampling_logprobs is not None:
            self.sampling_logprobs.view(-1)[places] = drawn.sampling_logprobs

    def with_inserted(self, tokens: Tensor, is_drawn: Tensor) -> Draws:
        """``tokens`` instead, with log-probabilities of 0 where they were not drawn."""
        cut = self.sampling_logprobs
        return Draws(
            tokens, self.logprobs.masked_fill(~is_drawn, 0.0), None if cut is None else cut.masked_fill(~is_drawn, 0.0)
        )

    def rows(self) -> Iterator[tuple[list[int], list[float], list[float] | None]]:
        """Tokens, log-probabilities and those under the cut distribution, row by row."""
        cut = [None] * len(self.tokens) if self.sampling_logprobs is None else self.sampling_logprobs.tolist()
        yield from zip(self.tokens.tolist(), self.logprobs.tolist(), cut, strict=True)


def keyed_uniforms(key: RolloutKey, count: int) -> np.ndarray:
    """``[count]`` uniform numbers in [0, 1) of this rollout, one a position, float64.

    Philox is counter-based (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011): the
    key alone fixes the sequence, and a longer one begins with the shorter.
    """
    philox_key = int.from_bytes(key.digest(16), "little")
    return np.random.Generator(np.random.Philox(key=philox_key)).random(count)


def draw_tokens(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw one token a row and give its log-probability.

    Args:
        logits: ``[rows, vocabulary]``.
        uniforms: ``[rows]`` in [0, 1), float64.
        temperature: 0 takes the largest logit; its log-probability is then that of temperature 1.

    Returns:
        tokens ``[rows]`` and their full-softmax log-probabilities ``[rows]``, float32.
    """
    logprobs = _tempered(logits, temperature or 1.0)
    tokens = logprobs.argmax(dim=-1) if temperature == 0 else _inverse_cumulative(logprobs.exp(), uniforms)
    return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def draw_cut_tokens(
    logits: Tensor, uniforms: Tensor, temperature: float, cuts: LogitsProcessorList
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row from what ``cuts`` leave of the distribution.

    Args:
        logits: ``[rows, vocabulary]``.
        uniforms: ``[rows]`` in [0, 1), float64.
        temperature: divides the logits before they are cut; above 0.
        cuts: see :func:`distribution_cuts`.

    Returns:
        tokens ``[rows]``, their full-softmax log-probabilities ``[rows]`` and their renormalised ones
        under the cut distribution ``[rows]``, float32.
    """
    logprobs = _tempered(logits, temperature)
    cut = torch.log_softmax(cuts(_NO_TOKENS, logprobs), dim=-1)
    places = _inverse_cumulative(cut.exp(), uniforms).unsqueeze(-1)
    return places.squeeze(-1), logprobs.gather(-1, places).squeeze(-1), cut.gather(-1, places).squeeze(-1)


def distribution_cuts(top_k: int, top_p: float, min_p: float) -> LogitsProcessorList:
    """The cuts that are on, in the order of transformers' ``generate``: top-k, top-p, min-p; empty for none.

    Each sees what the one before it left, renormalised. Top-k keeps every token as likely as the k-th.
    """
    cuts = LogitsProcessorList()
    if top_k > 0:
        cuts.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        cuts.append(StableTopP(top_p))
    if min_p > 0:
        cuts.append(MinPLogitsWarper(min_p))
    return cuts


class StableTopP(LogitsProcessor):
    """Keep the smallest set of likeliest tokens whose probabilities sum to ``top_p`` or more.

    transformers' own sorts unstably and sums in single precision: which of equally likely tokens (common
    in half precision) stays at the edge could differ between machines. Here the lower id stays.
    """

    def __init__(self, top_p: float) -> None:
        self.top_p = top_p

    def __call__(self, input_ids: torch.LongTensor, scores: Tensor) -> Tensor:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(dim=-1, dtype=torch.float64)
        before = probabilities.cumsum(dim=-1) - probabilities  # exactly 0 at the first, which always stays
        is_cut = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, before >= self.top_p)
        return scores.masked_fill(is_cut, -torch.inf)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities in float32, whatever precision the model has."""
    logits = logits.float()
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)


def _inverse_cumulative(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The first token ``[rows]`` at which the cumulative distribution is above the uniform number.

    The sum is rarely exactly 1, so the number is scaled to it. The largest number below 1 times a sum near
    1 rounds to less than the sum: the token always is one whose own probability lifted the sum, never one
    of probability 0.
    """
    cumulative = probabilities.double().cumsum_(dim=-1)  # in place: a tensor less of this size
    targets = uniforms.unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1)
