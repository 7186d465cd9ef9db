"""Completions beside one another behind their prompt: a whole group as one row of the model, without padding inside.

A packed row is a prompt, then the completions that were drawn from it. Each completion sees the prompt and itself,
and has the positions that follow the prompt, so the model computes for it what it would compute alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PADDING, PROMPT = -1, 0


@dataclass(frozen=True)
class PackedRows:
    """``B`` packed rows of ``S`` tokens.

    Args:
        tokens: ``[B, S]``, right-padded.
        positions: ``[B, S]``, as each completion alone would have them.
        owner: ``[B, S]``: -1 at padding, 0 in the prompt, i in its i-th completion.
        source: ``[M]``: for each wanted token the flat place of the hidden state that predicts it.
        wanted: ``[N, T]`` bool: which tokens of the completions those are, in their order.
        alone: whether no row holds more than one completion, so that plain causal attention is all it takes.
    """

    tokens: Tensor
    positions: Tensor
    owner: Tensor
    source: Tensor
    wanted: Tensor
    alone: bool

    def visible(self, window: int | None = None) -> Tensor:
        """``[B, 1, S, S]`` bool: which tokens (last) each token sees. Padding sees itself, so that no row is empty.

        Args:
            window: of sliding attention: how many positions back a token sees, itself included.
        """
        later, owner = self.owner.unsqueeze(2), self.owner.unsqueeze(1)
        places = torch.arange(self.owner.shape[1], device=owner.device)
        seen = ((owner == PROMPT) | (owner == later)) & (places.unsqueeze(0) <= places.unsqueeze(1))
        if window is not None:
            seen &= self.positions.unsqueeze(2) - self.positions.unsqueeze(1) < window
        return (seen | (places.unsqueeze(0) == places.unsqueeze(1))).unsqueeze(1)


def pack_rows(
    prompts: Tensor,
    prompt_mask: Tensor,
    completions: Tensor,
    wanted: Tensor,
    rows_per_prompt: Tensor,
) -> PackedRows:
    """Each prompt with the completions that stand beside it, cut where no wanted token follows.

    Args:
        prompts: ``[P, L]`` left-padded, with ``prompt_mask``.
        completions: ``[N, T]`` right-padded, those of a prompt side by side.
        wanted: ``[N, T]`` bool, true at tokens that are to be predicted.
        rows_per_prompt: ``[P]``.
    """
    device = completions.device
    counts = rows_per_prompt.to(device)
    prompt_mask = prompt_mask.bool()
    prompt_lengths = prompt_mask.sum(1)
    pack = torch.repeat_interleave(torch.arange(len(prompts), device=device), counts)
    ranks = torch.arange(len(pack), device=device) - (counts.cumsum(0) - counts)[pack]
    steps = torch.arange(completions.shape[1], device=device)
    # A token is an input where a wanted one follows it.
    lengths = torch.where(wanted, steps, 0).amax(1)
    ends = lengths.cumsum(0)
    before_pack = torch.zeros(len(prompts) + 1, dtype=ends.dtype, device=device)
    before_pack[1:] = ends[counts.cumsum(0) - 1]
    starts = prompt_lengths[pack] + ends - lengths - before_pack[pack]
    width = int((prompt_lengths + before_pack[1:] - before_pack[:-1]).amax())

    tokens = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
    positions, owner = torch.zeros_like(tokens), torch.full_like(tokens, PADDING)
    row, place = prompt_mask.nonzero(as_tuple=True)
    column = (prompt_mask.cumsum(1) - 1)[row, place]
    tokens[row, column], positions[row, column], owner[row, column] = prompts[row, place], column, PROMPT
    row, place = (steps < lengths.unsqueeze(1)).nonzero(as_tuple=True)
    column = starts[row] + place
    tokens[pack[row], column] = completions[row, place]
    positions[pack[row], column] = prompt_lengths[pack[row]] + place
    owner[pack[row], column] = ranks[row] + 1
    row, place = wanted.nonzero(as_tuple=True)
    before = torch.where(place == 0, prompt_lengths[pack[row]], starts[row] + place) - 1
    return PackedRows(tokens, positions, owner, pack[row] * width + before, wanted, bool((counts <= 1).all()))
