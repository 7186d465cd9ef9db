"""One call of the sampler: groups join the rows that grow, rows draw token by token, end and leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from grpo.records import PromptGroup
from grpo.rollouts import growing_rows
from grpo.rollouts.draws import Draws
from grpo.rollouts.growing_rows import GrowingRows, WaitingGroups
from grpo.rollouts.stop_strings import Stop, StopStrings
from grpo.rollouts.tool_turns import ToolTurns

# Steps between two looks at which rows have ended. A look makes the CPU wait for a GPU; what a row that has ended
# draws until then is cut off.
LOOK_EVERY = {"cpu": 1, "cuda": 4}


class Drawing:
    """All rows of a call, numbered group by group.

    Args:
        growing: no rows yet.
        waiting: all groups.
        groups: the prompts.
        sizes: rows of each group.
        uniforms: ``[rows, steps]`` in [0, 1), float64.
        draw: from logits and uniform numbers to a step's draws.
        end_token_ids: end a row.
        stops: end a row too; None for none.
        turns: where there are tools; they then say which rows end.
    """

    def __init__(
        self,
        growing: GrowingRows,
        waiting: WaitingGroups,
        groups: Sequence[PromptGroup],
        sizes: Sequence[int],
        uniforms: np.ndarray,
        draw: Callable[[Tensor, Tensor], Draws],
        end_token_ids: Sequence[int],
        stops: StopStrings | None,
        turns: ToolTurns | None,
        *,
        cut: bool,
    ) -> None:
        self.growing, self.waiting, self.groups = growing, waiting, groups
        self.rows_of = [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        self.draw, self.stops, self.turns = draw, stops, turns
        self.end_token_ids = end_token_ids
        self.device = growing.model.device
        self.uniforms = torch.from_numpy(uniforms).to(self.device)
        self.draws = Draws.zeros(self.uniforms.shape, self.device, cut=cut)
        # Stop strings and tools wait for each step's tokens anyway.
        waits = stops is not None or turns is not None
        self.look_every = 1 if waits else LOOK_EVERY.get(self.device.type, 1)
        self.ended = torch.zeros(0, dtype=torch.bool, device=self.device)
        self.stopped: dict[int, Stop] = {}
        self._end_table: Tensor | None = None

    def draw_all(self) -> Draws:
        """Every row's draws, ``[rows, steps]``; what stands after a row's end means nothing."""
        growing = self.growing
        while True:
            self._admit()
            if not growing.rows:
                return self.draws
            drawn = self.draw(growing.logits, self.uniforms.view(-1)[growing.places])
            drawn = self._note_ends(drawn)
            tokens = self._let_go(drawn.tokens)
            if growing.rows:
                growing.append(tokens)

    def _admit(self) -> None:
        taken = self.waiting.take(len(self.growing.rows), self.growing.cache.prompts_kept)
        if taken:
            members = [self.rows_of[i] for i in taken]
            self.growing.admit([self.groups[i] for i in taken], members)
            self.ended = torch.cat([self.ended, self.ended.new_zeros(sum(map(len, members)))])

    def _note_ends(self, drawn: Draws) -> Draws:
        """Which rows end with this step, which is put among the draws."""
        growing = self.growing
        if self.turns is not None:
            drawn, self.ended = self.turns.take(growing.rows, drawn)
            self.draws.put(growing.places, drawn)
            return drawn
        self.draws.put(growing.places, drawn)
        had_ended = self.ended
        self.ended = had_ended | self._is_end(drawn.tokens)
        if self.stops is not None:
            self._note_stops(drawn.tokens)
        return drawn

    def _is_end(self, tokens: Tensor) -> Tensor:
        """Whether each of ``tokens`` ends a row, by a table: quicker than a search."""
        if self._end_table is None:
            vocabulary = self.growing.logits.shape[-1]
            ends = [token for token in self.end_token_ids if token < vocabulary]
            self._end_table = torch.zeros(vocabulary, dtype=torch.bool, device=self.device)
            self._end_table[ends] = True
        return self._end_table[tokens]

    def _note_stops(self, tokens: Tensor) -> None:
        assert self.stops is not None
        for place in self.stops.candidates(tokens, self.ended):
            row = self.growing.rows[place]
            stop = self.stops.stop(self.draws.tokens[row, : self.growing.age(place) + 1].tolist())
            if stop is not None:
                self.stopped[row] = stop
                self.ended[place] = True

    def _let_go(self, tokens: Tensor) -> Tensor:
        """Take out rows that have ended, where enough have; gives the tokens of those that stay."""
        growing = self.growing
        at_limit = growing.has_row_at_limit
        if not at_limit and growing.step % self.look_every:
            return tokens
        count = int(self.ended.sum())
        if not at_limit and (count == 0 or count < growing_rows.COMPACT_WHEN_ENDED * len(growing.rows)):
            return tokens
        ended = self.ended.tolist()
        stay = [place for place, end in enumerate(ended) if not end and growing.age(place) + 1 < growing.steps]
        order = torch.tensor(growing.keep(stay), dtype=torch.long, device=self.device)
        self.ended = self.ended[order]
        return tokens[order]
