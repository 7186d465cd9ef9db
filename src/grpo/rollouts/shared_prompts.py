"""Attention to a prompt that is kept once for all the rows that grow from it.

A row's attention is made of two parts: over its group's prompt, and over its own tokens. Each part gives its output
and the logarithm of the sum of its exponentiated scores, and from these the whole follows exactly. So a prompt's keys
and values are read once a group, however many rows it has, and never copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo.rollouts.row_cache import RowCache, RowLayer

IMPLEMENTATION = "shared_prompts"
# The attention that is taken apart here; another one may count in other things (a cap on scores, a learnt sink).
TAKEN_APART = "sdpa"


class SharedPrompts:
    """The prompts that rows grow from, and where the rows of each are.

    Args:
        model: the policy.
        slots: prompts at a time; room is made for more where they come.
        room: tokens of the longest.
    """

    def __init__(self, model: PreTrainedModel, slots: int, room: int) -> None:
        self.device = model.device
        self.cache = RowCache(model, slots, room)
        self.cache.use(end=room)
        self.windows = {layer.window for layer in self.cache.row_layers if layer.window is not None}
        self.names: list[int] = []
        self._lengths: list[int] = []
        self._columns = torch.arange(room, device=self.device)
        self._masks: dict[int | None, Tensor | None] = {}

    def add(self, prompts: Cache, names: Sequence[int], lengths: Sequence[int]) -> None:
        """Keep prompts that have been run.

        Args:
            prompts: their keys and values, left-padded.
            names: a number for each.
            lengths: in tokens.
        """
        self.cache.add(prompts, lengths, 1)
        self.names += names
        self._lengths += lengths

    def keep(self, names: set[int]) -> None:
        """Let go of all other prompts."""
        if len(names) < len(self.names):
            stay = [place for place, name in enumerate(self.names) if name in names]
            order = self.cache.keep(stay, self.device)
            self.names = [self.names[place] for place in order]
            self._lengths = [self._lengths[place] for place in order]

    def arrange(self, names: Sequence[int]) -> None:
        """Note which rows grow from which prompt.

        Args:
            names: of each row's prompt.
        """
        place_of = {name: place for place, name in enumerate(self.names)}
        self.places = Places.of([place_of[name] for name in names], self.device)
        lengths = torch.tensor(self._lengths, device=self.device)
        self.cache.use(first=self.cache.end - max(self._lengths))
        # Where each column stands in each prompt; below 0 is padding.
        self._positions = self._columns[self.cache.first :] - (self.cache.end - lengths).unsqueeze(-1)
        padded = min(self._lengths) < max(self._lengths)
        self._masks[None] = _hiding(self._positions < 0) if padded else None

    def look_from(self, positions: Tensor) -> None:
        """Hide what the windows of sliding attention have left behind.

        Args:
            positions: ``[rows, 1]``: of the tokens that look.
        """
        for window in self.windows:
            seen_from = positions[self.places.members[:, 0]] - window  # the rows of a prompt are of one age
            self._masks[window] = _hiding((self._positions < 0) | (self._positions <= seen_from))

    def mask(self, window: int | None) -> Tensor | None:
        """``[prompts, 1, 1, columns]``, added to the scores; None where nothing is hidden."""
        return self._masks[window]


@dataclass(frozen=True)
class Places:
    """Rows by prompt, and back.

    Args:
        members: ``[prompts, M]``: the places of each prompt's rows; a prompt with fewer than M has its first again.
        back: ``[rows]``: where each row stands in ``members``, counted through.
        in_order: whether the rows stand in that order anyway, so that nothing needs to be moved.
    """

    members: Tensor
    back: Tensor
    in_order: bool

    @classmethod
    def of(cls, prompts: Sequence[int], device: torch.device) -> Places:
        """From the place of each row's prompt; every prompt has a row."""
        members: list[list[int]] = [[] for _ in range(max(prompts) + 1)]
        for row, prompt in enumerate(prompts):
            members[prompt].append(row)
        width = max(map(len, members))
        rank = {row: i for rows in members for i, row in enumerate(rows)}
        back = [prompt * width + rank[row] for row, prompt in enumerate(prompts)]
        filled = [rows + rows[:1] * (width - len(rows)) for rows in members]
        in_order = back == list(range(len(members) * width))
        return cls(torch.tensor(filled, device=device), torch.tensor(back, device=device), in_order)

    def gather(self, rows: Tensor) -> Tensor:
        """``[prompts, heads, M * Q, D]`` from ``[rows, heads, Q, D]``."""
        grouped = rows.unflatten(0, self.members.shape) if self.in_order else rows[self.members]
        return grouped.transpose(1, 2).flatten(2, 3)

    def spread(self, grouped: Tensor) -> Tensor:
        """The way back."""
        rows: Tensor = grouped.unflatten(2, (self.members.shape[1], -1)).transpose(1, 2).flatten(0, 1)
        return rows if self.in_order else rows[self.back]


class OwnTokensLayer(RowLayer):
    """One layer's keys and values of the rows' own tokens, and the way to those of their prompts."""

    def __init__(self, slots: int, room: int, window: int | None, shared: SharedPrompts, prompts: RowLayer) -> None:
        super().__init__(slots, room, window)
        self.shared, self.prompts = shared, prompts
        self.mask: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the next columns, and give those that are seen. The keys carry this layer to the attention."""
        self.reserve(key_states, value_states, self.rows)
        keys, values = super().update(key_states, value_states)
        if self.window is not None:
            keys, values = keys[:, :, -self.window :], values[:, :, -self.window :]
        keys.own_tokens_layer = self  # type: ignore[attr-defined]
        return keys, values

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """``[rows, heads, Q, D]``: what ``query``, of that shape, gets from prompt and own tokens."""
        mask = None if self.mask is None else self.mask[..., self.end - keys.shape[2] : self.end]
        own = attention_part(query, keys, values, mask, scaling)
        places, prompt_mask = self.shared.places, self.shared.mask(self.window)
        output, log_sum = attention_part(places.gather(query), *self.prompts.used(), prompt_mask, scaling)
        return joined(own, (places.spread(output), places.spread(log_sum)))


class OwnTokensCache(RowCache):
    """What the rows have drawn themselves; their prompts stand apart.

    Args:
        model: the policy, within :func:`shared_attention`.
        slots: the most rows.
        room: the most columns.
        prompts: those of all rows.
    """

    def __init__(self, model: PreTrainedModel, slots: int, room: int, prompts: SharedPrompts) -> None:
        super().__init__(model, slots, room)
        self.prompts = prompts
        self.layers = [
            OwnTokensLayer(slots, room, layer.window, prompts, layer) if isinstance(layer, RowLayer) else layer
            for layer in prompts.cache.layers
        ]
        self.names: list[int] = []  # of each row's prompt
        self._next_name = 0
        self._no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)

    def columns_of_prompt(self, length: int) -> int:
        return 0

    def add(self, prompts: Cache, lengths: Sequence[int], repeats: int) -> None:
        names = [self._next_name + i for i in range(len(lengths))]
        self._next_name += len(names)
        self.prompts.add(prompts, names, lengths)
        self.names += [name for name in names for _ in range(repeats)]
        self.use(rows=len(self.names))

    def keep(self, stay: Sequence[int], device: torch.device) -> list[int]:
        order = super().keep(stay, device)
        self.names = [self.names[place] for place in order]
        self.prompts.keep(set(self.names))
        return order

    def arrange(self, starts: Tensor) -> None:
        super().arrange(starts)
        self.prompts.arrange(self.names)
        hidden = None if self._seen is None else _hiding(~self._seen)
        for layer in self.row_layers:
            assert isinstance(layer, OwnTokensLayer)
            layer.mask = hidden

    def mask(self, positions: Tensor) -> Tensor:
        """A mask that transformers passes on as it is: the layers have their own."""
        self.prompts.look_from(positions)
        return self._no_mask


def attention_part(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention to some of what is seen, and what it weighs beside the rest.

    Args:
        query: ``[B, heads, Q, D]``.
        keys: ``[B, heads, S, D]``.
        values: ``[B, heads, S, E]``.
        mask: added to the scores.
        scaling: of the scores.

    Returns:
        the output ``[B, heads, Q, E]`` and the logarithm of the scores' sum ``[B, heads, Q, 1]``.
    """
    scores = _product(query, keys.mT).mul_(scaling)
    if mask is not None:
        scores += mask
    weights = scores.softmax(-1)
    # Of the largest score alone, since a weight is its score's exponential over the sum; quicker than logsumexp.
    log_sum = scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
    return _product(weights, values), log_sum


def _product(one: Tensor, other: Tensor) -> Tensor:
    """``one @ other``, in float32 at least: parts that were rounded before they are joined would be rounded twice."""
    if other.dtype not in (torch.bfloat16, torch.float16):
        return one @ other
    if other.is_cuda:  # half precision in, float32 out, without a copy
        product: Tensor = torch.bmm(one.to(other.dtype).flatten(0, 1), other.flatten(0, 1), out_dtype=torch.float32)
        return product.view(*one.shape[:2], *product.shape[1:])
    return one.float() @ other.float()


def joined(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Attention to all that either part has seen."""
    share = torch.sigmoid(other[1] - one[1])
    return torch.lerp(one[0], other[0], share)


def shared_prompts_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention of transformers for rows whose prompts are shared; the plain one for everything else.

    Raises:
        ValueError: the layer wants its scores changed in a way that is not known here.
    """
    layer = getattr(key, "own_tokens_layer", None)
    if layer is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    for name in ("softcap", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} has {name} in its attention, which cannot be shared")
    rows, heads, _, size = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size).to(key.dtype)
    with torch.autocast(key.device.type, enabled=False):  # which would round the scores
        output: Tensor = layer.attend(grouped, key, value, size**-0.5 if scaling is None else scaling)
    return output.to(query.dtype).reshape(rows, 1, heads, -1), None


AttentionInterface.register(IMPLEMENTATION, shared_prompts_attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


@contextmanager
def shared_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within it the model can attend to shared prompts."""
    before = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _hiding(hidden: Tensor) -> Tensor:
    """``[N, 1, 1, columns]``: what is added to scores. No infinity: a part may see nothing, and then weighs nothing."""
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, lowest)[:, None, None]
