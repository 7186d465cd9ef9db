"""Sampling completions on the live policy: shared prompts, a preallocated cache, keyed randomness.

The model is used as it stands, so there is no copy to refresh after an optimiser step. A group's
prompt is run once and its keys and values are shared out to the members; rows that have ended leave
the batch. One uniform number a position and the inverse of the cumulative distribution make each
token a pure function of the rollout's key and the distribution (Devroye, "Non-Uniform Random
Variate Generation", 1986, section II.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from grpo.records import PromptGroup, Rollout, RolloutKey
from grpo.rollouts.collate import pad

# Rows are taken out only when this share of them has ended: it costs a copy of the cache of those that stay.
COMPACT_WHEN_ENDED = 0.125

# Logits divided by less can leave the float32 range.
LOWEST_TEMPERATURE = 1e-4


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are drawn.

    Args:
        temperature: divides the logits; 0 takes the most likely token (evaluation only).
        max_new_tokens: the longest completion, end token included.
        max_rows: completions sampled side by side; more is faster and needs more memory.
    """

    temperature: float = 1.0
    max_new_tokens: int = 16
    max_rows: int = 128

    def __post_init__(self) -> None:
        if self.temperature != 0 and not LOWEST_TEMPERATURE <= self.temperature < float("inf"):
            raise ValueError(
                f"sampling.temperature is {self.temperature}: it must be 0 (greedy) or a number from "
                f"{LOWEST_TEMPERATURE} up"
            )
        if self.max_new_tokens < 1:
            raise ValueError(f"sampling.max_new_tokens is {self.max_new_tokens}: it must be at least 1")
        if self.max_rows < 1:
            raise ValueError(f"sampling.max_rows is {self.max_rows}: it must be at least 1")


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
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    tokens = logprobs.argmax(dim=-1) if temperature == 0 else _inverse_cumulative(logprobs.exp(), uniforms)
    return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _inverse_cumulative(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The first token ``[rows]`` at which the cumulative distribution is above the uniform number.

    The sum is rarely exactly 1, so the number is scaled to it. The largest number below 1 times a sum near
    1 rounds to less than the sum: the token always is one whose own probability lifted the sum, never one
    of probability 0.
    """
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    targets = uniforms.unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1)


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


class _GrowingRows:
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


class Sampler:
    """Draws completions from ``model``.

    Args:
        model: any causal language model of transformers whose cache is of keys and values.
        tokenizer: decodes completions.
        end_token_ids: the tokens that end a completion.
        settings: how tokens are drawn.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: Sequence[int],
        settings: SamplingSettings,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.end_token_ids = frozenset(end_token_ids)
        self.settings = settings

    @torch.no_grad()
    def sample(self, groups: Sequence[PromptGroup], keys: Sequence[RolloutKey], group_size: int) -> list[list[Rollout]]:
        """``group_size`` completions of each group.

        Args:
            groups: the prompts.
            keys: one key a group; its ``member`` is set for each completion.
            group_size: completions a group.

        Returns:
            a list a group, members in order.
        """
        was_training = self.model.training
        self.model.eval()
        sampled: dict[int, list[Rollout]] = {}
        try:
            for indices in self._chunks(groups, group_size):
                drawn = self._sample_chunk([groups[i] for i in indices], [keys[i] for i in indices], group_size)
                sampled.update(zip(indices, drawn, strict=True))
        finally:
            self.model.train(was_training)
        return [sampled[i] for i in range(len(groups))]

    def _chunks(self, groups: Sequence[PromptGroup], group_size: int) -> Iterator[list[int]]:
        """Indices of groups to sample together: prompts of like lengths need the least padding."""
        order = sorted(range(len(groups)), key=lambda i: (len(groups[i].prompt_tokens), i))
        size = max(1, self.settings.max_rows // group_size)
        for start in range(0, len(order), size):
            yield order[start : start + size]

    def _sample_chunk(
        self, groups: Sequence[PromptGroup], keys: Sequence[RolloutKey], group_size: int
    ) -> list[list[Rollout]]:
        members = [[key.of_member(i) for i in range(group_size)] for key in keys]
        uniforms = np.stack([keyed_uniforms(key, self.settings.max_new_tokens) for group in members for key in group])
        tokens, logprobs = self._draw(_GrowingRows(self.model, groups, group_size, uniforms.shape[1]), uniforms)
        rows = iter(zip(tokens.tolist(), logprobs.tolist(), strict=True))
        return [
            [self._rollout(key, group, *next(rows)) for key in group_keys]
            for group, group_keys in zip(groups, members, strict=True)
        ]

    def _draw(self, growing: _GrowingRows, uniforms: np.ndarray) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities, ``[rows, steps]`` each; what stands after a row's end means nothing."""
        device = self.model.device
        numbers = torch.from_numpy(uniforms).to(device)
        ends = torch.tensor(sorted(self.end_token_ids), device=device)
        tokens = torch.zeros(numbers.shape, dtype=torch.long, device=device)
        logprobs = torch.zeros(numbers.shape, device=device)
        ended = torch.zeros(len(numbers), dtype=torch.bool, device=device)
        for step in range(numbers.shape[1]):
            drawn, drawn_logprobs = draw_tokens(growing.logits, numbers[growing.rows, step], self.settings.temperature)
            tokens[growing.rows, step], logprobs[growing.rows, step] = drawn, drawn_logprobs
            ended |= torch.isin(drawn, ends)
            share_ended = float(ended.float().mean())
            if share_ended == 1.0 or step + 1 == numbers.shape[1]:
                break
            if share_ended >= COMPACT_WHEN_ENDED:
                stay = (~ended).nonzero().squeeze(-1)
                growing.keep(stay)
                drawn, ended = drawn[stay], ended[stay]
            growing.append(drawn)
        return tokens, logprobs

    def _rollout(self, key: RolloutKey, group: PromptGroup, tokens: list[int], logprobs: list[float]) -> Rollout:
        """Cut a row at its first end token, which belongs to the tokens and not to the text."""
        end = next((i for i, token in enumerate(tokens) if token in self.end_token_ids), None)
        length = len(tokens) if end is None else end + 1
        return Rollout(
            key,
            group,
            tokens=tuple(tokens[:length]),
            text=str(self.tokenizer.decode(tokens[:end])),
            logprobs=tuple(logprobs[:length]),
            finish_reason="length" if end is None else "end_token",
        )
