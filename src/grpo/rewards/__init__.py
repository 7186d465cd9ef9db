"""What a reward is: a plain function of a problem and a completion.

A reward is any callable ``(problem, completion) -> Score``. ``completion`` is the text the policy made,
without its end token. A value lies between 0 and 1, and 1 means full marks (a penalty, which has a
negative weight, gives 0 for a clean completion): ``grpo prepare`` holds every reward to this on the gold
answers. Text alone never makes a reward raise; where a check cannot be done (a sandbox that failed) it
returns ``Score.unscorable(reason)``, and where it has nothing to say of the problem,
``Score.not_applicable(reason)``. A reward sees a copy of the problem, so that what it changes changes nothing else. One
that judges a completion at a time also sees Python's ``random`` keyed by what is judged: a resumed run draws what the
straight one did. A :class:`BatchReward` keys its own draws.

``configs/rewards.yaml`` names the components and their weights; training and preparing read that one file.
"""

from __future__ import annotations

import copy
import math
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Real
from typing import Protocol, runtime_checkable

from grpo.records import Problem, Score

Reward = Callable[[Problem, str], Score]


@runtime_checkable
class BatchReward(Protocol):
    """A reward that judges many completions at once, in this process, and bounds its own time.

    A model, a sandbox or a server is one: it has its own way of doing many things side by side.
    """

    def __call__(self, problem: Problem, completion: str) -> Score: ...

    def score_batch(self, items: Sequence[tuple[Problem, str]]) -> list[Score]:
        """A score for each problem and completion, in their order."""


# A reason is written into every row of the record, so an exception that quotes its input is cut.
LONGEST_REASON = 300

# Metrics stand beside the components' under ``reward/``: a component of such a name would be read as one of them.
METRICS_OF_REWARD = frozenset(
    {"acceptance", "mean", "std_batch", "std_between_groups", "std_within_groups", "steps", "unscored"}
)


@dataclass(frozen=True)
class RewardComponent:
    """One named part of the reward."""

    check: Reward
    """Dotted path of a function, or class_path and init_args of a callable class."""
    weight: float = 1.0
    """Factor in the sum. 0 records the component without rewarding it; below 0 it is a penalty."""
    limit_seconds: float | None = 10.0
    """Wall-clock limit of one completion, which runs in a worker process; null: in this process, without a limit.
    A check with a ``score_batch`` bounds its own time."""


def validate_components(components: Mapping[str, RewardComponent]) -> None:
    """Refuse a set of components that could not teach anything.

    Raises:
        ValueError: no component, a blank name or one that the metrics use, a weight that is not finite, or
            no weight but 0.
    """
    if not components:
        raise ValueError("rewards is empty: name at least one component, for example exact_answer")
    for name, component in components.items():
        if not name.strip():
            raise ValueError(f"rewards has a component named {name!r}: give it a name")
        if "/" in name or name in METRICS_OF_REWARD:
            raise ValueError(
                f"rewards has a component named {name!r}: a metric is called reward/{name} already or could be "
                "mistaken for another, so choose another name, without a slash"
            )
        if not math.isfinite(component.weight):
            raise ValueError(f"rewards.{name}.weight is {component.weight}: give a finite number")
        limit = component.limit_seconds
        if limit is not None and not 0 < limit < math.inf:
            raise ValueError(
                f"rewards.{name}.limit_seconds is {limit}: give seconds above 0, or null to run it without a limit"
            )
    if all(component.weight == 0 for component in components.values()):
        raise ValueError(f"rewards: every weight is 0 ({', '.join(components)}): give at least one another weight")


def judge(check: Reward, problem: Problem, completion: str) -> Score:
    """``check``'s score of one completion; whatever goes wrong inside makes that score unscorable.

    Everything that scores goes through here or through :func:`judge_batch`, so that a reward judges alike
    wherever it is used.
    """
    with _keyed_random(problem, completion):
        found = _attempted(lambda: [check(_own_copy(problem), completion)])
    return _sound_scores(found, 1)[0]


def judge_batch(check: BatchReward, items: Sequence[tuple[Problem, str]]) -> list[Score]:
    """The scores of many completions.

    Where the batch raises, each completion is judged alone, so that only the culprit is unscorable, with the reason.
    """
    found = _attempted(lambda: check.score_batch([(_own_copy(problem), text) for problem, text in items]))
    if isinstance(found, Score) and len(items) > 1:
        return [score for item in items for score in judge_batch(check, [item])]
    return _sound_scores(found, len(items))


@contextmanager
def _keyed_random(problem: Problem, completion: str) -> Iterator[None]:
    state = random.getstate()
    random.seed(f"{problem.id}\0{completion}".encode(errors="surrogatepass"))
    try:
        yield
    finally:
        random.setstate(state)


def _own_copy(problem: Problem) -> Problem:
    return replace(problem, metadata=copy.deepcopy(problem.metadata)) if problem.metadata else problem


def _attempted(score: Callable[[], Sequence[object]]) -> list[object] | Score:
    """What ``score`` returns; where it raises, one unscorable score that says so."""
    try:
        return list(score())
    # The one declared catch-all: a reward is the fork's own code, and a bug that only some odd completion
    # reaches must neither end a long run nor become a 0 that is learnt from. It is recorded with the row,
    # and score_rollouts stops the run when more than a few rows fail.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return Score.unscorable(_reason(error))


def _sound_scores(found: list[object] | Score, count: int) -> list[Score]:
    if isinstance(found, Score):
        return [found] * count
    if len(found) != count:
        return [Score.unscorable(f"the reward returned {len(found)} scores for {count} completions")] * count
    return [_sound_or_unscorable(one) for one in found]


def _sound_or_unscorable(score: object) -> Score:
    try:
        return _sound(score)
    except (TypeError, ValueError, OverflowError) as error:
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


def _reason(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
    return f"{type(error).__name__}: {str(error)[:LONGEST_REASON]} ({place})"
