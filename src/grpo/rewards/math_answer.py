r"""The mathematical answer: 1.0 where the completion's final answer equals gold, however it is written.

Exact rules decide what they can, in this process; math-verify decides the rest in processes that may be
killed. The policy (percent, units, several boxes, no tolerance, ...) stands in ``docs/rewards.md``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Literal

from grpo.records import Problem, Score
from grpo.rewards.final_answers import AnswerStyle, FinalAnswer, find_answer, gold_answer
from grpo.rewards.math_parts import same_answer
from grpo.rewards.math_processes import CHECKER, CheckFailed
from grpo.rewards.math_question import restates
from grpo.rewards.math_rules import decide
from grpo.rewards.math_text import canonical

# A longer answer is not read, unless gold is of that kind: it is no final answer, and costs time.
LONGEST_ANSWER = 1_000

LONGEST_RECORDED = 300

_COUNTING = threading.Lock()  # of the module, so that a MathAnswer can be sent to another process

Rule = Literal["same text", "exact rules", "math-verify", "too long", "no answer", "the question again"]
Verdict = tuple[bool, Rule]


class MathAnswer:
    """A reward for mathematical equivalence, usable from any thread and any process.

    Args:
        limit_seconds: the longest that one comparison may take; it is answered at most a second later. A
            comparison that takes longer is unscorable.
        workers: comparisons of one batch at the same time; None: one a processor core.
        style: where the answer is looked for, see :func:`~grpo.rewards.final_answers.find_answer`.
    """

    def __init__(
        self,
        limit_seconds: float = 5.0,
        workers: int | None = None,
        style: AnswerStyle = "any",
    ) -> None:
        if not 0 < limit_seconds < float("inf"):
            raise ValueError(f"limit_seconds is {limit_seconds}: give a number of seconds above 0")
        if workers is not None and workers < 1:
            raise ValueError(f"workers is {workers}: give 1 or more, or None for one a core")
        self.limit_seconds = limit_seconds
        self.workers = workers or os.cpu_count() or 1
        self.style: AnswerStyle = style
        self.failures = 0  # comparisons without a verdict so far; each is an unscorable row, and no line in a log

    def __setstate__(self, state: dict[str, object]) -> None:
        """Sent to a process that is to judge: what it needs is started before any item's clock runs there."""
        self.__dict__.update(state)
        with suppress(CheckFailed):  # said again by the first comparison, of that row
            CHECKER.prepare()

    def __call__(self, problem: Problem, completion: str) -> Score:
        """1.0 where the completion's final answer is the problem's, 0.0 where it is another or there is none."""
        found = find_answer(completion or "", self.style)
        return self._score(problem, found, self._verdict_of(problem.answer, found.text))

    def score_batch(self, items: Sequence[tuple[Problem, str]]) -> list[Score]:
        """The scores of many completions in order; equal comparisons are made once."""
        found = [find_answer(completion or "", self.style) for _, completion in items]
        pairs = [(problem.answer, answer) for (problem, _), answer in zip(items, found, strict=True)]
        todo = list(dict.fromkeys((gold, answer.text) for gold, answer in pairs))
        with ThreadPoolExecutor(self.workers) as threads:
            verdicts = dict(zip(todo, threads.map(lambda pair: self._verdict_of(*pair), todo), strict=True))
        return [
            self._score(problem, answer, verdicts[problem.answer, answer.text])
            for (problem, _), answer in zip(items, found, strict=True)
        ]

    def _verdict_of(self, gold: str, answer: str | None) -> Verdict | CheckFailed:
        if answer is None or not answer.strip():
            return False, "no answer"
        gold = gold_answer(gold)
        if not gold:
            return self._failed(CheckFailed("gold is empty"))
        if len(answer) > max(LONGEST_ANSWER, 10 * len(gold)):
            return False, "too long"
        return self._compare(_canonical(gold), canonical(answer))

    def _compare(self, gold: str, answer: str) -> Verdict | CheckFailed:
        if not gold:
            return self._failed(CheckFailed("gold says nothing"))
        if gold == answer:
            return True, "same text"
        verdict = same_answer(gold=gold, answer=answer, same_leaf=decide)
        if verdict is not None:
            return verdict, "exact rules"
        try:
            return CHECKER.same(gold=gold, answer=answer, limit_seconds=self.limit_seconds), "math-verify"
        except CheckFailed as error:
            return self._failed(error)

    def _failed(self, error: CheckFailed) -> CheckFailed:
        with _COUNTING:
            self.failures += 1
        return error

    def _score(self, problem: Problem, found: FinalAnswer, verdict: Verdict | CheckFailed) -> Score:
        if isinstance(verdict, CheckFailed):
            return Score.unscorable(str(verdict))
        same, rule = verdict
        if same and rule != "same text" and restates(problem.question, found.text or "", gold_answer(problem.answer)):
            same, rule = False, "the question again"
        answer = None if found.text is None else found.text[:LONGEST_RECORDED]
        parts = {"answer": answer, "found_by": found.rule, "decided_by": rule}
        return Score(float(same), reason="" if found.text else found.rule, parts=parts)


@lru_cache(maxsize=4_096)
def _canonical(gold: str) -> str:
    return canonical(gold)


math_answer = MathAnswer()
