"""Whether the rewards tell right from wrong where the answer is known, before anything learns from them.

The gold answer of a problem must get full marks; the empty completion, and another problem's gold answer,
must not. *prepare* asks this of every problem, training of some at its start, before a model is loaded.

A check with the attribute ``control = True`` (a coin flip, which is meant to know nothing) or
``graded_on_gold = False`` (a learned model, which gives nobody full marks) still has to give a value, but which is
left to it. Beside such a check the others need not tell right from wrong, so only gold is held to full marks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Literal

from grpo.records import Problem, Score
from grpo.rewards import RewardComponent
from grpo.rewards.exact_answer import same_answer
from grpo.rewards.judging import Judges

Kind = Literal["gold", "solution", "empty", "wrong"]
DESERVING: tuple[Kind, ...] = ("gold", "solution")

# Answers to other problems that are tried where the first is paid: that one may be right by chance, or be gold in
# another spelling that only the reward knows.
MOST_OTHERS = 3

# Problems are graded in growing portions, so that a check which hangs on everything is found in its first few.
FIRST_PORTION = 8


class SelfCheckError(ValueError):
    """Rewards that cannot be proved: the problems do not tell right from wrong, or the checks fail."""


@dataclass(frozen=True)
class Misjudgement:
    """One answer that the rewards judged wrongly. ``full`` None: a check failed on it."""

    index: int
    """Of the problem, among those that were graded."""
    kind: Kind
    text: str
    full: bool | None
    marks: str
    """What each component said."""

    def __str__(self) -> str:
        must = "must" if self.kind in DESERVING else "must not"
        return f"the {self.kind} answer {self.text!r:.60} {must} get full marks; it gets {self.marks}"


def self_check(
    components: Mapping[str, RewardComponent],
    problems: Sequence[Problem],
    minimum: int = 20,
    *,
    answer_template: str = "{answer}",
    workers: int = 2,
) -> list[str]:
    """Complaints of the rewards on ``minimum`` of the problems, the slices in turn; all of them if there are fewer.

    Raises:
        SelfCheckError: no problem, all have one answer, or the checks fail (see :func:`grade`).
    """
    if not problems:
        raise SelfCheckError("there is no problem to prove the rewards on: give at least two")
    wrong = wrong_answers(problems)
    chosen = _slices_in_turn(problems)[:minimum]
    found = grade(
        components,
        [problems[i] for i in chosen],
        wrong=[wrong[i] for i in chosen],
        answer_template=answer_template,
        workers=workers,
    )
    return [f"problem {problems[chosen[each.index]].id}: {each}" for each in found]


def grade(
    components: Mapping[str, RewardComponent],
    problems: Sequence[Problem],
    *,
    wrong: Sequence[Sequence[str]] | None = None,
    answer_template: str = "{answer}",
    solutions: bool = False,
    workers: int = 2,
) -> list[Misjudgement]:
    """What the rewards misjudge, in the order of the problems.

    Args:
        components: at least one.
        problems: to grade all of.
        wrong: for each problem answers to others; made of ``problems`` where it is not given.
        answer_template: how an answer is written as a whole completion, ``{answer}`` standing for it.
        solutions: whether ``metadata.solution`` must get full marks too, where a problem has one.
        workers: processes for the checks.

    Raises:
        SelfCheckError: all problems have one answer; a template without ``{answer}``; checks that fail on more
            than half of a portion, so that one which hangs does not take its limit on every problem.
    """
    if "{answer}" not in answer_template:
        raise SelfCheckError(
            f"answer_template is {answer_template!r:.60}: it must hold {{answer}}, which stands for it"
        )
    wrong = wrong_answers(problems) if wrong is None else wrong
    found: list[Misjudgement] = []
    with Judges(components, workers) as judges:
        grader = _Grader(judges, problems, wrong, answer_template, solutions)
        for portion in _growing_portions(len(problems)):
            found += (more := grader.grade(portion))
            failed = list({each.index: each for each in reversed(more) if each.full is None}.values())
            if len(failed) > len(portion) / 2:
                first = failed[-1]
                raise SelfCheckError(
                    f"the checks fail on {len(failed)} of {len(portion)} problems, "
                    f"first on {problems[first.index].id}: {first}. The others are not graded: mend the check"
                )
    return found


def full_marks(scores: Mapping[str, Score], components: Mapping[str, RewardComponent]) -> tuple[bool | None, str]:
    """Whether every component that counts gives its best value (None: one failed), and what each says."""
    full = True
    said: list[str] = []
    for name, component in components.items():
        score = scores[name]
        if component.weight == 0 or not score.applicable:
            continue
        if score.value is None:
            return None, f"{name}: {score.reason}"
        if is_held(component):
            said.append(f"{name}={score.value:g}")
            full = full and (score.value >= 1 if component.weight > 0 else score.value <= 0)
    return (full, ", ".join(said)) if said else (False, "no mark, as no component applies")


def is_held(component: RewardComponent) -> bool:
    """Whether the values of the check are held to the answers; it may say of itself that they are not to be."""
    return bool(getattr(component.check, "graded_on_gold", True)) and not getattr(component.check, "control", False)


def wrong_answers(problems: Sequence[Problem], count: int = MOST_OTHERS) -> list[tuple[str, ...]]:
    """For each problem up to ``count`` answers of others, those of its slice first.

    Which ones hangs on the problem's id, so that not all problems are held against the same answers.

    Raises:
        SelfCheckError: every problem has the same answer.
    """
    everywhere = sorted({problem.answer for problem in problems})
    of_slice: dict[str, set[str]] = {}
    for problem in problems:
        of_slice.setdefault(problem.slice, set()).add(problem.answer)
    pools = {name: sorted(answers) for name, answers in of_slice.items()}
    return [_others(problem, count, pools[problem.slice], everywhere) for problem in problems]


def _others(problem: Problem, count: int, *pools: Sequence[str]) -> tuple[str, ...]:
    start = int.from_bytes(hashlib.blake2b(problem.id.encode(), digest_size=8).digest(), "big")
    found: dict[str, None] = {}
    for pool in pools:
        for step in range(len(pool)):
            answer = pool[(start + step) % len(pool)]
            if not same_answer(answer, problem.answer):
                found[answer] = None
            if len(found) == count:
                return tuple(found)
    if not found:
        raise SelfCheckError(
            f"every problem has the answer {problem.answer!r:.60}: add some with another, to grade against"
        )
    return tuple(found)


@dataclass(frozen=True)
class _Grader:
    judges: Judges
    problems: Sequence[Problem]
    wrong: Sequence[Sequence[str]]
    answer_template: str
    solutions: bool

    def grade(self, portion: Sequence[int]) -> list[Misjudgement]:
        """What is misjudged of these problems."""
        gold_alone = any(not is_held(each) and each.weight for each in self.judges.components.values())
        asked = [(index, *asked) for index in portion for asked in self._answers(index, gold_alone)]
        found = self._misjudged(asked)
        by_chance = self._paid_by_chance([each.index for each in found if each.kind == "wrong" and each.full])
        return [each for each in found if each.kind != "wrong" or each.index not in by_chance]

    def _answers(self, index: int, gold_alone: bool) -> Iterator[tuple[Kind, str]]:
        """What is graded of a problem; beside a check that is not held, nothing but what deserves full marks."""
        problem = self.problems[index]
        yield "gold", problem.answer
        if self.solutions and isinstance(solution := problem.metadata.get("solution"), str):
            yield "solution", solution
        if not gold_alone:
            yield "empty", ""
            yield "wrong", self.wrong[index][0]

    def _misjudged(self, asked: Sequence[tuple[int, Kind, str]]) -> list[Misjudgement]:
        components = self.judges.components
        scores = self.judges.judge(
            [(self.problems[index], self._completion(kind, text)) for index, kind, text in asked]
        )
        verdicts = [full_marks(each, components) for each in scores]
        # Where no check is held there are no marks to ask for.
        free = not any(is_held(each) for each in components.values() if each.weight)
        return [
            Misjudgement(*what, full, marks)
            for what, (full, marks) in zip(asked, verdicts, strict=True)
            if full is None or (full is not (what[1] in DESERVING) and not free)
        ]

    def _completion(self, kind: Kind, text: str) -> str:
        """A solution is a whole completion already, and silence stays silence."""
        return self.answer_template.replace("{answer}", text) if kind in ("gold", "wrong") else text

    def _paid_by_chance(self, paid: Sequence[int]) -> set[int]:
        """Those of the problems whose first wrong answer was paid, but not most of those that are tried."""
        further: list[tuple[int, Kind, str]] = [(i, "wrong", text) for i in paid for text in self.wrong[i][1:]]
        also = [each.index for each in self._misjudged(further) if each.full]
        return {i for i in paid if 1 + also.count(i) <= len(self.wrong[i]) / 2}


def _growing_portions(count: int) -> Iterator[range]:
    start, size = 0, FIRST_PORTION
    while start < count:
        yield range(start, min(start + size, count))
        start, size = start + size, size * 4


def _slices_in_turn(problems: Sequence[Problem]) -> list[int]:
    """Places of the problems, so ordered that the first few are of all slices."""
    of_slice: dict[str, list[int]] = {}
    for index, problem in enumerate(problems):
        of_slice.setdefault(problem.slice, []).append(index)
    return [index for turn in zip_longest(*of_slice.values()) for index in chain(turn) if index is not None]
