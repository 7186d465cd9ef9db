"""Whether a completion has the form that could be right, whatever its answer says."""

from __future__ import annotations

import re

from grpo.records import Problem, Score
from grpo.rewards.exact_answer import final_answer, plain_number, tidied

_TAG = re.compile(r"<[^<>]*>")


def answer_format(problem: Problem, completion: str) -> Score:
    """1.0 where the completion has the strict form, with an answer of the same kind as gold; else 0.0.

    The strict form is :func:`~grpo.rewards.exact_answer.final_answer`'s. The kinds: where gold is a plain
    number, a plain number; else text of no more words than gold that is no plain number, has a letter or
    digit if gold has one, and no ``<tag>`` if gold has none.
    """
    answer = final_answer(completion)
    if answer is None:
        return Score(0.0, reason="not one line holding the answer alone")
    if not _same_kind(tidied(answer), tidied(problem.answer)):
        return Score(0.0, reason="an answer of another kind than the gold answer")
    return Score(1.0)


def _same_kind(answer: str, gold: str) -> bool:
    if plain_number(gold) is not None:
        return plain_number(answer) is not None
    return (
        plain_number(answer) is None
        and len(answer.split()) <= len(gold.split())
        and (_has_alphanumeric(answer) or not _has_alphanumeric(gold))
        and (_TAG.search(answer) is None or _TAG.search(gold) is not None)
    )


def _has_alphanumeric(text: str) -> bool:
    return any(character.isalnum() for character in text)
