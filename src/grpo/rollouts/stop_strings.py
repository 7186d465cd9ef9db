"""Texts that end a completion, however they are cut into tokens.

A token can complete a text only if what it adds begins with an end of that text, or holds all of it. Few tokens
do, and they are known before anything is drawn: only where one of them is drawn is the completion decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

# What a tokenizer decodes the bytes of half a character to.
HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Stop:
    """Where a completion stopped: its tokens, and how many characters the last one has beyond the stop string."""

    length: int
    beyond: int


class StopStrings:
    """Finds the first of ``texts`` in what a policy draws.

    Args:
        texts: none is empty.
        tokenizer: the policy's.
        vocabulary: tokens that the policy can draw.
    """

    def __init__(self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
        self.texts = tuple(texts)
        self.tokenizer = tokenizer
        self.all_ascii = all(text.isascii() for text in self.texts)
        before = tokenizer("a", add_special_tokens=False).input_ids[:1]
        skip = len(self._text(before))
        # Alone and behind another token: some tokenizers drop a space at the start of a text.
        alone = tokenizer.batch_decode([[token] for token in range(vocabulary)])
        behind = tokenizer.batch_decode([[*before, token] for token in range(vocabulary)])
        self._may_complete_list = [
            self._can_end_in(one) or self._can_end_in(other[skip:]) for one, other in zip(alone, behind, strict=True)
        ]
        self.may_complete = torch.tensor(self._may_complete_list)

    def to(self, device: torch.device) -> StopStrings:
        self.may_complete = self.may_complete.to(device)
        return self

    def stop(self, tokens: Sequence[int]) -> Stop | None:
        """The stop that the last of ``tokens`` completes; None if it completes none."""
        text = self._text(tokens)
        ends = [text.index(stop) + len(stop) for stop in self.texts if stop in text]
        return Stop(len(tokens), len(text) - min(ends)) if ends else None

    def stop_at(self, tokens: Sequence[int]) -> Stop | None:
        """The same, without decoding where the last token can complete none."""
        return self.stop(tokens) if self._may_complete_list[tokens[-1]] else None

    def candidates(self, tokens: Tensor, ended: Tensor) -> list[int]:
        """Which rows ``[rows]`` drew a token that may complete a stop string and had not ended before."""
        found: list[int] = (self.may_complete[tokens] & ~ended).nonzero().squeeze(-1).tolist()
        return found

    def _can_end_in(self, text: str) -> bool:
        """Whether a stop string can be completed by a token that adds ``text``."""
        if self.all_ascii:
            text = text.lstrip(HALF_A_CHARACTER)  # the other half of a character before, which no stop string has
        elif HALF_A_CHARACTER in text:
            return True
        heads = [text[:end] for end in range(1, len(text) + 1)]
        return any(stop in text or any(stop.endswith(head) for head in heads) for stop in self.texts)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens)))
