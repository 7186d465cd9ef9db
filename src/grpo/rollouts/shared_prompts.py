"""Prompts that are kept once for all the rows that grow from them, beside what each row has drawn itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from grpo.rollouts.row_cache import RowCache, RowLayer
from grpo.rollouts.shared_attention import hiding, masked_scores, pass_on, weighed_sums


class SharedPrompts:
    """The prompts that rows grow from, and where the rows of each are.

    Args:
        model: the policy.
        slots: prompts at a time.
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
        self._positions = self._columns.unsqueeze(0)
        self.places = Places.of([], self.device)
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
        self._masks[None] = hiding(self._positions < 0) if padded else None

    def note_positions(self, positions: Tensor) -> None:
        """Hide what the windows of sliding attention have left behind. All rows of a prompt began at one step.

        Args:
            positions: ``[rows, 1]``: of the tokens that come next.
        """
        for window in self.windows:
            seen_from = positions[self.places.members[:, 0]] - window
            self._masks[window] = hiding((self._positions < 0) | (self._positions <= seen_from))

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
        members: list[list[int]] = [[] for _ in range(max(prompts, default=-1) + 1)]
        for row, prompt in enumerate(prompts):
            members[prompt].append(row)
        width = max(map(len, members), default=0)
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
        """``[rows, heads, Q, D]`` from what :meth:`gather` makes of it."""
        rows: Tensor = grouped.unflatten(2, (self.members.shape[1], -1)).transpose(1, 2).flatten(0, 1)
        return rows if self.in_order else rows[self.back]


class OwnTokensLayer(RowLayer):
    """One layer's keys and values of the rows' own tokens, and the way to those of their prompts.

    Args:
        slots: the most rows.
        room: columns.
        shared: the prompts.
        prompts: their layer.
    """

    def __init__(self, slots: int, room: int, shared: SharedPrompts, prompts: RowLayer) -> None:
        super().__init__(slots, room, prompts.window)
        self.shared, self.prompts = shared, prompts
        self.mask: Tensor | None = None

    def get_seq_length(self) -> int:
        """With the prompt, as a model counts that goes by it."""
        return super().get_seq_length() + self.prompts.get_seq_length()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the next columns, and give those that are seen; the keys bring their attention along."""
        self.reserve(key_states, value_states, self.rows)
        keys, values = super().update(key_states, value_states)
        if self.window is not None:
            keys, values = keys[:, :, -self.window :], values[:, :, -self.window :]
        keys.attend = self.attend  # type: ignore[attr-defined]
        return keys, values

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """``[rows, heads, Q, E]``: what ``query [rows, heads, Q, D]`` gets from the prompt and the row's own tokens."""
        places, (prompt_keys, prompt_values) = self.shared.places, self.prompts.used()
        own_mask = None if self.mask is None else self.mask[..., self.end - keys.shape[2] : self.end]
        own = masked_scores(query, keys, own_mask, scaling)
        prompt = masked_scores(places.gather(query), prompt_keys, self.shared.mask(self.window), scaling)
        largest = torch.maximum(own.amax(-1, keepdim=True), places.spread(prompt.amax(-1, keepdim=True)))
        own_sum, own_output = weighed_sums(own, largest, values)
        prompt_sum, prompt_output = weighed_sums(prompt, places.gather(largest), prompt_values)
        return (own_output + places.spread(prompt_output)) / (own_sum + places.spread(prompt_sum))


class OwnTokensCache(RowCache):
    """What the rows have drawn themselves; their prompts stand apart.

    Args:
        model: the policy, within :func:`shared_attention`.
        slots: the most rows.
        room: the most columns.
        prompts: those of all rows.
    """

    def __init__(self, model: PreTrainedModel, slots: int, room: int, prompts: SharedPrompts) -> None:
        self.prompts = prompts
        self._beside = iter(prompts.cache.row_layers)
        super().__init__(model, slots, room)
        self.names: list[int] = []  # of each row's prompt
        self._next_name = 0
        self._pass_on = pass_on(model.device)

    def new_layer(self, window: int | None) -> RowLayer:
        return OwnTokensLayer(self.slots, self.room, self.prompts, next(self._beside))

    @property
    def prompts_kept(self) -> int:
        return len(self.prompts.names)

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
        mask = None if self._seen is None else hiding(~self._seen)
        for layer in self.row_layers:
            assert isinstance(layer, OwnTokensLayer)
            layer.mask = mask

    def mask(self, positions: Tensor) -> Tensor:
        self.prompts.note_positions(positions)
        return self._pass_on
