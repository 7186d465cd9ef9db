"""From the scores of the components to the one number that enters the group, in a fixed order.

Components times weights → their sum → clip → length penalty → format penalty → penalty for invalid tool
calls. Every value on the way is recorded, so that a reward can be worked out again from its row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo.records import Score
from grpo.rewards import RewardComponent

# What a component gives at best; a raw value that is less lacks something.
FULL_MARKS = 1.0

PENALTIES = ("length_penalty", "format_penalty", "tool_penalty")


@dataclass(frozen=True)
class RewardTransform:
    """What becomes of the weighted sum of the components before rewards are compared; by default nothing.

    The order is fixed: the sum is clipped first and the penalties come off the clipped sum, so that no
    clip hides a penalty.

    Args:
        clip: lowest and highest that the weighted sum counts, such as [0, 1]; null leaves it as it is.
        length_penalty: taken off a completion of max_length tokens or more, and in part within length_zone
            before it; 0 for none. Only tokens that the policy drew count, the end token among them.
        max_length: tokens at which the whole length penalty is taken off; at most sampling.max_new_tokens.
        length_zone: tokens before max_length over which the length penalty grows linearly from 0.
        format_penalty: taken off where format_component gives less than full marks (1); 0 for none.
        format_component: the component of rewards that judges the form.
        invalid_tool_penalty: taken off for each invalid tool call; 0 for none.
    """

    clip: tuple[float, float] | None = None
    length_penalty: float = 0.0
    max_length: int | None = None
    length_zone: int | None = None
    format_penalty: float = 0.0
    format_component: str | None = None
    invalid_tool_penalty: float = 0.0

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError(
                f"reward_transform.clip is {list(self.clip)}: give a lower and a higher bound, such as [0, 1]"
            )
        for name in ("length_penalty", "format_penalty", "invalid_tool_penalty"):
            amount = getattr(self, name)
            if not 0 <= amount < math.inf:
                raise ValueError(
                    f"reward_transform.{name} is {amount}: it is taken off the reward, so give a finite amount "
                    "from 0 (none) up"
                )
        self._check_zone()
        if self.format_penalty and self.format_component is None:
            raise ValueError(
                f"reward_transform.format_component is null with format_penalty = {self.format_penalty}: "
                "name the component that judges the form"
            )

    def _check_zone(self) -> None:
        for name in ("max_length", "length_zone"):
            tokens = getattr(self, name)
            if tokens is None and self.length_penalty:
                raise ValueError(
                    f"reward_transform.{name} is null with length_penalty = {self.length_penalty}: "
                    "give a number of tokens"
                )
            if tokens is not None and tokens < 1:
                raise ValueError(f"reward_transform.{name} is {tokens}: it must be at least 1 token")
        if self.max_length is not None and self.length_zone is not None and self.length_zone > self.max_length:
            raise ValueError(
                f"reward_transform.length_zone is {self.length_zone}, more than max_length = {self.max_length}: "
                f"the zone ends at max_length, so give at most {self.max_length}"
            )

    def check_components(self, components: Mapping[str, RewardComponent]) -> None:
        """Refuse a format component that is not there, or that is itself a penalty.

        Raises:
            ValueError: ``format_component`` is not among ``components``, or its weight is negative.
        """
        name = self.format_component
        if name is None:
            return
        if name not in components:
            raise ValueError(
                f"reward_transform.format_component is {name!r}, which is not among the rewards: "
                f"choose from {', '.join(components)}"
            )
        if components[name].weight < 0:
            raise ValueError(
                f"reward_transform.format_component is {name!r}, whose weight is {components[name].weight}: a "
                "component with a negative weight gives 0 where nothing is wrong; name one that gives 1 there"
            )

    def check_length(self, max_new_tokens: int) -> None:
        """Refuse a length penalty that no completion could reach in full.

        Raises:
            ValueError: ``max_length`` is above ``max_new_tokens``, the longest completion.
        """
        if self.length_penalty and self.max_length is not None and self.max_length > max_new_tokens:
            raise ValueError(
                f"reward_transform.max_length is {self.max_length}, above sampling.max_new_tokens = {max_new_tokens}: "
                f"no completion gets that long, so give at most {max_new_tokens} or sample longer ones"
            )

    def steps(
        self,
        scores: Mapping[str, Score],
        components: Mapping[str, RewardComponent],
        *,
        length: int,
        invalid_tool_calls: int,
    ) -> dict[str, float]:
        """The values on the way to the reward, by name and in order; none where the rollout is unscored.

        ``weighted_sum``, then those that are switched on, whether or not they act on this rollout:
        ``clipped``, the sum within its bounds; ``length_penalty``, ``format_penalty`` and ``tool_penalty``,
        what each adds, so 0 or less. :func:`reward_of` gives the reward.

        Args:
            scores: of each component.
            components: for their weights.
            length: tokens that the policy drew, the end token included.
            invalid_tool_calls: how many of the completion's tool calls were invalid.

        Raises:
            ValueError: the weighted sum is past the float64 range.
        """
        total = weighted_sum(scores, components)
        if total is None:
            return {}
        steps = {"weighted_sum": total}
        if self.clip is not None:
            low, high = self.clip
            steps["clipped"] = float(min(max(total, low), high))
        if self.length_penalty:
            steps["length_penalty"] = _taken_off(self.length_penalty, self._overlong(length))
        if self.format_penalty and self.format_component is not None:
            steps["format_penalty"] = _taken_off(self.format_penalty, _lacks(scores[self.format_component]))
        if self.invalid_tool_penalty:
            steps["tool_penalty"] = _taken_off(self.invalid_tool_penalty, invalid_tool_calls)
        return steps

    def _overlong(self, length: int) -> float:
        """Share of the length penalty, 0 to 1: minus the soft overlong punishment of DAPO.

        Yu et al., arXiv:2503.14476, equation 13, L_max being ``max_length`` and L_cache ``length_zone``.
        """
        assert self.max_length is not None
        assert self.length_zone is not None
        past = length - (self.max_length - self.length_zone)
        return min(max(past / self.length_zone, 0.0), 1.0)


def weighted_sum(scores: Mapping[str, Score], components: Mapping[str, RewardComponent]) -> float | None:
    """Sum of weight times value over the components that apply; None if one failed or none applies.

    ``math.fsum`` rounds once, in float64, so that equal scores in any order give equal sums and a group
    of equal completions is an exact tie.

    Raises:
        ValueError: the sum is past the float64 range.
    """
    applicable = {name: score for name, score in scores.items() if score.applicable}
    terms: list[float] = []
    for name, score in applicable.items():
        if score.value is None:
            return None
        terms.append(components[name].weight * score.value)
    return _finite_sum(terms, list(applicable)) if terms else None


def reward_of(steps: Mapping[str, float]) -> float | None:
    """The transformed reward that steps come to: the clipped sum, or the sum, and the penalties; None without steps.

    Raises:
        ValueError: the reward is past the float64 range.
    """
    if not steps:
        return None
    sum_name = "clipped" if "clipped" in steps else "weighted_sum"
    names = [sum_name, *(name for name in PENALTIES if name in steps)]
    return _finite_sum([steps[name] for name in names], names)


def _taken_off(amount: float, times: float) -> float:
    return 0.0 - amount * times  # from 0.0, so that nothing taken off is 0.0 and not -0.0


def _lacks(score: Score) -> bool:
    """Whether a component that applies gave less than full marks."""
    return score.applicable and score.value is not None and score.value < FULL_MARKS


def _finite_sum(terms: Sequence[float], names: Sequence[str]) -> float:
    try:
        total = math.fsum(terms)
    except (OverflowError, ValueError):  # intermediate overflow; infinities of both signs
        total = math.inf
    if not math.isfinite(total):
        raise ValueError(
            f"the reward {list(terms)} of {list(names)} is past the float range: lower the weights and penalties"
        )
    return total
