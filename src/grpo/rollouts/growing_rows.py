"""Completions that grow side by side on the live model: shared prompts, and a cache set aside once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from grpo.records import PromptGroup
from grpo.rollouts.collate import pad


class PreallocatedLayer(DynamicLayer):
    """A dynamic cache layer that writes into room set aside once, instead of growing by copies."""

    def __init__(self, room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.room = room
        self.length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of all positions so far, ``[rows, heads, length, size]`` each."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            rows, heads, _, key_size = key_states.shape
            self.keys = key_states.new_empty(rows, heads, self.room, key_size)
            self.values = value_states.new_empty(rows, heads, self.room, value_states.shape[-1])
        assert self.keys is not None
        assert self.values is not None
        end = self.length + key_states.shape[-2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length


def preallocated_cache(model: PreTrainedModel, room: int) -> Cache:
    """A cache for ``room`` positions in every layer of ``model``."""
    return Cache(layers=[PreallocatedLayer(room) for _ in range(model.config.num_hidden_layers)])


class GrowingRows:
    """The rows that still grow, and all that the model's next pass needs of them.

    Args:
        model: the policy.
        groups: prompts; each is run once.
        group_size: rows of each prompt.
        steps: the most tokens a row can get.
    """

    def __init__(self, model: PreTrainedModel, groups: Sequence[PromptGroup], group_size: int, steps: int) -> None:
        prompts, prompt_mask = pad([group.prompt_tokens for group in groups], torch.long, "left")
        mask = prompt_mask.long().to(model.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        self.model = model
        self.cache = preallocated_cache(model, mask.shape[1] + steps)
        prompt_logits = self._forward(prompts.to(model.device), mask, positions)
        self.cache.batch_repeat_interleave(group_size)
        self.logits = prompt_logits.repeat_interleave(group_size, dim=0)
        self.mask = mask.repeat_interleave(group_size, dim=0)
        self.last_position = positions[:, -1:].repeat_interleave(group_size, dim=0)
        self.rows = torch.arange(len(self.logits), device=model.device)

    def keep(self, indices: Tensor) -> None:
        """Go on with these rows alone."""
        self.cache.batch_select_indices(indices)
        self.mask, self.last_position, self.rows = self.mask[indices], self.last_position[indices], self.rows[indices]

    def append(self, tokens: Tensor) -> None:
        """Give each row one token more, ``[rows]``; afterwards ``logits`` are those of the next."""
        self.last_position = self.last_position + 1
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        self.logits = self._forward(tokens.unsqueeze(-1), self.mask, self.last_position)

    def _forward(self, tokens: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Logits ``[rows, vocabulary]`` of what follows the last token."""
        output = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits
