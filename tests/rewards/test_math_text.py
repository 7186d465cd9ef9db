import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.rewards.math_bounded import TooLarge
from grpo.rewards.math_numbers import exact_value, steps_left
from grpo.rewards.math_parts import read_parts, split_label
from grpo.rewards.math_rules import decide
from grpo.rewards.math_text import canonical, words_of
from grpo.rewards.math_units import Unit, split_unit

PIECES = [
    r"\frac",
    r"\sqrt",
    r"\text{",
    r"\left(",
    r"\right)",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    "1",
    "23",
    "x",
    "^",
    "_",
    ",",
    "=",
    "$",
]
PIECES += [
    r"\{",
    r"\}",
    r"\pm",
    r"\cup",
    "<",
    "%",
    "!",
    " ",
    "cm",
    "+",
    "-",
    "*",
    "/",
    ".",
    r"\\",
    r"\ldots",
    "½",
    "²",
    "\\",
]
snippets = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-05.50", Fraction(-11, 2)),
        ("2^{-3}", Fraction(1, 8)),
        ("-2^{2}", Fraction(-4)),
        ("2^{3^{2}}", Fraction(512)),
        ("3*(1+1)/4", Fraction(3, 2)),
        (r"2\frac{1}{2}", Fraction(5, 2)),
        (r"2\frac{3}{2}", Fraction(3)),
        (r"-1\frac{1}{2}", Fraction(-3, 2)),
        (r"0.1\overline{6}", Fraction(1, 6)),
        ("5!/4!", Fraction(5)),
        ("12.5%", Fraction(1, 8)),
        ("0^{0}", None),
        ("1/0", None),
        ("2 3", None),
        ("--5", None),
        ("3!!x", None),
        ("", None),
        ("()", None),
        ("\u0663", None),
    ],
)
def test_exact_values(text: str, value: Fraction | None) -> None:
    assert exact_value(text) == value


@pytest.mark.parametrize(
    "text", ["9^{9^{9}}", "100000!", "10^{999999999}", r"\binom{10^{9}}{5}", "9" * 5000, "2^{100000}", "4!!!"]
)
def test_what_is_too_large_is_not_worked_out(text: str) -> None:
    start = time.process_time()
    with pytest.raises(TooLarge):
        exact_value(text)
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("15", {}),
        ("-1.5*10^{-3}", {}),
        ("33\\frac{1}{3}%", {"fraction": 1}),
        ("\\frac{-1}{-2}", {"fraction": 1}),
        ("6/4", {"quotient": 1}),
        ("3*(1+1)/4", {"product": 1, "sum": 1, "quotient": 1}),
        ("2^{3^{2}}", {"power": 2}),
        ("-(-5)", {"sum": 1}),
        ("3*10^{2}*10^{3}", {"product": 1, "power": 1}),
        ("5!", {"factorial": 1}),
        ("x", None),
        ("9^{9^{9}}", None),
    ],
)
def test_the_steps_left(text: str, steps: dict[str, int] | None) -> None:
    assert steps_left(text) == steps


@given(st.fractions(), st.fractions(), st.sampled_from("+-*/"))
def test_arithmetic_is_that_of_fractions(a: Fraction, b: Fraction, operator: str) -> None:
    text = rf"\frac{{{a.numerator}}}{{{a.denominator}}}{operator}(\frac{{{b.numerator}}}{{{b.denominator}}})"
    expected = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[operator]
    assert exact_value(text) == expected


@pytest.mark.parametrize(
    ("text", "body", "unit"),
    [
        (r"15\text{ cm}^{2}", "15", Unit("length^2", Fraction(1, 10_000))),
        ("3 square feet", "3", Unit("length^2", Fraction(3048, 10_000) ** 2)),
        (r"2\text{ m}^{3}", "2", Unit("volume", Fraction(1000))),
        (r"60\text{ km}/\text{h}", "60", Unit("speed", Fraction(5, 18))),
        (r"60\text{ miles per hour}", "60", Unit("speed", Fraction(1397, 3125))),
        ("-$5", "-5", Unit("dollars")),
        ("50 cents", "50", Unit("dollars", Fraction(1, 100))),
        (r"90^{\circ}", "90", Unit("angle")),
        ("12 red apples", "12", Unit()),
        ("3x", "3x", None),
        ("3 m", "3 m", None),
        (r"2\sin x", r"2\sin x", None),
        (r"\text{cm}", r"\text{cm}", None),
        (r"5+\text{cm}", r"5+\text{cm}", None),
    ],
)
def test_units(text: str, body: str, unit: Unit | None) -> None:
    assert split_unit(text) == (body, unit)


@pytest.mark.parametrize(
    ("text", "words"),
    [(r"\text{Two  Words}", "two words"), (r"\text{ (b) }", "b"), ("xyz", None), (r"\sqrt{5}", None), ("even", "even")],
)
def test_words(text: str, words: str | None) -> None:
    assert words_of(text) == words


def test_parts_and_labels() -> None:
    assert read_parts("(1,2),(3,4)").items == ("(1,2)", "(3,4)")
    assert read_parts("(x+1)(x-1)").kind == "leaf"
    assert read_parts(r"\begin{pmatrix}1&2\\3&4\end{pmatrix}").items == ("1", "2", "3", "4")
    assert split_label("n=2,n=3") == ("n", "2,3")
    assert split_label("xy=6") == (None, "xy=6")


@given(snippets | st.text(max_size=30), snippets)
def test_the_rules_answer_anything_without_an_error(text: str, other: str) -> None:
    spelt = canonical(text)
    assert decide(gold=spelt, answer=spelt) is True
    assert decide(gold=spelt, answer=canonical(other)) in (True, False, None)
    read_parts(spelt)


@pytest.mark.parametrize("piece", PIECES)
def test_the_longest_answers_are_spelt_at_once(piece: str) -> None:
    text = piece * (1000 // len(piece))
    start = time.process_time()
    spelt = canonical(text)
    read_parts(spelt)
    decide(gold="5", answer=spelt)
    assert time.process_time() - start < 1.0
