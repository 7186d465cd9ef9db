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
FinishReason = Literal["end_token", "length"]


@dataclass(frozen=True)
class Problem:
    """A task instance with its gold answer. ``slice`` names the subset it is reported under."""

    id: str
    question: str
    answer: str
    slice: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


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
class Rollout:
    """One sampled completion of a group.

    ``tokens`` are exactly the drawn ones, the end token included; ``text`` is their decoding without
    it. ``logprobs`` are those of the drawn tokens under the full softmax at the sampling temperature.
    """

    key: RolloutKey
    group: PromptGroup
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    finish_reason: FinishReason

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


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


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout with every reward component raw, and the transformed reward that enters the group."""

    rollout: Rollout
    components: Mapping[str, Score]
    reward: float | None

    @property
    def scored(self) -> bool:
        return self.reward is not None
