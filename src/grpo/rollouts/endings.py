"""Where a row of drawn tokens ends as a completion, and what its text is: the same whichever engine drew it."""

from __future__ import annotations

from collections.abc import Container, Sequence

from transformers import PreTrainedTokenizerBase

from grpo.records import FinishReason
from grpo.rollouts.stop_strings import Stop


def ending(tokens: Sequence[int], end_token_ids: Container[int], stop: Stop | None) -> tuple[int, FinishReason]:
    """How many of a row's tokens are its completion's, the end token included, and why it ends there."""
    if stop is not None:
        return stop.length, "stop_string"
    end = next((i for i, token in enumerate(tokens) if token in end_token_ids), None)
    return (len(tokens), "length") if end is None else (end + 1, "end_token")


def completion_text(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], finish_reason: FinishReason, stop: Stop | None
) -> str:
    """Without the end token, and without what the last token holds beyond a stop string."""
    kept = tokens[:-1] if finish_reason == "end_token" else tokens
    text = str(tokenizer.decode(list(kept)))
    return text if stop is None else text[: len(text) - stop.beyond]
