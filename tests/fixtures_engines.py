"""An engine in the place of vLLM's server, for whole runs that need no vLLM."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from fixtures_policy import TOKENIZER
from transformers import PreTrainedModel

from grpo.rollouts.vllm_sampling import Completion, Request
from grpo.training import engines

LETTERS = TOKENIZER("abcdef012345").input_ids


class Letters:
    """Draws letters and digits by the seeds alone, whatever the weights are.

    Args:
        longest_wait: as a server is given it.
        name: for the record.
        context: tokens.
        loses_after: hand-overs, after which it has the weights of another training.
    """

    def __init__(self, longest_wait: float, name: str, context: int, loses_after: int | None) -> None:
        self.longest_wait = longest_wait
        self.name = name
        self.context = context
        self.loses_after = loses_after
        self.taken: list[str] = []
        self.closed = 0

    def take_over(self, model: PreTrainedModel, weights: str) -> None:
        self.taken.append(weights)

    def held(self) -> set[str | None]:
        lost = self.loses_after is not None and len(self.taken) > self.loses_after
        return {"another training's" if lost else self.taken[-1]}

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        return [self._complete(request) for request in requests]

    def _complete(self, request: Request) -> Completion:
        length = request.sampling["max_tokens"]
        tokens = random.Random(request.sampling["seed"]).choices(LETTERS, k=length)
        return Completion(tuple(tokens), (-2.0,) * length, frozenset({self.taken[-1]}))

    def close(self) -> None:
        self.closed += 1


def stand_in(
    patch: pytest.MonkeyPatch, name: str = "vllm 1 float32", context: int = 64, loses_after: int | None = None
) -> list[Letters]:
    """Let runs with a server have this engine in its place; gives those that were made."""
    made: list[Letters] = []

    def make(_address: str, _max_rows: int, longest_wait: float) -> Letters:
        made.append(Letters(longest_wait, name, context, loses_after))
        return made[-1]

    patch.setattr(engines, "Server", make)
    return made
