"""Policy and tools taking turns within the rows that are sampled side by side."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo.records import FinishReason, ToolCall
from grpo.rollouts.draws import Draws
from grpo.rollouts.stop_strings import HALF_A_CHARACTER, Stop, StopStrings
from grpo.rollouts.tools import ToolSettings, answer_call


class CallReader:
    """Reads calls in the tokens that a policy drew, and spells out answers in tokens.

    Args:
        settings: how a call is written, and the tools.
        tokenizer: the policy's.
    """

    def __init__(self, settings: ToolSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.may_close = functools.cache(self._may_close)

    def closed_call(self, tokens: list[int]) -> str | None:
        """What stands between the markers of the call that the last of ``tokens`` closes; None if it closes none."""
        return self.settings.find_call(self._text(tokens)) if self.may_close(tokens[-1]) else None

    def tokens_behind(self, call: ToolCall) -> list[int]:
        """What is put behind an answered call: plain text, special tokens spelled out."""
        text = self.settings.text_behind(call)
        return list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)

    def _may_close(self, token: int) -> bool:
        """Whether the closing marker can end in this token: few can, so that few steps decode a whole turn."""
        text = self._text([token])
        return self.settings.closing[-1] in text or HALF_A_CHARACTER in text

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


class RowTurns:
    """One completion: the policy draws until it closes a call, then the answer's tokens go in, one a step.

    Only what the policy drew since the last answer is read for a call: neither the prompt nor an answer
    can make one, alone or with what is drawn behind it. Where a token holds more than the end of a call,
    the rest stays in the completion and is not read. Stop strings are looked for in the same tokens.
    """

    def __init__(self, reader: CallReader, end_token_ids: Collection[int], stops: StopStrings | None = None) -> None:
        self.reader = reader
        self.end_token_ids = end_token_ids
        self.stops = stops
        self.stop: Stop | None = None
        self.calls: list[ToolCall] = []
        self.is_drawn: list[bool] = []
        self.finish_reason: FinishReason | None = None
        self._unread: list[int] = []
        self._due: deque[int] = deque()

    @property
    def ending(self) -> tuple[int, FinishReason]:
        """How many tokens the completion has, and why it ends there."""
        return len(self.is_drawn), self.finish_reason or "length"

    @property
    def drawn_mask(self) -> tuple[bool, ...] | None:
        """A bool a token; None where no tool put any in."""
        return None if all(self.is_drawn) else tuple(self.is_drawn)

    def take(self, token: int) -> tuple[int, bool]:
        """The row's next token, and whether it is ``token``, which the policy drew, or one that is due from a tool."""
        if self.finish_reason is not None:
            return token, True
        if self._due:
            self.is_drawn.append(False)
            return self._due.popleft(), False
        self.is_drawn.append(True)
        if token in self.end_token_ids:
            self.finish_reason = "end_token"
            return token, True
        self._unread.append(token)
        if self.stops is not None:
            self.stop = self.stops.stop_at(self._unread)
        if self.stop is None:
            self._answer()
        else:
            self.finish_reason = "stop_string"
        return token, True

    def _answer(self) -> None:
        text = self.reader.closed_call(self._unread)
        if text is None:
            return
        settings = self.reader.settings
        if len(self.calls) == settings.max_calls:
            self.finish_reason = "tool_limit"
            return
        call = answer_call(text, settings.available)
        self.calls.append(call)
        self._due.extend(self.reader.tokens_behind(call))
        self._unread.clear()


class ToolTurns:
    """The turns of all rows of a batch, found by a row's place at its start, whichever rows have left since.

    Args:
        settings: the tools and how they are called.
        tokenizer: the policy's.
        end_token_ids: end a completion where the policy draws them, and nowhere else.
        rows: how many.
        stops: end a completion too; None for none.
    """

    def __init__(
        self,
        settings: ToolSettings,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: Collection[int],
        rows: int,
        stops: StopStrings | None = None,
    ) -> None:
        reader = CallReader(settings, tokenizer)
        self.rows = [RowTurns(reader, end_token_ids, stops) for _ in range(rows)]

    def take(self, rows: Sequence[int], drawn: Draws) -> tuple[Draws, Tensor]:
        """Give each of ``rows`` its next token: the one drawn, or one that is due from a tool.

        Returns:
            the step with the due tokens put in, and whether each row has ended, ``[rows]`` bool.
        """
        turns = [self.rows[row] for row in rows]
        taken = [turn.take(token) for turn, token in zip(turns, drawn.tokens.tolist(), strict=True)]
        device = drawn.tokens.device
        tokens = torch.tensor([token for token, _ in taken], device=device)
        is_drawn = torch.tensor([is_drawn for _, is_drawn in taken], device=device)
        ended = torch.tensor([turn.finish_reason is not None for turn in turns], device=device)
        return drawn.with_inserted(tokens, is_drawn), ended
