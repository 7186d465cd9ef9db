"""The strict answer: the completion is the answer and nothing else, and it is the gold answer.

Nothing is searched for inside a longer text, so there is no pattern to please beside the answer itself.
Held-out evaluation takes the answer from a completion by this same form, and judges it by a scorer of its own.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

from grpo.records import Problem, Score

# End-of-turn marks that decoding may leave as text, in the spelling of the common chat templates.
END_MARKS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>")

_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?")


def final_answer(completion: str) -> str | None:
    """The answer in a completion of the strict form, or None.

    The form: after outer white space, trailing end marks and one closing full stop are taken off, one line
    that is not empty and does not end in another full stop.

    >>> final_answer(" 42 <|im_end|>"), final_answer("42."), final_answer("It is\\n42"), final_answer(" ")
    ('42', '42', None, None)
    """
    answer = completion[: text_end(completion)].lstrip().removesuffix(".")
    if len(answer.splitlines()) != 1 or not answer.strip() or answer.endswith((".", " ")):
        return None
    return answer


def plain_number(text: str) -> Decimal | None:
    """The number ``text`` writes out in full: optional sign, ASCII digits, optional fraction; else None.

    No exponent, no grouping, no ``nan`` or ``inf``, no bare point; exact at any length.

    >>> plain_number("-05.50"), plain_number("5."), plain_number("1e3"), plain_number("1,000")
    (Decimal('-5.50'), None, None, None)
    """
    return Decimal(text) if _NUMBER.fullmatch(text) else None


def same_answer(answer: str, gold: str) -> bool:
    """Whether ``answer`` says what ``gold`` says: as numbers where gold is a plain number, else as text.

    Text is compared after Unicode composition (NFC) and with runs of white space made one; case counts.
    Not NFKC: it makes ``4²`` into ``42``.
    """
    answer, gold = tidied(answer), tidied(gold)
    gold_number = plain_number(gold)
    if gold_number is None:
        return answer == gold
    return plain_number(answer) == gold_number


def exact_answer(problem: Problem, completion: str) -> Score:
    """1.0 where the completion has the strict form and its answer is the problem's, else 0.0."""
    answer = final_answer(completion)
    if answer is None:
        return Score(0.0, reason="not one line holding the answer alone", parts={"answer": None})
    return Score(float(same_answer(answer, problem.answer)), parts={"answer": answer})


def tidied(text: str) -> str:
    """``text`` composed (NFC), with runs of white space made one and none at the ends."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def text_end(text: str) -> int:
    """Where the text before trailing white space and end marks ends; an index, so that it stays linear."""
    end = len(text)
    while True:
        before = end
        while end and text[end - 1].isspace():
            end -= 1
        for mark in END_MARKS:
            if text.endswith(mark, 0, end):
                end -= len(mark)
        if end == before:
            return end
