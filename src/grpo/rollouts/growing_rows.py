"""Completions that grow side by side on the live model; rows that have ended leave, and waiting groups join."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.records import PromptGroup
from grpo.rollouts.collate import pad
from grpo.rollouts.row_cache import RowCache, prompt_cache
from grpo.rollouts.shared_prompts import OwnTokensCache, SharedPrompts

# Rows are taken out only when this share of them has ended: until then their places cost less than the copies.
COMPACT_WHEN_ENDED = 0.125

# Groups join rows that grow only when they fill this share of the places, or when none waits on: a pass over few
# prompts costs nearly as much as one over many.
ADMIT_WHEN_FREE = 0.25

# Columns that no row uses any more are left out of the attention from this share of the width on.
TRIM_WHEN_UNUSED = 0.25

# Columns beyond those of the longest row, as a share of them, where rows will join. When the last column is reached,
# all that are in use move to the left by at least so many.
SLACK = 0.25

# Prompts that are kept at a time, as a multiple of the whole groups that there are places for: single completions may
# outlast their groups. Beyond it waiting groups wait, or the memory of the prompts would near that of copies.
MOST_PROMPTS = 3

# A pass over prompts is cut in two where padding is more than this share of the tokens, and more than so many.
PADDING_SHARE = 0.25
PADDING_TOKENS = 256


class WaitingGroups:
    """Groups that have no rows yet. Long prompts go first: the shorter ones then fit in beside them.

    Args:
        groups: all prompts.
        group_size: rows of each, or of the largest.
        max_rows: places side by side; a larger group is taken by itself.
    """

    def __init__(self, groups: Sequence[PromptGroup], group_size: int, max_rows: int) -> None:
        self.order = sorted(range(len(groups)), key=lambda i: (len(groups[i].prompt_tokens), i))
        self.group_size = group_size
        self.max_rows = max_rows
        at_once = max(1, max_rows // group_size)
        self.slots = max(group_size, min(max_rows, len(groups) * group_size))
        self.fit_at_once = len(groups) <= at_once
        self.most_prompts = min(len(groups), MOST_PROMPTS * at_once)
        self.longest_prompt = max(len(group.prompt_tokens) for group in groups)

    def take(self, growing: int, prompts: int) -> list[int]:
        """Those that join now, shortest first; none where it does not pay.

        Args:
            growing: rows there are.
            prompts: that are kept for them.
        """
        free = min((self.max_rows - growing) // self.group_size, self.most_prompts - prompts)
        count = min(max(free, 0 if growing else 1), len(self.order))
        enough = count * self.group_size >= ADMIT_WHEN_FREE * self.max_rows
        if count == 0 or (growing and not enough and count < len(self.order)):
            return []
        taken = self.order[-count:]
        del self.order[-count:]
        return taken


def passes(lengths: Sequence[int]) -> Iterator[slice]:
    """Prompts that are run together, of these ``lengths``, shortest first: no more padding than declared above."""
    begin = tokens = 0
    for i, length in enumerate(lengths):
        padding = (i - begin + 1) * length - tokens - length
        if padding > max(PADDING_TOKENS, PADDING_SHARE * (tokens + length)):
            yield slice(begin, i)
            begin, tokens = i, 0
        tokens += length
    yield slice(begin, len(lengths))


@dataclass(frozen=True)
class RowNote:
    """What is known of a growing row.

    Args:
        length: of its prompt, in tokens.
        birth: the step of its first token.
        start: its first column.
    """

    length: int
    birth: int
    start: int


class GrowingRows:
    """The rows that still grow, and all that the model's next pass needs of them.

    Args:
        model: the policy.
        waiting: the groups that will join.
        steps: the most tokens a row can get.
        share_prompts: whether a prompt's keys and values are kept once for all its rows, else in every row. The model
            must then be within :func:`shared_attention`.
    """

    def __init__(self, model: PreTrainedModel, waiting: WaitingGroups, steps: int, share_prompts: bool) -> None:
        self.model = model
        self.steps = steps
        longest_row = steps if share_prompts else waiting.longest_prompt + steps
        room = longest_row + (0 if waiting.fit_at_once else 1 + int(SLACK * longest_row))
        if share_prompts:
            prompts = SharedPrompts(model, waiting.most_prompts, waiting.longest_prompt)
            self.cache: RowCache = OwnTokensCache(model, waiting.slots, room, prompts)
        else:
            self.cache = RowCache(model, waiting.slots, room)
        self.step = 0
        self.rows: list[int] = []
        self._notes: list[RowNote] = []
        self.logits = torch.empty(0, 0, device=model.device)

    def age(self, place: int) -> int:
        """How many tokens the row at this place had before this step."""
        return self.step - self._notes[place].birth

    @property
    def has_row_at_limit(self) -> bool:
        """Whether a row has all the tokens that it can get, once those of this step are drawn."""
        return self.step - min(note.birth for note in self._notes) + 1 >= self.steps

    def admit(self, groups: Sequence[PromptGroup], rows: Sequence[Sequence[int]]) -> None:
        """Let the prompts' members join: each prompt is run once, beside those that have as many members.

        Args:
            groups: shortest prompt first.
            rows: the members' numbers, of each group.
        """
        cache = self.cache
        if not self.rows:
            cache.use(first=0, end=cache.columns_of_prompt(len(groups[-1].prompt_tokens)))
        logits = [self.logits] if self.rows else []
        for size in sorted({len(members) for members in rows}):
            alike = [place for place, members in enumerate(rows) if len(members) == size]
            logits += self._join([groups[place] for place in alike], [rows[place] for place in alike])
        self.logits = torch.cat(logits) if len(logits) > 1 else logits[0]
        self._arrange()

    def keep(self, stay: Sequence[int]) -> list[int]:
        """Go on with the rows at these places alone; gives the places in the order that the rows now have."""
        order = self.cache.keep(stay, self.model.device)
        self.rows = [self.rows[place] for place in order]
        self._notes = [self._notes[place] for place in order]
        if order:
            self._arrange()
        return order

    def append(self, tokens: Tensor) -> None:
        """Give each row one token more, ``[rows]``; afterwards ``logits`` are those of the next."""
        cache = self.cache
        if cache.end == cache.room:
            self._shift()
        self.logits = self._forward(tokens.unsqueeze(-1), cache.mask(self._positions), self._positions, cache)
        cache.use(end=cache.end + 1)
        self.step += 1
        self._positions += 1
        self.places += 1

    def _join(self, groups: Sequence[PromptGroup], rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Let groups of as many members each join; gives the logits of each pass over prompts."""
        lengths = [len(group.prompt_tokens) for group in groups]
        logits = [self._run_prompts(groups[together], len(rows[0])) for together in passes(lengths)]
        for length, members in zip(lengths, rows, strict=True):
            self.rows += members
            note = RowNote(length, self.step, self.cache.end - self.cache.columns_of_prompt(length))
            self._notes += [note] * len(members)
        return logits

    def _run_prompts(self, groups: Sequence[PromptGroup], repeats: int) -> Tensor:
        prompts, mask = pad([group.prompt_tokens for group in groups], torch.long, "left")
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        device = self.model.device
        cache = prompt_cache(self.model)
        padding = None if bool(mask.all()) else mask.to(device)
        logits = self._forward(prompts.to(device), padding, positions.to(device), cache)
        self.cache.add(cache, [len(group.prompt_tokens) for group in groups], repeats)
        return logits.repeat_interleave(repeats, dim=0)

    def _shift(self) -> None:
        """Move the columns in use to the left end, those left of all rows taken out."""
        by = min(note.start for note in self._notes)
        self.cache.use(first=by)
        self.cache.move_columns(0)
        self._notes = [replace(note, start=note.start - by) for note in self._notes]
        self._arrange()

    def _arrange(self) -> None:
        """What follows from which rows there are and where they start."""
        cache, device = self.cache, self.model.device
        starts = [note.start for note in self._notes]
        unused = min(starts) - cache.first
        if unused < 0 or unused >= TRIM_WHEN_UNUSED * (cache.end - cache.first):
            cache.use(first=min(starts))
        cache.arrange(torch.tensor(starts, device=device))
        ages = [self.step - note.birth for note in self._notes]
        positions = [note.length + age for note, age in zip(self._notes, ages, strict=True)]
        self._positions = torch.tensor(positions, device=device).unsqueeze(-1)
        places = [row * self.steps + age for row, age in zip(self.rows, ages, strict=True)]
        self.places = torch.tensor(places, device=device)

    def _forward(self, tokens: Tensor, mask: Tensor | None, positions: Tensor, cache: object) -> Tensor:
        """Logits ``[rows, vocabulary]`` of what follows the last token."""
        output = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits
