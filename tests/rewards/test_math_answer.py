import json
import pickle
import re
import time
from fractions import Fraction
from importlib import import_module

import pytest
from cases_folder import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.records import Problem, Score
from grpo.rewards import math_answer as math_module
from grpo.rewards import math_open, math_rules, math_worker
from grpo.rewards.math_answer import LONGEST_ANSWER, MathAnswer, math_answer
from grpo.rewards.math_processes import CHECKER, CheckFailed
from grpo.rewards.math_text import canonical
from grpo.rewards.math_units import split_unit

# Beside this file; `tests/` alone is on the path.
ROWS = import_module("rewards.math_rows")
ODD = import_module("rewards.math_odd_rows")


def score(gold: str, completion: str) -> Score:
    return math_answer(Problem("p", "q", gold, "s"), completion)


def boxed(gold: str, answer: str) -> float | None:
    return score(gold, f"\\boxed{{{answer}}}").value


@pytest.mark.parametrize("rule", ROWS.ACCEPTED)
def test_the_same_answer_is_accepted(rule: str) -> None:
    assert [pair for pair in ROWS.ACCEPTED[rule] if boxed(*pair) != 1.0] == []


@pytest.mark.parametrize("rule", ROWS.REJECTED)
def test_another_answer_is_rejected(rule: str) -> None:
    assert [pair for pair in ROWS.REJECTED[rule] if boxed(*pair) != 0.0] == []


def test_odd_answers() -> None:
    assert [pair for pair in ODD.ODD_ACCEPTED if boxed(*pair) != 1.0] == []
    assert [pair for pair in ODD.ODD_REJECTED if boxed(*pair) != 0.0] == []


def test_what_stands_behind_a_number() -> None:
    assert [answer for answer in ODD.AFTER_FIVE_PAID if boxed("5", answer) != 1.0] == []
    assert [answer for answer in ODD.AFTER_FIVE_NOT_PAID if boxed("5", answer) != 0.0] == []
    assert len(ODD.AFTER_FIVE_PAID) + len(ODD.AFTER_FIVE_NOT_PAID) > 150


def test_other_forms_and_other_objects() -> None:
    assert [pair for pair in ODD.FORM_ACCEPTED if boxed(*pair) != 1.0] == []
    assert [pair for pair in ODD.FORM_REJECTED if boxed(*pair) != 0.0] == []


def asked(question: str, gold: str, completion: str) -> float | None:
    return math_answer(Problem("p", question or "q", gold, "s"), completion).value


def test_the_question_is_no_answer() -> None:
    assert [row for row in ODD.ASKED_ACCEPTED if asked(*row) != 1.0] == []
    assert [row for row in ODD.ASKED_REJECTED if asked(*row) != 0.0] == []


def test_the_question_with_something_added_is_no_answer() -> None:
    def value(question: str, gold: str, answer: str) -> float | None:
        return asked(question, gold, f"\\boxed{{{answer}}}")

    assert [row for row in ODD.DRESSED_ACCEPTED if value(*row) != 1.0] == []
    assert [row for row in ODD.DRESSED_REJECTED if value(*row) != 0.0] == []


@pytest.mark.parametrize("answer", [r"\frac{d}{dx}x^2", r"\frac{\partial}{\partial x}x^2"])
def test_without_the_rule_on_steps_a_derivative_would_be_paid(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert boxed("2x", answer) == 0.0
    monkeypatch.setattr(math_open, "_DERIVATIVE", re.compile("(?!)"))
    assert math_rules.decide(gold="2x", answer=canonical(answer)) is None  # and math-verify works it out


@pytest.mark.parametrize(
    ("question", "gold", "answer"),
    [
        ("Compute 4!", "24", r"4!\text{ ways}"),
        ("What is 10 choose 3?", "120", r"\binom{10}{3}"),
        ("Convert 5 km to m.", r"5000\text{ m}", r"5\text{ km}"),
        ("Simplify 2x + 3x.", "5x", r"\frac{2x+3x}{1}"),
        (r"Simplify \sqrt{50}.", r"5\sqrt2", "50^{0.5}"),
        ("Simplify 2x + 3x.", "5x", "3x+2x"),
        ("What is 12 * 12?", "144", "12^2"),
        ("Expand (x+1)(x-1).", "x^2-1", "(x-1)(x+1)"),
        ("Write 7/4 as a decimal.", "1.75", "7/4"),
        ("Simplify 92/104.", "23/26", "184/208"),
    ],
)
def test_without_a_look_at_the_question_it_would_be_paid(
    question: str, gold: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem("p", question, gold, "s")
    assert math_answer(problem, rf"\boxed{{{answer}}}").parts["decided_by"] == "the question again"
    monkeypatch.setattr(math_module, "restates", lambda *_: False)
    assert math_answer(problem, rf"\boxed{{{answer}}}").value == 1.0


@pytest.mark.parametrize(
    "answer", ["3+12", r"3+12\text{ units}", "3+12+0", r"\frac{30}{2}", "30/2", "3*5", "-(-15)", "15+0"]
)
def test_without_the_rule_on_steps_they_would_be_paid(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert boxed("15", answer) == 0.0
    monkeypatch.setattr(math_rules, "leaves_open", lambda **_: False)
    assert boxed("15", answer) == 1.0


def test_every_answer_equals_itself() -> None:
    golds = {gold for rows in (ROWS.ACCEPTED, ROWS.REJECTED) for pairs in rows.values() for gold, _ in pairs}
    assert [gold for gold in sorted(golds) if boxed(gold, gold) != 1.0] == []


@pytest.mark.parametrize("wrapped", ["{}", "${}$", r"\boxed{{{}}}", r"\({}\)", "so it is\n#### {}"])
def test_gold_may_be_given_in_several_ways(wrapped: str) -> None:
    assert boxed(wrapped.format("7"), "7.0") == 1.0
    assert boxed(wrapped.format("7"), "8") == 0.0


@pytest.mark.parametrize(("gold", "answer"), [("204_5", "204"), (r"\int_0^5 1\,dx", "5")])
def test_gold_and_answer_are_not_swapped(gold: str, answer: str) -> None:
    """One pair that the exact rules decide and one for math-verify: each is right in one direction alone."""
    assert boxed(gold, answer) == 1.0
    assert boxed(answer, gold) == 0.0


def test_the_collected_pairs() -> None:
    rows = cases("cases/math_pairs.jsonl")
    scores = math_answer.score_batch([(Problem("p", "q", row["gold"], "s"), row["completion"]) for row in rows])
    wrong = [
        (row["gold"], row["completion"], one.value)
        for row, one in zip(rows, scores, strict=True)
        if row["settled"] and one.value != float(row["verdict"] == "accept")
    ]
    assert wrong == []
    assert None not in [one.value for one in scores]


def test_the_score_says_what_was_read_and_what_decided() -> None:
    assert score("5", r"\boxed{5}").parts == {"answer": "5", "found_by": "last box", "decided_by": "same text"}
    assert score("5", "So 5.0 of them").parts["decided_by"] == "exact rules"
    assert score(r"\sqrt8", r"\boxed{2\sqrt2}").parts["decided_by"] == "math-verify"
    missing = score("5", r"\boxed{}")
    assert missing.parts == {"answer": None, "found_by": "empty box", "decided_by": "no answer"}
    assert (missing.value, missing.reason) == (0.0, "empty box")
    json.dumps(dict(missing.parts))


@pytest.mark.parametrize(
    "completion", ["", " ", "None", "null", "\x00", r"\boxed{\ud800}", "5" * 100_000, "x" * 100_000]
)
def test_odd_completions_are_wrong_and_no_failure(completion: str) -> None:
    assert score("5", completion).value == 0.0


def test_a_very_long_answer_is_not_read_unless_it_is_gold() -> None:
    long = "7" * (LONGEST_ANSWER + 1)
    assert score("5", f"\\boxed{{{long}}}").parts["decided_by"] == "too long"
    assert boxed(long, long) == 1.0
    assert boxed(long, long[:-1] + "8") == 0.0


@pytest.mark.parametrize("gold", ["", r"x^2 + \frac{", r"a \oplus \heartsuit"])
def test_gold_that_cannot_be_read_is_unscorable(gold: str) -> None:
    judged = score(gold, r"\boxed{\sqrt{2}x}")
    assert judged.value is None
    assert "gold" in judged.reason


def test_a_failed_check_is_no_zero_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> bool:
        raise CheckFailed("the checking process died")

    monkeypatch.setattr(CHECKER, "same", fail)
    check = MathAnswer()
    scores = check.score_batch(
        [(Problem("p", "q", r"\sqrt8", "s"), r"\boxed{2\sqrt2}"), (Problem("p", "q", "5", "s"), "5")]
    )
    assert [one.value for one in scores] == [None, 1.0]
    assert scores[0].reason == "the checking process died"
    assert check.failures == 1


def test_a_batch_scores_as_one_by_one() -> None:
    items = [
        (Problem("p", "q", gold, "s"), f"\\boxed{{{answer}}}")
        for rows in (ROWS.ACCEPTED, ROWS.REJECTED)
        for pairs in rows.values()
        for gold, answer in pairs[::4]
    ]
    assert MathAnswer(workers=3).score_batch(items + items[:5]) == [math_answer(*item) for item in items + items[:5]]
    assert MathAnswer().score_batch([]) == []


def test_it_can_be_sent_to_another_process() -> None:
    check: MathAnswer = pickle.loads(pickle.dumps(MathAnswer(limit_seconds=2.0, style="boxed")))
    assert (check.limit_seconds, check.style) == (2.0, "boxed")
    assert check(Problem("p", "q", "5", "s"), r"\boxed{5}").value == 1.0


def test_a_measure_too_large_to_convert_is_no_error() -> None:
    assert boxed(r"5\text{ cm}", r"9^{9^9}\text{ m}") == 0.0


@pytest.mark.parametrize("setting", [{"limit_seconds": 0.0}, {"limit_seconds": float("nan")}, {"workers": 0}])
def test_impossible_settings_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        MathAnswer(**setting)  # type: ignore[arg-type]


def renderings(value: Fraction) -> list[str]:
    """One number in the spellings that are supported, whichever of them it has."""
    top, bottom, sign = abs(value.numerator), value.denominator, "-" if value < 0 else ""
    ways = [
        f"{sign}\\frac{{{top}}}{{{bottom}}}",
        f"{sign}\\dfrac{{{top}}}{{{bottom}}}",
        f"\\frac{{{sign}{top}}}{{{bottom}}}",
    ]
    ways += [f"{sign}{top}/{bottom}", f"\\frac{{{value.numerator * 100}}}{{{bottom}}}\\%", f"x = {sign}{top}/{bottom}"]
    if bottom == 1:
        digits = f"{top:,}"
        fullwidth = str(top).translate({ord(str(d)): 0xFF10 + d for d in range(10)})
        ways += [
            f"{sign}{digits}",
            f"{sign}{digits.replace(',', ',' + chr(92) + '!')}",
            f"{sign}{top}.00",
            f"−{top}" if sign else f"+{top}",
        ]
        ways += [
            f"{sign}{fullwidth}",
            f"{sign}\\${digits}",
            f"{sign}{top}\\text{{ cm}}",
            f"{sign}{top} apples",
            f"{value * 100}\\%",
        ]
        ways += [
            f"{sign}{top}00 \\times 10^{{-2}}",
            f"\\text{{Total}} = {sign}{top}",
            f"${sign}{top}$",
            f"{sign}{top}.",
        ]
    else:
        ways += [f"{sign}{top // bottom}\\frac{{{top % bottom}}}{{{bottom}}}"] if top > bottom else []
    return ways


numbers = st.fractions(max_denominator=10**6) | st.integers(-(10**25), 10**25).map(Fraction)


@settings(max_examples=60)
@given(numbers)
def test_a_number_equals_itself_in_every_rendering(value: Fraction) -> None:
    ways = renderings(value)
    pairs = [(str(value), way) for way in ways] + [(way, str(value)) for way in ways]
    assert [pair for pair in pairs if boxed(*pair) != 1.0] == []


@settings(max_examples=60)
@given(st.integers(1, 10**30), st.data())
def test_a_changed_digit_is_never_accepted(number: int, data: st.DataObject) -> None:
    digits = str(number)
    place = data.draw(st.integers(0, len(digits) - 1))
    other = data.draw(st.sampled_from([d for d in "0123456789" if d != digits[place]]))
    changed = Fraction(int(digits[:place] + other + digits[place + 1 :]))
    assert [way for way in renderings(changed) if boxed(digits, way) != 0.0] == []
    assert [way for way in renderings(changed / 7) if boxed(f"\\frac{{{digits}}}{{7}}", way) != 0.0] == []


@settings(max_examples=15)
@given(st.integers(2, 60), st.integers(2, 9), st.integers(1, 9))
def test_surds_and_polynomials_equal_themselves_rewritten(a: int, b: int, c: int) -> None:
    assert boxed(rf"{a}\sqrt{{{b * b * c}}}", rf"{a * b}\sqrt{{{c}}}") == 1.0
    assert boxed(rf"{a}\sqrt{{{b * b * c}}}", rf"{a * b + 1}\sqrt{{{c}}}") == 0.0
    assert boxed(f"(x+{a})(x-{b})", f"x^2+{a - b}x-{a * b}".replace("+-", "-")) == 1.0
    assert boxed(f"(x+{a})(x-{b})", f"x^2+{a - b}x-{a * b + 1}".replace("+-", "-")) == 0.0


@settings(max_examples=40)
@given(st.lists(st.integers(-99, 99), min_size=2, max_size=5, unique=True))
def test_a_list_needs_every_part_and_no_other(parts: list[int]) -> None:
    gold = ", ".join(map(str, parts))
    turned = ", ".join(map(str, reversed(parts)))
    assert boxed(gold, turned) == boxed(gold, rf"\{{{turned}\}}") == 1.0
    assert boxed(gold, f"{turned}, 100") == boxed(gold, ", ".join(map(str, parts[1:]))) == 0.0
    assert boxed(f"({gold})", f"({gold})") == 1.0
    assert boxed(f"({gold})", f"({turned})") == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "The answer is 5 minus one.",
        r"\boxed{5\text{ million}}",
        r"\boxed{5 thousand}",
        r"\boxed{5 halves}",
        r"\boxed{5 squared}",
        r"\boxed{5\text{ plus six}}",
        r"\boxed{5\text{ less than ten}}",
        r"\boxed{5\text{ to the power of two}}",
    ],
)
def test_words_that_change_a_number_are_no_unit(answer: str) -> None:
    assert math_answer(Problem("p", "q", "5", "s"), answer).value == 0.0


def test_text_that_can_be_read_in_many_ways_is_read_in_one() -> None:
    start = time.monotonic()
    math_answer(Problem("p", "q", "5", "s"), "1" + r"\end{}" * 32 + "ab cd")
    assert time.monotonic() - start < 20  # minutes, where a way that failed is tried again in another


def test_a_row_of_units_is_read_in_one_way() -> None:
    start = time.monotonic()
    assert split_unit("5" + r"\text{a}   " * 30 + "x")[1] is None
    assert time.monotonic() - start < 20
    assert math_answer(Problem("p", "q", "5", "s"), r"\boxed{5\text{ boxes of apples}}").value == 1.0


def test_an_answer_with_many_signs_costs_no_other_its_score() -> None:
    items = [(Problem("p", "q", "5", "s"), text) for text in (r"\boxed{5}", r"\boxed{5" + "€" * 990 + "}")]
    right, odd = math_answer.score_batch(items)
    assert right.value == 1.0
    assert odd.value != 1.0


ALIKE = ("x", "2x", "x+x", "x^2-1", "(x-1)(x+1)", "\\frac{x}{2}", "0.5x", "xy+yx", "2xy", "1-x", "x-1", "x-x+3", "3")
NEARLY = ("x^2+\\frac{x}{10}", "x^2+0.1x", "x^2+\\frac{x}{10}+0.0000000000001", "(x-1)^2", "(1-x)^2", "x^2-2x+1")


@pytest.mark.parametrize("texts", [ALIKE, NEARLY])
def test_multiplying_out_tells_what_simplifying_tells(texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(gold, answer) for gold in texts for answer in texts]
    quick = [math_worker.same_leaf(gold=gold, answer=answer) for gold, answer in pairs]
    assert any(math_worker._same_polynomials(*map(math_worker._parsed, pair)) is True for pair in pairs)
    monkeypatch.setattr(math_worker, "_same_polynomials", lambda *_: None)
    assert quick == [math_worker.same_leaf(gold=gold, answer=answer) for gold, answer in pairs]
    assert True in quick
    assert False in quick
