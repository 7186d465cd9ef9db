"""The values that pass between the rooms: frozen, typed, and the same in memory and in the record.

One small example, followed through:

>>> problem = Problem(id="p1", question="2 + 2 =", answer="4", slice="sums")
>>> group = PromptGroup(problem, template_id="plain", prompt_text="2 + 2 =", prompt_tokens=(5, 6, 5))
>>> key = RolloutKey(seed=1, purpose="train", round=0, problem_id="p1", template_id="plain")
>>> rollout = Rollout(key, group, tokens=(7, 2), text="4", logprobs=(-0.5, -0.1), finish_reason="end_token")
>>> ScoredRollout(rollout, components={"answer": Score(1.0)}, reward=1.0).scored
True
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Purpose = Literal["train", "validation", "evaluation"]
FinishReason = Literal["end_token", "stop_string", "length", "tool_limit"]


@dataclass(frozen=True)
class Problem:
    """A task instance with its gold answer.

    ``slice`` names the subset it is reported under. ``context`` is text retrieved for the question, which
    a prompt template may insert.
    """

    id: str
    question: str
    answer: str
    slice: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    context: str = ""


@dataclass(frozen=True)
class PromptGroup:
    """One problem under one fixed prompt: the unit within which rewards are compared.

    ``occurrence`` counts how often the problem was already drawn in this run, so that a second visit
    samples afresh.
    """

    problem: Problem
    template_id: str
    prompt_text: str
    prompt_tokens: tuple[int, ...]
    occurrence: int = 0


@dataclass(frozen=True)
class RolloutKey:
    """Everything a rollout's random numbers depend on, and nothing else.

    ``draw`` counts redraws of a whole group; members of different draws never mix.
    """

    seed: int
    purpose: Purpose
    round: int
    problem_id: str
    template_id: str
    occurrence: int = 0
    member: int = 0
    draw: int = 0

    def digest(self, length: int = 16) -> bytes:
        """A hash of all fields, ``length`` bytes: the key of the counter-based generator."""
        text = json.dumps(asdict(self), sort_keys=True, ensure_ascii=True)
        return hashlib.blake2b(text.encode(), digest_size=length).digest()

    @property
    def rollout_id(self) -> str:
        """The name under which both tables of the record know this rollout."""
        return self.digest().hex()

    def of_member(self, member: int) -> RolloutKey:
        return replace(self, member=member)


@dataclass(frozen=True)
class SamplingPolicy:
    """What drew the tokens: weights, settings and engine together.

    ``weights_version`` counts the optimiser steps behind the weights; ``settings`` and ``tools`` (names
    and versions) are JSON with sorted keys, so that equal ones are equal text. ``engine`` is ``transformers`` for
    this project's own sampler.
    """

    weights_version: int = 0
    settings: str = "{}"
    tools: str = "{}"
    engine: str = "transformers"


@dataclass(frozen=True)
class ToolCall:
    """A call that a completion made. ``result`` is what was put into its context; not ``valid``: an error's text."""

    name: str
    argument: str
    result: str
    valid: bool = True


@dataclass(frozen=True)
class Rollout:
    """One sampled completion of a group.

    ``tokens`` are exactly those that the policy saw: drawn, the end token included, or inserted by a tool.
    ``drawn`` tells which the policy drew; None: all. ``text`` is their decoding without the end token; where a
    stop string ended the completion it is the last thing in the text.
    ``logprobs`` are those of the drawn tokens under the full softmax at the sampling temperature, and
    ``sampling_logprobs`` those under the distribution they were drawn from, where top-p, top-k or min-p
    cut it; both hold 0 at tokens that were not drawn. ``logprobs`` are NaN where an engine drew from a cut
    distribution and does not tell the full one.
    """

    key: RolloutKey
    group: PromptGroup
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    drawn: tuple[bool, ...] | None = None
    sampling_logprobs: tuple[float, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    sampling_policy: SamplingPolicy = SamplingPolicy()

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def drawn_mask(self) -> tuple[bool, ...]:
        """A bool a token: whether the policy drew it, so that it can take part in the loss."""
        return (True,) * len(self.tokens) if self.drawn is None else self.drawn

    @property
    def invalid_tool_calls(self) -> int:
        return sum(not call.valid for call in self.tool_calls)


@dataclass(frozen=True)
class Score:
    """What a reward or a scorer says of one completion.

    ``value`` is None where it could not be scored; ``reason`` then says why. Never a stand-in number:
    a zero that means "the checker failed" would be learnt from. ``applicable`` is False where the
    check has nothing to say of this problem, which is no failure: it drops out of the sum.
    """

    value: float | None
    reason: str = ""
    parts: Mapping[str, Any] = field(default_factory=dict)
    applicable: bool = True

    @classmethod
    def unscorable(cls, reason: str) -> Score:
        """The checker failed: the whole row is unscored."""
        return cls(value=None, reason=reason)

    @classmethod
    def not_applicable(cls, reason: str) -> Score:
        """The check does not concern this problem."""
        return cls(value=None, reason=reason, applicable=False)

    def plain_parts(self) -> dict[str, Any]:
        """The parts as JSON takes them; what it cannot write, by its text."""
        return {name: value if _is_json(value) else repr(value) for name, value in self.parts.items()}


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout with every reward component raw, and the transformed reward that enters the group.

    ``steps`` are the values on the way from the components to the reward, by name and in order.
    """

    rollout: Rollout
    components: Mapping[str, Score]
    reward: float | None
    steps: Mapping[str, float] = field(default_factory=dict)

    @property
    def scored(self) -> bool:
        return self.reward is not None

    @property
    def reads_answers(self) -> bool:
        """Whether a component says in its ``parts`` which ``answer`` it read."""
        return any("answer" in score.parts for score in self.components.values())

    @property
    def answer(self) -> str | None:
        """The answer that the first such component read, as text; None where there was none to read."""
        found = next((s.parts["answer"] for s in self.components.values() if "answer" in s.parts), None)
        return None if found is None else str(found)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
