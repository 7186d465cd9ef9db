"""What judges held-out answers, declared apart from the training reward.

A scorer sees a problem and one extracted answer, never the completion: how an answer is found and
whether it is right are two questions. Where the reward and the scorer shared code, a mistake in it
would be learnt and then certified.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pkgutil import resolve_name
from typing import Any, cast

from grpo.answer_readings import STRICT, Reading, lenient_answer, strict_answer
from grpo.records import Problem, Score
from grpo.rewards import Reward, RewardComponent
from grpo.rewards.judging import Judges
from grpo.rewards.reasoning_gym_grader import EVALUATES_ANSWERS

__all__ = [
    "Scorer",
    "ScorerError",
    "check_scorer",
    "lenient_answer",
    "load_scorer",
    "number_or_text",
    "one_line",
    "reasoning_gym_score",
    "refuse_training_reward",
    "score_answers",
    "strict_answer",
]

Scorer = Callable[[Problem, str | None], Score]

# Commas that set thousands apart, all of them or none: 1,2 and 0,123 are no numbers.
_GROUPED = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?", re.ASCII)
# Digit by digit: Fraction itself would also take what is no plain number, such as 1e999999999.
_PLAIN = re.compile(r"[-+]?\d{1,1000}(?:\.\d{0,1000}|/0*[1-9]\d{0,1000})?", re.ASCII)


class ScorerError(ValueError):
    """The scorer cannot be used, or does not fit the problems."""


def reasoning_gym_score(problem: Problem, answer: str | None) -> Score:
    """Reasoning Gym's own verdict on ``answer``: 1 is right; some tasks give parts of a point to wrong ones.

    Needs ``problem.metadata``: ``task``, the data set's name there, and ``entry``, the metadata it made.
    """
    if answer is None:
        return Score(0.0, reason="no answer")
    if "task" not in problem.metadata:
        return Score.unscorable("the problem's metadata names no Reasoning Gym task")
    if problem.metadata["task"] in EVALUATES_ANSWERS:
        return Score.unscorable(f"the grader of {problem.metadata['task']} would run the answer as Python code")
    entry = {"question": problem.question, "answer": problem.answer, "metadata": problem.metadata.get("entry", {})}
    return Score(float(_score_answer(str(problem.metadata["task"]))(answer, entry)))


def number_or_text(problem: Problem, answer: str | None) -> Score:
    """1 where ``answer`` is the gold answer: the same number, or the same words whatever their case and spacing.

    For problems without a checker of their own. Commas between thousands and a dollar sign before a number say
    nothing here; other commas, and a percent sign, do. A fraction is ``1/3``.
    """
    if answer is None:
        return Score(0.0, reason="no answer")
    gold, given = _as_number(problem.answer), _as_number(answer)
    if gold is not None:
        return Score(float(given == gold))
    return Score(float(" ".join(answer.casefold().split()) == " ".join(problem.answer.casefold().split())))


def _as_number(text: str) -> Fraction | None:
    bare = text.strip().removeprefix("$").replace("\u2212", "-")
    bare = bare.replace(",", "") if _GROUPED.fullmatch(bare) else bare
    return Fraction(bare) if _PLAIN.fullmatch(bare) else None


@cache
def _score_answer(task: str) -> Callable[[str, dict[str, Any]], float]:
    # Imported here because it takes seconds, and other scorers do without it.
    from reasoning_gym import get_score_answer_fn

    score: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(task)
    return score


def score_answers(
    scorer: Scorer, items: Sequence[tuple[Problem, str | None]], limit_seconds: float | None = 60.0
) -> list[Score]:
    """The scores of many answers, in their order, each within a limit; what goes wrong makes a score unscorable."""
    component = RewardComponent(cast(Reward, scorer), limit_seconds=limit_seconds)
    with Judges({"scorer": component}) as judges:
        return [row["scorer"] for row in judges.judge(cast(Sequence[tuple[Problem, str]], items))]


def load_scorer(path: str) -> Scorer:
    """The scorer at a dotted path such as ``grpo.scorers.reasoning_gym_score``."""
    try:
        scorer: object = resolve_name(path)
    except (ValueError, ImportError, AttributeError) as error:
        raise ScorerError(
            f"scorer is {path!r}, which cannot be imported ({error}): give the dotted path of a function "
            "(problem, answer) -> Score, such as grpo.scorers.reasoning_gym_score"
        ) from error
    if not callable(scorer):
        raise ScorerError(f"scorer is {path!r}, which is not a function: name one, (problem, answer) -> Score")
    return scorer


def check_scorer(path: str, scorer: Scorer, problems: Sequence[Problem], reading: Reading = STRICT) -> None:
    """Prove the scorer on the problems: each gold answer scores 1, no answer does not, nor do answers to others.

    Every answer is judged as the reading finds it in a completion that holds it, which is how held-out answers come.

    Raises:
        ScorerError: naming the first problem whose gold answer fails, or cannot be read in a completion.
    """
    golds = _read_golds(problems, reading)
    wrong = [
        (problem, gold)
        for (problem, other), gold in zip(pairwise(problems), golds[1:], strict=True)
        if other.answer != problem.answer
    ]
    items = [*wrong, *zip(problems, golds, strict=True), *((problem, None) for problem in problems)]
    scores = score_answers(scorer, items)
    paid = sum(score.value == 1 for score in scores[: len(wrong)])
    if wrong and paid > len(wrong) / 2:  # a few may be right by chance, where a task has several right answers
        raise ScorerError(f"scorer {path} gives 1 to {paid} of {len(wrong)} answers to other problems: choose another")
    by_kind = scores[len(wrong) : -len(problems)], scores[-len(problems) :]
    for problem, gold, nothing in zip(problems, *by_kind, strict=True):
        _refuse_misjudged(path, problem, gold, nothing, reading)


def one_line(reason: str | None) -> str:
    """A scorer's reason, whatever it has in it, as part of a message of one line."""
    return " ".join((reason or "").split())


def _refuse_misjudged(path: str, problem: Problem, gold: Score, nothing: Score, reading: Reading) -> None:
    """Raise where a scorer's verdict on the gold answer of ``problem``, or on none at all, is not what it must be."""
    if gold.value != 1:
        verdict = f"scores {gold.value:g}" if gold.value is not None else f"cannot be scored ({one_line(gold.reason)})"
        raise ScorerError(
            f"scorer {path} does not fit these problems: the gold answer {problem.answer!r} of {problem.id} "
            f"{verdict} and must score 1, read as {reading.called}; name another scorer, or another reading, in "
            "configs/evaluate.yaml"
        )
    if nothing.value == 1:
        raise ScorerError(f"scorer {path} gives 1 where problem {problem.id} has no answer: choose another one")


def _read_golds(problems: Sequence[Problem], reading: Reading) -> list[str]:
    """The gold answers as they are read; one that no completion could be read as would count as wrong, in silence."""
    golds = [reading.read(reading.written(problem.answer)) for problem in problems]
    unreadable = [problem for problem, gold in zip(problems, golds, strict=True) if gold is None]
    if unreadable:
        first, remedy = unreadable[0], "give these problems answers that can stand there"
        if reading is STRICT:
            remedy = "give these problems answers of one line, without a row of full stops at the end"
        raise ScorerError(
            f"held-out answers are read as {reading.called}, and {len(unreadable)} of {len(problems)} problems have a "
            f"gold answer that cannot be given so, first {first.answer!r:.60} of {first.id}: {remedy}, or name the "
            "reading that finds answers of their form in configs/evaluate.yaml; for training without held-out scores "
            "set scorer: null in the config of prepare and leave evaluate out"
        )
    return [gold for gold in golds if gold is not None]


def refuse_training_reward(path: str, scorer: Scorer, resolved_config: object) -> None:
    """Refuse a scorer that the policy was trained on: it could not show that the reward was gamed.

    Args:
        path: the scorer as the settings name it.
        scorer: what stands there, so that another name of the same function, or an instance of a rewarded class, is
            found too.
        resolved_config: the policy's training settings as parsed YAML, None where it was not trained here.
    """
    names = {path} | _names_of(scorer)
    rewarded = names & {judge for named in _checks(resolved_config) for judge in (named, *_judges_behind(named))}
    if rewarded:
        raise ScorerError(
            f"scorer is {path!r}, which the policy was trained on ({min(rewarded)} stands in its resolved "
            "config, or one of its rewards says that it judges alike): judge held-out answers with a scorer that was "
            "not a reward"
        )


def _names_of(judge: object) -> set[str]:
    """The dotted path of a function or class; of an object, which has no name of its own, that of its class."""
    named = judge if hasattr(judge, "__qualname__") else type(judge)
    return {f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"}


def _judges_behind(path: str) -> set[str]:
    """What stands at the path of a reward, under its own name, and the scorer that it says it judges like."""
    with suppress(ValueError, ImportError, AttributeError):
        found = resolve_name(path)
        return _names_of(found) | {str(getattr(found, "same_judge_as", path))}
    return set()


def _checks(node: object, key: str = "") -> list[str]:
    """What a config names as a function or a class, however deep."""
    if isinstance(node, str):
        return [node] if key in ("check", "class_path") else []
    if isinstance(node, dict):
        return [path for name, part in node.items() for path in _checks(part, str(name))]
    if isinstance(node, list):
        return [path for part in node for path in _checks(part, key)]
    return []
