"""What a reward is: a plain function of a problem and a completion.

A reward is any callable ``(problem, completion) -> Score``. ``completion`` is the text the policy made,
without its end token. A value lies between 0 and 1, and 1 means full marks (a penalty, which has a
negative weight, gives 0 for a clean completion): ``grpo prepare`` holds every reward to this on the gold
answers. Text alone never makes a reward raise; where a check cannot be done (a sandbox that failed) it
returns ``Score.unscorable(reason)``, and where it has nothing to say of the problem,
``Score.not_applicable(reason)``.

``configs/rewards.yaml`` names the components and their weights; training and preparing read that one file.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Real

from grpo.records import Problem, Score

Reward = Callable[[Problem, str], Score]

# A reason is written into every row of the record, so an exception that quotes its input is cut.
LONGEST_REASON = 300


@dataclass(frozen=True)
class RewardComponent:
    """One named part of the reward."""

    check: Reward
    """Dotted path of a function, or class_path and init_args of a callable class."""
    weight: float = 1.0
    """Factor in the sum. 0 records the component without rewarding it; below 0 it is a penalty."""


def validate_components(components: Mapping[str, RewardComponent]) -> None:
    """Refuse a set of components that could not teach anything.

    Raises:
        ValueError: no component, a blank name, a weight that is not finite, or no weight but 0.
    """
    if not components:
        raise ValueError("rewards is empty: name at least one component, for example exact_answer")
    for name, component in components.items():
        if not name.strip():
            raise ValueError(f"rewards has a component named {name!r}: give it a name")
        if not math.isfinite(component.weight):
            raise ValueError(f"rewards.{name}.weight is {component.weight}: give a finite number")
    if all(component.weight == 0 for component in components.values()):
        raise ValueError(f"rewards: every weight is 0 ({', '.join(components)}): give at least one another weight")


def judge(check: Reward, problem: Problem, completion: str) -> Score:
    """``check``'s score of one completion; whatever goes wrong inside makes that score unscorable.

    Everything that scores goes through here, so that a reward judges alike wherever it is used.
    """
    try:
        return _sound(check(problem, completion))
    # The one declared catch-all: a reward is the fork's own code, and a bug that only some odd completion
    # reaches must neither end a long run nor become a 0 that is learnt from. It is recorded with the row,
    # and score_rollouts stops the run when more than a few rows fail.
    except Exception as error:  # noqa: BLE001
        return Score.unscorable(_reason(error))


def _sound(score: object) -> Score:
    if not isinstance(score, Score):
        raise TypeError(f"the reward returned {score!r:.80}: it must return a Score")
    if not score.applicable:
        return replace(score, value=None)
    if score.value is None:
        return score if score.reason else replace(score, reason="the reward gave neither value nor reason")
    value: object = score.value
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"the reward's value is {value!r:.80}: it must be a finite number")
    return replace(score, value=float(value))


def _reason(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
    return f"{type(error).__name__}: {str(error)[:LONGEST_REASON]} ({place})"
