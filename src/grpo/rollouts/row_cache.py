"""Keys and values of rows that grow side by side, in room that is set aside once.

All rows end at one column, so that a step writes one column for all. A row takes the columns from its own
start to there; what stands left of it is masked. Rows therefore come and go without moving the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicLayer, get_layer_types_and_kwargs

# Layers that keep keys and values, and those that keep nothing of their own. The window of the sliding ones is masked.
HANDLED_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "dummy"})


def layer_kinds(model: PreTrainedModel) -> list[str]:
    """What each layer of ``model`` keeps of the past, in transformers' words."""
    kinds, _ = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    return kinds


def layer_windows(model: PreTrainedModel) -> list[int | None]:
    """How many positions back each layer of ``model`` sees, itself included; None where it sees all."""
    _, settings = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    return [one.get("sliding_window") for one in settings]


def require_handled_cache(model: PreTrainedModel) -> None:
    """Refuse a model whose past is more than keys and values of its own tokens.

    Raises:
        ValueError: naming the model and why.
    """
    why = None
    if model.config.is_encoder_decoder:
        why = "is an encoder and a decoder, and the encoder's states are no part of what is shared and masked here"
    elif getattr(model, "_is_stateful", False):
        why = "keeps a running state, in which a prompt's padding could not be masked"
    elif not any("cache" in inspect.signature(kind.forward).parameters for kind in _model_classes(model)):
        why = "takes no cache of transformers"
    elif others := sorted(set(layer_kinds(model)) - HANDLED_LAYERS):
        why = f"has layers of the kind {', '.join(others)}, which keep more than keys and values"
    if why is not None:
        raise ValueError(
            f"the policy is a {type(model).__name__}, which {why}: choose a decoder with attention layers alone, "
            "such as those of the Llama, Qwen, Gemma or GPT families"
        )


def _model_classes(model: PreTrainedModel) -> list[type[PreTrainedModel]]:
    """The model's class and what it is derived from: its ``forward`` may pass everything on to theirs."""
    return [kind for kind in type(model).__mro__ if issubclass(kind, PreTrainedModel)]


class RowLayer(DynamicLayer):
    """One layer's keys and values, ``[slots, heads, room, size]``, of which ``rows`` and some columns are in use.

    Args:
        slots: the most rows.
        room: columns.
        window: of sliding attention.
    """

    def __init__(self, slots: int, room: int, window: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slots, self.room, self.window = slots, room, window
        self.rows = self.first = self.end = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the next columns of all rows, and give all that are in use."""
        keys, values = self._tensors()
        begin, self.end = self.end, self.end + key_states.shape[-2]
        keys[: self.rows, :, begin : self.end] = key_states
        values[: self.rows, :, begin : self.end] = value_states
        return self.used()

    def used(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows and columns in use."""
        keys, values = self._tensors()
        used = (slice(self.rows), slice(None), slice(self.first, self.end))
        return keys[used], values[used]

    def get_seq_length(self) -> int:
        return self.end - self.first

    def add(self, prompts: DynamicLayer, repeats: int) -> None:
        """Put rows behind the others: each of ``prompts`` so many times, their last columns where the rows end."""
        assert prompts.keys is not None
        assert prompts.values is not None
        rows = slice(self.rows, self.rows + len(prompts.keys) * repeats)
        self.reserve(prompts.keys, prompts.values, rows.stop)
        columns = slice(self.end - prompts.keys.shape[-2], self.end)
        for kept, new in zip(self._tensors(), (prompts.keys, prompts.values), strict=True):
            kept[rows, :, columns].unflatten(0, (-1, repeats)).copy_(new.unsqueeze(1).expand(-1, repeats, -1, -1, -1))

    def reserve(self, keys: Tensor, values: Tensor, rows: int) -> None:
        """Have places for so many rows of such keys and values.

        Raises:
            ValueError: there are not so many.
        """
        if rows > self.slots:
            raise ValueError(f"{rows} rows where there are places for {self.slots}")
        if self.keys is None or self.values is None:
            self.keys, self.values = (_room(like, self.slots, self.room) for like in (keys, values))
            self.is_initialized = True

    def move_rows(self, to: Tensor, source: Tensor) -> None:
        """Copy rows to other places, once anything is written."""
        if self.keys is None:
            return
        used = slice(self.first, self.end)
        for kept in self._tensors():
            kept[to, :, used] = kept[source, :, used]

    def move_columns(self, to: int) -> None:
        """Copy the columns in use, so that they begin at ``to``."""
        width = self.end - self.first
        for kept in self._tensors():
            kept[: self.rows, :, to : to + width] = kept[: self.rows, :, self.first : self.end].clone()

    def _tensors(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values


def _room(like: Tensor, slots: int, room: int) -> Tensor:
    """Zeros: a masked column weighs 0, and 0 times a NaN that fresh memory may hold is no 0.

    Under autocast in its precision: attention rounds keys and values to it anyway, at every pass.
    """
    kind = like.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype
    return like.new_zeros(slots, like.shape[1], room, like.shape[-1], dtype=dtype)


class RowCache(Cache):
    """What the model's next pass needs of all growing rows.

    Args:
        model: the policy.
        slots: the most rows.
        room: the most columns.
    """

    def __init__(self, model: PreTrainedModel, slots: int, room: int) -> None:
        self.slots, self.room = slots, room
        self.rows = self.first = self.end = 0
        self._seen: Tensor | None = None
        layers: list[Any] = [
            DummyLayer() if kind == "dummy" else self.new_layer(window)
            for kind, window in zip(layer_kinds(model), layer_windows(model), strict=True)
        ]
        super().__init__(layers=layers)

    def new_layer(self, window: int | None) -> RowLayer:
        """For a layer of the model that sees so many positions back; None for all."""
        return RowLayer(self.slots, self.room, window)

    @property
    def row_layers(self) -> list[RowLayer]:
        return [layer for layer in self.layers if isinstance(layer, RowLayer)]

    @property
    def prompts_kept(self) -> int:
        """How many prompts have keys and values apart from their rows'."""
        return 0

    def columns_of_prompt(self, length: int) -> int:
        """How many columns a prompt of ``length`` tokens takes in its rows."""
        return length

    def add(self, prompts: Cache, lengths: Sequence[int], repeats: int) -> None:
        """Put rows behind the others, ``repeats`` of each prompt that has been run.

        Args:
            prompts: keys and values of prompts, left-padded.
            lengths: of the prompts, in tokens.
            repeats: rows of each.
        """
        for mine, theirs in zip(self.layers, prompts.layers, strict=True):
            if isinstance(mine, RowLayer) and isinstance(theirs, DynamicLayer):
                mine.add(theirs, repeats)
        self.use(rows=self.rows + len(lengths) * repeats)

    def arrange(self, starts: Tensor) -> None:
        """Note each row's first column, ``[rows]``."""
        columns = torch.arange(self.room, device=starts.device)
        self._seen = columns >= starts.unsqueeze(-1) if int(starts.max()) > self.first else None

    def mask(self, positions: Tensor) -> Tensor | None:
        """What the model is given as its mask with the next token of each row.

        Args:
            positions: ``[rows, 1]``, of those tokens.
        """
        return None if self._seen is None else self._seen[:, self.first : self.end + 1]

    def keep(self, stay: Sequence[int], device: torch.device) -> list[int]:
        """Go on with these rows alone; the last of them fill the gaps, so that few are copied.

        Returns:
            ``stay`` in its new order.
        """
        kept = sorted(stay)
        head = [row for row in kept if row < len(kept)]
        gaps = sorted(set(range(len(kept))) - set(head))
        movers = kept[len(head) :]
        if gaps:
            to, source = torch.tensor([gaps, movers], device=device)
            for layer in self.row_layers:
                layer.move_rows(to, source)
        self.use(rows=len(kept))
        order = {**{row: row for row in head}, **dict(zip(gaps, movers, strict=True))}
        return [order[place] for place in range(len(kept))]

    def move_columns(self, to: int) -> None:
        """Let the columns in use begin at ``to``."""
        for layer in self.row_layers:
            layer.move_columns(to)
        self.use(first=to, end=to + self.end - self.first)

    def use(self, rows: int | None = None, first: int | None = None, end: int | None = None) -> None:
        """Declare which rows and columns are in use."""
        self.rows = self.rows if rows is None else rows
        self.first = self.first if first is None else first
        self.end = self.end if end is None else end
        for layer in self.row_layers:
            layer.rows, layer.first, layer.end = self.rows, self.first, self.end


def prompt_cache(model: PreTrainedModel) -> Cache:
    """An empty cache for a pass over prompts, which keeps all of them whatever a layer's window is."""
    kinds = layer_kinds(model)
    return Cache(layers=[DummyLayer() if kind == "dummy" else DynamicLayer() for kind in kinds])
