"""From rollouts to the tensors of an update, and what of them goes through the model together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, groupby

import torch
from torch import Tensor

from grpo.records import Rollout


@dataclass(frozen=True)
class RolloutBatch:
    """``N`` completions of ``P`` prompts, those of one prompt side by side.

    Args:
        prompts: ``[P, L]`` left-padded tokens, with ``prompt_mask``.
        rows_per_prompt: ``[P]``; they sum to ``N``.
        completions: ``[N, T]`` right-padded tokens.
        mask: ``[N, T]`` bool, true at tokens, false at padding.
        drawn: ``[N, T]`` bool, true at the tokens that the policy drew (the sampled end token included);
            what a tool inserted is not.
        recorded_logprobs: ``[N, T]`` full softmax, recorded when the tokens were drawn.
        sampling_logprobs: ``[N, T]`` of the distribution they were drawn from.
    """

    prompts: Tensor
    prompt_mask: Tensor
    rows_per_prompt: Tensor
    completions: Tensor
    mask: Tensor
    drawn: Tensor
    recorded_logprobs: Tensor
    sampling_logprobs: Tensor

    def to(self, device: torch.device) -> RolloutBatch:
        return RolloutBatch(*(getattr(self, f.name).to(device) for f in fields(self)))


def pad(rows: Sequence[Sequence[float]], dtype: torch.dtype, side: str) -> tuple[Tensor, Tensor]:
    """Rows of uneven length as one tensor ``[rows, longest]``, and the mask of what is not padding.

    Padding is told by place, never by value: the end token often is the padding token too.
    """
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    places = torch.arange(width)
    starts = width - lengths if side == "left" else torch.zeros_like(lengths)
    mask = (places >= starts.unsqueeze(1)) & (places < (starts + lengths).unsqueeze(1))
    values = torch.zeros(len(rows), width, dtype=dtype)
    values[mask] = torch.tensor([value for row in rows for value in row], dtype=dtype)
    return values, mask


def collate(rollouts: Sequence[Rollout], rows_per_prompt: Sequence[int] | None = None) -> RolloutBatch:
    """The batch of these rollouts, no wider than the longest.

    Args:
        rollouts: those of a prompt side by side.
        rows_per_prompt: how many share each pass over a prompt; by default, all neighbours of one prompt.
    """
    if rows_per_prompt is None:
        rows_per_prompt = [len(list(rows)) for _, rows in groupby(rollouts, key=lambda r: r.group.prompt_tokens)]
    firsts = accumulate(rows_per_prompt, initial=0)
    prompts, prompt_mask = pad(
        [rollouts[i].group.prompt_tokens for i, _ in zip(firsts, rows_per_prompt, strict=False)], torch.long, "left"
    )
    completions, mask = pad([rollout.tokens for rollout in rollouts], torch.long, "right")
    drawn, _ = pad([rollout.drawn_mask for rollout in rollouts], torch.bool, "right")
    recorded, _ = pad([rollout.logprobs for rollout in rollouts], torch.float32, "right")
    sampling, _ = pad([rollout.sampling_logprobs or rollout.logprobs for rollout in rollouts], torch.float32, "right")
    shares = torch.tensor(rows_per_prompt)
    return RolloutBatch(prompts, prompt_mask.long(), shares, completions, mask, drawn, recorded, sampling)


@dataclass(frozen=True)
class PassLimits:
    """How much goes through the model at a time. Only memory and time depend on it.

    Args:
        rows: completions in a micro-batch, at most; None for any number.
        tokens: of a micro-batch, at most, padding included and a prompt counted once for all completions that share
            a pass over it; None for any number. One completion with its prompt is run whatever its length.
        shared_prompt: whether completions of a prompt share a pass over it.
        width: of the model's hidden states, which says when sharing costs more than it saves; None for never.
    """

    rows: int | None = 32
    tokens: int | None = None
    shared_prompt: bool = True
    width: int | None = None

    def fits(self, rows: int, tokens: int) -> bool:
        return (self.rows is None or rows <= self.rows) and (self.tokens is None or tokens <= self.tokens)

    def siblings(self, prompt: int) -> float:
        """Completion tokens that may share a pass over a prompt of so many tokens.

        Siblings are masked from each other, but their attention scores are computed: two parts of c tokens cost 8 c^2 w
        operations a layer more together than apart, and spare the prompt a second pass of 24 w^2 a token, which comes
        to the same at c = sqrt(3 w prompt). Short ones stay together: a longer matrix is a faster one.
        """
        if not self.shared_prompt:
            return -1
        return math.inf if self.width is None else max(512.0, 2 * math.sqrt(3 * self.width * prompt))


def read_tokens(rollout: Rollout) -> int:
    """Tokens of a completion that the model reads: its last one predicts nothing."""
    return len(rollout.tokens) - 1


Piece = tuple[int, ...]


def micro_batches(blocks: Sequence[Sequence[Rollout]], limits: PassLimits) -> Iterator[list[Piece]]:
    """What to run together: pieces of like length, each a pass over a prompt and the completions that share it.

    A block that does not fit is cut, and its prompt then runs once for each piece of it.

    Args:
        blocks: completions of one prompt each.
        limits: of a micro-batch.

    Yields:
        pieces as numbers of their completions, counted through all blocks; in an order that depends on lengths and
        on the order of the blocks alone.
    """
    flat = [rollout for block in blocks for rollout in block]
    starts = accumulate((len(block) for block in blocks), initial=0)
    pieces = [piece for start, block in zip(starts, blocks, strict=False) for piece in _cut(start, block, limits)]
    lengths = {piece: _length([flat[i] for i in piece]) for piece in pieces}
    taken: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: (lengths[piece], piece)):
        rows = sum(map(len, taken)) + len(piece)
        if taken and not limits.fits(rows, (len(taken) + 1) * lengths[piece]):
            yield taken
            taken = []
        taken.append(piece)
    if taken:
        yield taken


def _cut(start: int, block: Sequence[Rollout], limits: PassLimits) -> Iterator[Piece]:
    """The block's rows, numbered from ``start``, as many together as the limits let share a pass."""
    first = 0
    for i in range(1, len(block) + 1):
        part = block[first : i + 1]
        prompt = len(block[first].group.prompt_tokens)
        together = limits.fits(len(part), _length(part)) and _length(part) - prompt <= limits.siblings(prompt)
        if i == len(block) or not together:
            yield tuple(range(start + first, start + i))
            first = i


def _length(rollouts: Sequence[Rollout]) -> int:
    """Tokens of a pass over a prompt and completions that share it."""
    return len(rollouts[0].group.prompt_tokens) + sum(map(read_tokens, rollouts))
