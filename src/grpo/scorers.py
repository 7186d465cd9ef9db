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

from grpo.records import Problem, Score
from grpo.rewards import Reward, RewardComponent
from grpo.rewards.judging import Judges
from grpo.rewards.reasoning_gym_grader import EVALUATES_ANSWERS

Scorer = Callable[[Problem, str | None], Score]

# A number anywhere in a text: a minus counts as its sign only where no word or number stands before it.
_NUMBER = re.compile(r"(?<![\w.])[-+\u2212]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)", re.ASCII)
# The same, or a fraction of whole numbers; asked for only where gold is such a fraction.
_NUMBER_OR_FRACTION = re.compile(rf"{_NUMBER.pattern}(?:/\d+)?", re.ASCII)
_FRACTION = re.compile(r"[-+\u2212]?\d+/\d+", re.ASCII)
# Commas that set thousands apart, all of them or none: 1,2 and 0,123 are no numbers.
_GROUPED = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?", re.ASCII)
# Digit by digit: Fraction itself would also take what is no plain number, such as 1e999999999.
_PLAIN = re.compile(r"[-+]?\d{1,1000}(?:\.\d{0,1000}|/0*[1-9]\d{0,1000})?", re.ASCII)
_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")


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


def strict_answer(text: str) -> str | None:
    """The answer where ``text`` is nothing but an answer: one line, without a closing full stop; else None.

    The form that the shipped reward pays, read by code of its own: what the reward's reading lets through
    by mistake is not counted here.
    """
    lines = text.strip().splitlines()
    answer = lines[0][:-1] if len(lines) == 1 and lines[0].endswith(".") else "".join(lines[:1])
    return answer if len(lines) == 1 and answer and answer == answer.strip() and answer[-1] != "." else None


def lenient_answer(text: str, gold: str) -> str | None:
    """The most likely answer in ``text``, finished or not, whatever stands around it; None if there is none.

    For a number the last one of the first line that has any ("12 + 3 = 15, so ..." gives 15), without
    thousands commas; where gold is a fraction, so may it be. Otherwise the last words of the first line that
    has any, as many as the gold has, without punctuation. It is a second reading beside the strict one: written
    apart, so that a gain in form alone (strict rises, lenient does not) shows as such.
    """
    number = _number_pattern(gold.strip())
    pattern = number or _WORD
    wanted = 1 if number else max(1, len(_WORD.findall(gold)))
    for line in text.splitlines():
        found = pattern.findall(line)
        if found:
            answer = " ".join(found[-wanted:])
            return answer.replace(",", "").replace("\u2212", "-") if number else answer
    return None


def _number_pattern(gold: str) -> re.Pattern[str] | None:
    """How a number such as ``gold`` is found in a text; None where gold is none."""
    if _FRACTION.fullmatch(gold):
        return _NUMBER_OR_FRACTION
    return _NUMBER if _NUMBER.fullmatch(gold) else None


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


def check_scorer(path: str, scorer: Scorer, problems: Sequence[Problem]) -> None:
    """Prove the scorer on the problems: each gold answer scores 1, no answer does not, nor do answers to others.

    Raises:
        ScorerError: naming the first problem whose gold answer fails, or cannot be read in a completion.
    """
    _refuse_unreadable(problems)
    wrong = [(problem, other.answer) for problem, other in pairwise(problems) if other.answer != problem.answer]
    items = [*wrong, *((p, p.answer) for p in problems), *((p, None) for p in problems)]
    scores = score_answers(scorer, items)
    paid = sum(score.value == 1 for score in scores[: len(wrong)])
    if wrong and paid > len(wrong) / 2:  # a few may be right by chance, where a task has several right answers
        raise ScorerError(f"scorer {path} gives 1 to {paid} of {len(wrong)} answers to other problems: choose another")
    golds, nothings = scores[len(wrong) : -len(problems)], scores[-len(problems) :]
    for problem, gold, nothing in zip(problems, golds, nothings, strict=True):
        if gold.value != 1:
            verdict = f"scores {gold.value:g}" if gold.value is not None else f"cannot be scored ({gold.reason})"
            raise ScorerError(
                f"scorer {path} does not fit these problems: the gold answer {problem.answer!r} of {problem.id} "
                f"{verdict} and must score 1; name another scorer in configs/evaluate.yaml"
            )
        if nothing.value == 1:
            raise ScorerError(f"scorer {path} gives 1 where problem {problem.id} has no answer: choose another one")


def _refuse_unreadable(problems: Sequence[Problem]) -> None:
    """Refuse gold answers that no completion could be read as: all of them would count as wrong, in silence."""
    unreadable = [problem for problem in problems if strict_answer(problem.answer) is None]
    if unreadable:
        first = unreadable[0]
        raise ScorerError(
            f"held-out answers are read as one line, and {len(unreadable)} of {len(problems)} problems have a gold "
            f"answer that is none, first {first.answer!r:.60} of {first.id}: give these problems answers of one line, "
            "without a row of full stops at the end; for training without held-out scores set scorer: null in the "
            "config of prepare and leave evaluate out"
        )


def refuse_training_reward(path: str, scorer: Scorer, resolved_config: object) -> None:
    """Refuse a scorer that the policy was trained on: it could not show that the reward was gamed.

    Args:
        path: the scorer as the settings name it.
        scorer: what stands there, so that another name of the same function, or an instance of a rewarded class, is
            found too.
        resolved_config: the policy's training settings as parsed YAML, None where it was not trained here.
    """
    # An instance has no name of its own; it stands in a config as its class.
    names = {path, _dotted(scorer), _dotted(type(scorer))}
    rewarded = names & {judge for named in _checks(resolved_config) for judge in (named, _same_judge_as(named))}
    if rewarded:
        raise ScorerError(
            f"scorer is {path!r}, which the policy was trained on ({min(rewarded)} stands in its resolved "
            "config, or one of its rewards says that it judges alike): judge held-out answers with a scorer that was "
            "not a reward"
        )


def _dotted(named: object) -> str:
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"


def _same_judge_as(path: str) -> str:
    """The scorer that the reward at ``path`` says it judges like; itself where it says nothing."""
    with suppress(ValueError, ImportError, AttributeError):
        return str(getattr(resolve_name(path), "same_judge_as", path))
    return path


def _checks(node: object, key: str = "") -> list[str]:
    """What a config names as a function or a class, however deep."""
    if isinstance(node, str):
        return [node] if key in ("check", "class_path") else []
    if isinstance(node, dict):
        return [path for name, part in node.items() for path in _checks(part, str(name))]
    if isinstance(node, list):
        return [path for part in node for path in _checks(part, key)]
    return []
