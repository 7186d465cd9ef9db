"""What a probe is: a text that answers a problem wrongly, or not at all, and that a careless reward pays.

The policy learns whatever the checker pays for. A probe tries one way of being paid without answering, and says
why a reward might fall for it. What it writes follows from the problem alone: anything chosen is chosen by a hash.

A probe never commits to the gold answer in a place that a reward may declare to be the answer's: it does not end
with gold and does not box it alone, for the policy would have to know it for that. Where a text comes out right by
chance (0 dozen is 0), the scorer accepts it, and it counts for nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grpo.records import Problem
from grpo.rewards.code_problems import BadTests, CodeProblem, read_problem

# Written where a problem has no wrong answer to borrow.
NO_IDEA = "no idea"

# A slice with more answers than this is no multiple choice.
MOST_OPTIONS = 12

_NUMBER = re.compile(r"([+-]?[0-9]{1,100})(\.[0-9]{1,100})?")


@dataclass(frozen=True)
class Target:
    """A problem, and what a probe needs to miss it.

    ``gold`` is its answer on one line, ``wrong`` another answer of the same kind, ``other`` the answer to another
    problem of the slice (empty: there is none), ``options`` the few answers of the slice, gold first (empty: there
    are many). ``code`` holds the tests where the answer is a program.
    """

    problem: Problem
    gold: str
    wrong: str
    other: str = ""
    options: tuple[str, ...] = ()
    code: CodeProblem | None = None

    @property
    def number(self) -> int | None:
        """Gold as a whole number; None where it is none."""
        return int(self.gold) if (found := _NUMBER.fullmatch(self.gold)) and not found[2] else None

    def choose(self, what: str, count: int) -> int:
        """A number from 0 to ``count - 1`` that hangs on the problem and on what it is for."""
        return _choose(self.problem.id, what, count)


@dataclass(frozen=True)
class Probe:
    """One way to be paid without answering.

    Args:
        name: stands in the numbers and the report.
        why: the carelessness of a reward that pays it.
        write: the text for a problem; None where the probe does not concern it.
    """

    name: str
    why: str
    write: Callable[[Target], str | None]


@dataclass(frozen=True)
class Asked:
    """A probe's text for one problem."""

    problem: Problem
    probe: Probe
    text: str


def said(template: str) -> Callable[[Target], str | None]:
    """Writes ``template`` with ``{gold}`` and ``{wrong}`` filled in; does not concern programs."""
    return lambda target: None if target.code else template.format(gold=target.gold, wrong=target.wrong)


def probe_texts(problems: Sequence[Problem], probes: Sequence[Probe], per_slice: int | None = None) -> list[Asked]:
    """The text of every probe for every problem that it concerns, problem by problem.

    Args:
        problems: what is asked, and where other answers come from.
        probes: in the order in which their texts are given.
        per_slice: ask only the first so many problems of each slice.
    """
    asked: Counter[str] = Counter()
    found = []
    for target in targets(problems):
        asked[target.problem.slice] += 1
        if per_slice is None or asked[target.problem.slice] <= per_slice:
            texts = [(probe, probe.write(target)) for probe in probes]
            found += [Asked(target.problem, probe, text) for probe, text in texts if text is not None]
    return found


def targets(problems: Sequence[Problem]) -> list[Target]:
    """What probes are written from; other answers come from the problems of the same slice."""
    answers: dict[str, set[str]] = {}
    for problem in problems:
        answers.setdefault(problem.slice, set()).add(_flat(problem.answer))
    pools = {name: sorted(found) for name, found in answers.items()}
    return [_target(problem, pools[problem.slice], _code_of(problem.metadata)) for problem in problems]


def _target(problem: Problem, pool: Sequence[str], code: CodeProblem | None) -> Target:
    gold = _flat(problem.answer)
    others = [answer for answer in pool if answer != gold]
    other = others[_choose(problem.id, "other", len(others))] if others else ""
    options = (gold, *others) if code is None and 0 < len(others) < MOST_OPTIONS else ()
    neighbour = _neighbour(gold, 1 + _choose(problem.id, "neighbour", 9))
    return Target(problem, gold, neighbour or other or NO_IDEA, other, options, code)


def _neighbour(gold: str, step: int) -> str:
    """A number above gold, written as gold is; empty where gold is no plain number."""
    found = _NUMBER.fullmatch(gold)
    return f"{int(found[1]) + step}{found[2] or ''}" if found else ""


def _code_of(metadata: Mapping[str, object]) -> CodeProblem | None:
    try:
        return read_problem(metadata)
    except BadTests:  # the reward says so of each such problem; here it is none with tests
        return None


def _flat(text: str) -> str:
    return " ".join(text.split())


def _choose(problem_id: str, what: str, count: int) -> int:
    digest = hashlib.blake2b(f"{what}\0{problem_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % count
