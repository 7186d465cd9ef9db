"""From scored groups to the tensors of an update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from grpo.records import Rollout


@dataclass(frozen=True)
class RolloutBatch:
    """``N = P * G`` completions of ``P`` prompts, the members of a group side by side.

    Args:
        prompts: ``[P, L]`` left-padded tokens, with ``prompt_mask``.
        completions: ``[N, T]`` right-padded tokens.
        mask: ``[N, T]`` bool, true at the policy's own tokens (the sampled end token included).
        old_logprobs: ``[N, T]`` under the policy that sampled, recorded when the tokens were drawn.
    """

    prompts: Tensor
    prompt_mask: Tensor
    completions: Tensor
    mask: Tensor
    old_logprobs: Tensor

    @property
    def group_size(self) -> int:
        return len(self.completions) // len(self.prompts)

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


def collate(groups: Sequence[Sequence[Rollout]]) -> RolloutBatch:
    """The batch of whole groups, all of one size, no wider than its longest member."""
    members = [rollout for group in groups for rollout in group]
    prompts, prompt_mask = pad([group[0].group.prompt_tokens for group in groups], torch.long, "left")
    completions, mask = pad([rollout.tokens for rollout in members], torch.long, "right")
    old_logprobs, _ = pad([rollout.logprobs for rollout in members], torch.float32, "right")
    return RolloutBatch(prompts, prompt_mask.long(), completions, mask, old_logprobs)


def micro_batches(groups: Sequence[Sequence[Rollout]], max_rows: int) -> Iterator[list[int]]:
    """Indices of groups to run together: like lengths side by side, at most ``max_rows`` completions."""
    size = len(groups[0])
    order = sorted(range(len(groups)), key=lambda i: (len(groups[i][0].group.prompt_tokens), i))
    step = max(1, max_rows // size)
    for start in range(0, len(order), step):
        yield order[start : start + step]
