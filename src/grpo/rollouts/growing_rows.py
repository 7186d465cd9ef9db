"""Completions that grow side by side on the live model; rows that have ended leave, and waiting groups join."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.records import PromptGroup
from grpo.rollouts.collate import pad
from grpo.rollouts.row_cache import RowCache, prompt_cache

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

# A pass over prompts is cut in two where padding is more than this share of the tokens, and more than so many.
PADDING_SHARE = 0.25
PADDING_TOKENS = 256


class WaitingGroups:
    """Groups that have no rows yet. Long prompts go first: the shorter ones then fit in beside them.

    Args:
        groups: all prompts.
        group_size: rows of each.
        max_rows: places side by side; a larger group is taken by itself.
    """

    def __init__(self, groups: Sequence[PromptGroup], group_size: int, max_rows: int) -> None:
        self.order = sorted(range(len(groups)), key=lambda i: (len(groups[i].prompt_tokens), i))
        self.group_size = group_size
        self.max_rows = max_rows
        at_once = max(1, max_rows // group_size)
        self.slots = max(group_size, min(max_rows, len(groups) * group_size))
        self.fit_at_once = len(groups) <= at_once
        self.longest_prompt = max(len(group.prompt_tokens) for group in groups)

    def take(self, growing: int) -> list[int]:
        """Those that join ``growing`` rows now, shortest first; none where it does not pay."""
        free = (self.max_rows - growing) // self.group_size
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


class GrowingRows:
    """The rows that still grow, and all that the model's next pass needs of them.

    Args:
        model: the policy.
        waiting: the groups that will join.
        steps: the most tokens a row can get.
    """

    def __init__(self, model: PreTrainedModel, waiting: WaitingGroups, steps: int) -> None:
        self.model = model
        self.steps = steps
        longest_row = waiting.longest_prompt + steps
        slack = 0 if waiting.fit_at_once else 1 + int(SLACK * longest_row)
        self.cache = RowCache(model, waiting.slots, longest_row + slack)
        self.step = 0
        self.rows: list[int] = []
        self._starts: list[int] = []  # each row's first column
        self._births: list[int] = []  # the step of each row's first token
        self.logits = torch.empty(0, 0, device=model.device)
        self._columns = torch.arange(self.cache.room, device=model.device)

    def age(self, place: int) -> int:
        """How many tokens the row at this place had before this step."""
        return self.step - self._births[place]

    @property
    def has_row_at_limit(self) -> bool:
        """Whether a row has all the tokens that it can get, once those of this step are drawn."""
        return self.step - min(self._births) + 1 >= self.steps

    def admit(self, groups: Sequence[PromptGroup], rows: Sequence[Sequence[int]]) -> None:
        """Let the prompts' members join: each prompt is run once.

        Args:
            groups: shortest prompt first.
            rows: the members' numbers, of each group.
        """
        lengths = [len(group.prompt_tokens) for group in groups]
        if not self.rows:
            self.cache.use(first=0, end=lengths[-1])
        assert lengths[-1] <= self.cache.end
        logits = [self.logits] if self.rows else []
        for together in passes(lengths):
            logits.append(self._run_prompts(groups[together], len(rows[0])))
        self.logits = torch.cat(logits) if len(logits) > 1 else logits[0]
        for length, members in zip(lengths, rows, strict=True):
            self.rows += members
            self._starts += [self.cache.end - length] * len(members)
            self._births += [self.step] * len(members)
        self._arrange()

    def keep(self, stay: Sequence[int]) -> list[int]:
        """Go on with the rows at these places alone; gives the places in the order that the rows now have."""
        order = self.cache.keep(stay, self.model.device)
        self.rows, self._starts, self._births = (
            [values[place] for place in order] for values in (self.rows, self._starts, self._births)
        )
        if order:
            self._arrange()
        return order

    def append(self, tokens: Tensor) -> None:
        """Give each row one token more, ``[rows]``; afterwards ``logits`` are those of the next."""
        cache = self.cache
        if cache.end == cache.room:
            self._shift(-min(self._starts))
        mask = None if self._mask is None else self._mask[:, cache.first : cache.end + 1]
        self.logits = self._forward(tokens.unsqueeze(-1), mask, self._positions, cache)
        cache.use(end=cache.end + 1)
        self.step += 1
        self._positions += 1
        self.places += 1

    def _run_prompts(self, groups: Sequence[PromptGroup], repeats: int) -> Tensor:
        prompts, mask = pad([group.prompt_tokens for group in groups], torch.long, "left")
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        device = self.model.device
        cache = prompt_cache(self.model)
        padding = None if bool(mask.all()) else mask.to(device)
        logits = self._forward(prompts.to(device), padding, positions.to(device), cache)
        self.cache.add(cache, repeats, len(groups) * repeats)
        return logits.repeat_interleave(repeats, dim=0)

    def _shift(self, by: int) -> None:
        """Move the columns in use, those left of all rows taken out."""
        self.cache.use(first=min(self._starts))
        self.cache.move_columns(self.cache.first + by)
        self._starts = [start + by for start in self._starts]
        self._arrange()

    def _arrange(self) -> None:
        """What follows from which rows there are and where they start."""
        cache, device = self.cache, self.model.device
        unused = min(self._starts)
        if cache.first > unused or unused - cache.first >= TRIM_WHEN_UNUSED * (cache.end - cache.first):
            cache.use(first=unused)
        starts = torch.tensor(self._starts, device=device)
        is_padded = max(self._starts) > cache.first
        self._mask = (self._columns >= starts.unsqueeze(-1)) if is_padded else None
        self._positions = (cache.end - starts).unsqueeze(-1)
        places = [row * self.steps + self.step - birth for row, birth in zip(self.rows, self._births, strict=True)]
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
