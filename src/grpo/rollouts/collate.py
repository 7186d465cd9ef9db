"""From rollouts to the tensors of an update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby

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
    width = max(len(row) for row in rows)
    values = torch.zeros(len(rows), width, dtype=dtype)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        values[i, place] = torch.tensor(row, dtype=dtype)
        mask[i, place] = True
    return values, mask


def collate(rollouts: Sequence[Rollout]) -> RolloutBatch:
    """The batch of these rollouts, no wider than the longest; neighbours of one prompt share it."""
    blocks = [(prompt, len(list(rows))) for prompt, rows in groupby(rollouts, key=lambda r: r.group.prompt_tokens)]
    prompts, prompt_mask = pad([prompt for prompt, _ in blocks], torch.long, "left")
    completions, mask = pad([rollout.tokens for rollout in rollouts], torch.long, "right")
    drawn, _ = pad([rollout.drawn_mask for rollout in rollouts], torch.bool, "right")
    recorded, _ = pad([rollout.logprobs for rollout in rollouts], torch.float32, "right")
    sampling, _ = pad([rollout.sampling_logprobs or rollout.logprobs for rollout in rollouts], torch.float32, "right")
    rows_per_prompt = torch.tensor([rows for _, rows in blocks])
    return RolloutBatch(prompts, prompt_mask.long(), rows_per_prompt, completions, mask, drawn, recorded, sampling)


def micro_batches(blocks: Sequence[Sequence[Rollout]], max_rows: int) -> Iterator[list[int]]:
    """Indices of blocks to run together: prompts of like lengths, at most ``max_rows`` completions.

    Args:
        blocks: completions that stay together, as those of one prompt do; a block larger than
            ``max_rows`` is run by itself.
        max_rows: completions.
    """
    taken: list[int] = []
    rows = 0
    for i in sorted(range(len(blocks)), key=lambda i: (len(blocks[i][0].group.prompt_tokens), i)):
        if taken and rows + len(blocks[i]) > max_rows:
            yield taken
            taken, rows = [], 0
        taken.append(i)
        rows += len(blocks[i])
    if taken:
        yield taken
