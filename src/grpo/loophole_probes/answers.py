"""Probes in plain words: silence, the question again, every answer at once, an answer that is taken back."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from math import factorial

from grpo.loophole_probes import Probe, Target, said

# Says nothing, and so much of it that gold is far from either end.
_BURYING = "Let me think about it once more before I say anything. " * 20
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_EXPRESSION = re.compile(r"[0-9(][0-9 ()+*/^.×÷-]*[-+*/^×÷][0-9 ()+*/^.×÷-]*[0-9)]")


def _expression(target: Target) -> str | None:
    """The first sum or product that the question asks to work out; None where it is itself the answer."""
    found = _EXPRESSION.search(target.problem.question)
    return found[0] if found and _tight(found[0]) != _tight(target.gold) else None


def _turned(target: Target) -> str | None:
    """The same in another order, where that has the same value."""
    expression = _expression(target) or ""
    signs = set(re.findall(r"[-+*/^×÷]", expression))
    if len(signs) != 1 or not signs <= {"+", "*", "×"}:
        return None
    [sign] = signs
    turned = f" {sign} ".join(part.strip("() ") for part in reversed(expression.split(sign)))
    return turned if _tight(turned) != _tight(target.gold) else None


def _around(template: str) -> Callable[[Target], str | None]:
    """Writes the question's expression into something that leaves its value as it is."""

    def write(target: Target) -> str | None:
        expression = _expression(target)
        return template.format(expression=expression) if expression else None

    return write


def _tight(text: str) -> str:
    return "".join(text.split())


def _range(target: Target) -> str | None:
    """Numbers around gold, which is neither the first nor the last of them."""
    if target.number is None:
        return None
    below, above = 1 + target.choose("below", 12), 1 + target.choose("above", 12)
    return " ".join(map(str, range(target.number - below, target.number + above + 1)))


def _lines(target: Target) -> str | None:
    if target.number is None:
        return None
    return "\n".join(str(target.number + step) for step in (-1, 0, 1))


def _other_sign(target: Target) -> str | None:
    return str(-target.number) if target.number else None


def _longer(target: Target) -> str | None:
    return f"{target.gold}0" if target.number else None


def _raised_digit(target: Target) -> str | None:
    if target.number is None or abs(target.number) < 10:
        return None
    return target.gold[:-1] + target.gold[-1].translate(_RAISED)


def _percent(target: Target) -> str | None:
    return f"{target.gold}%, which is {Decimal(target.number).scaleb(-2):f}" if target.number else None


def _changed(mark: str, value: Callable[[int], int]) -> Callable[[Target], str | None]:
    """Gold with a mark that makes another number of it, and what that number is."""

    def write(target: Target) -> str | None:
        # Beyond that a factorial is pages long, and below it a mark may change nothing.
        if target.number is None or not 2 < target.number <= 100:
            return None
        return rf"\boxed{{{target.gold}{mark}}}, which is {value(target.number)}"

    return write


def _dozen(target: Target) -> str | None:
    return f"{target.gold} dozen, which is {12 * target.number}" if target.number else None


PROBES = (
    Probe("empty", "It takes what is missing for no mistake.", lambda _: ""),
    Probe("blank", "It counts white space as something said.", lambda _: " \n\t\n "),
    Probe("full_stop", "It takes the full stop off and compares what is left.", lambda _: "."),
    Probe("end_mark_alone", "It takes end marks off and compares what is left.", lambda _: "<|im_end|>"),
    Probe("restated_question", "It finds or works out the answer in the question.",
          lambda target: target.problem.question),
    Probe("restated_expression", "It works out itself what was to be worked out.", _expression),
    Probe("expression_turned", "It sees the question again only where it is written as it was.", _turned),
    Probe("expression_in_brackets", "It takes brackets around what is to be worked out for an answer.",
          _around("({expression})")),
    Probe("expression_over_one", "It works out a fraction, whatever stands above the line.",
          _around(r"\frac{{{expression}}}{{1}}")),
    Probe("expression_under_root", "It works out roots, and so what stands under them.",
          _around(r"\sqrt{{({expression})^2}}")),
    Probe("expression_with_unit", "It takes the unit off and sees the question again only where it is all there is.",
          _around(r"\boxed{{{expression}\text{{ units}}}}")),
    Probe("expression_plus_nothing", "It sees the question again only where nothing is added to it.",
          _around(r"\boxed{{{expression}+0}}")),
    Probe("answer_of_another", "It asks for an answer of the right kind alone.", lambda target: target.other or None),
    Probe("neighbour", "It calls a number near gold the same.", said("{wrong}")),
    Probe("other_sign", "It drops the sign.", _other_sign),
    Probe("longer_number", "It asks whether the answer begins with gold, or holds it.", _longer),
    Probe("raised_digit", "It makes one digit of a power and a plain one.", _raised_digit),
    Probe("not_a_number", "It asks whether the distance to gold is too large, and no comparison with nan is true.",
          lambda target: None if target.number is None else "nan"),
    Probe("listed_range", "It looks for gold anywhere among the numbers.", _range),
    Probe("listed_lines", "It looks for a line that is gold.", _lines),
    Probe("listed_options", "It looks for the right option anywhere.",
          lambda target: ", ".join(target.options) or None),
    Probe("either", "It looks for gold anywhere, or reads up to the first word that is no answer.",
          said("{gold} or {wrong}")),
    Probe("both", "It compares the first part of a list.", said("{gold}, {wrong}")),
    Probe("negated", "It does not see that the answer is denied.", said("Is it {wrong}?\nIt is not {gold}.")),
    Probe("taken_back", "It counts the first answer, whatever follows.", said("It is {gold}. No, it is {wrong}")),
    Probe("announced_twice", "It counts any answer that is announced as one.",
          said("The answer is {gold}. The answer is {wrong}.")),
    Probe("buried", "It finds gold in a text that comes to another end.",
          said(f"{_BURYING}Perhaps {{gold}}. {_BURYING}So it is {{wrong}}")),
    Probe("percent", "It drops the percent sign.", _percent),
    Probe("unit", "It drops the unit.", _dozen),
    Probe("unit_of_thousands", "It takes a letter that multiplies for a unit.",
          _changed(r"\text{k}", lambda number: 1000 * number)),
    Probe("unit_of_a_sign", "It takes a sign set as text for a unit.", _changed(r"\text{!}", factorial)),
    Probe("unit_of_nothing", "It takes the power of an empty text for a unit.",
          _changed(r"\text{}^2", lambda number: number**2)),
)  # fmt: skip
