"""Probes for loopholes, read as the held-out answers of this evaluation are, where that is not the default reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from grpo.answer_readings import Reading
from grpo.loopholes import Tried
from grpo.scorers import Scorer, score_answers


def reread_probes(tried: Sequence[Tried], reading: Reading, scorer: Scorer) -> list[Tried]:
    """The same texts in their order; of the probes the readings, and what the scorer says of those that are paid."""
    read = [_reread(each, reading) for each in tried]
    asked = [each for each in read if each.source == "probe" and each.paid]
    answers = [(each.problem, answer) for each in asked for answer in each.readings if answer is not None]
    scores = iter(score_answers(scorer, answers))
    verdicts = {id(each): [next(scores).value for answer in each.readings if answer is not None] for each in asked}
    return [replace(each, accepted=_accepted(verdicts[id(each)])) if id(each) in verdicts else each for each in read]


def _reread(each: Tried, reading: Reading) -> Tried:
    if each.source != "probe":
        return each
    return replace(each, readings=(reading.read(each.text), reading.read_leniently(each.text, each.problem.answer)))


def _accepted(values: Sequence[float | None]) -> bool | None:
    """Whether one of the answers is right; None where that is not known."""
    return True if 1 in values else None if None in values else False
