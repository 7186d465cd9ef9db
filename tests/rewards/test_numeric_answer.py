import pickle
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.records import Problem
from grpo.rewards.exact_answer import exact_answer
from grpo.rewards.numeric_answer import NumericAnswer, read_number

EXACT = NumericAnswer()


def problem(gold: str) -> Problem:
    return Problem("p", "q", gold, "s")


def value(gold: str, completion: str, check: NumericAnswer = EXACT) -> float | None:
    return check(problem(gold), completion).value


@pytest.mark.parametrize("gold", ["1234.5", "1,234.5", "+1,234.50", " 1234.5 "])
@pytest.mark.parametrize(
    "completion", ["1234.5", "+1234.5", "1,234.5", "+1,234.500", "01234.5", "1234.5.", "\n1,234.5<|im_end|>\n"]
)
def test_the_same_number_in_another_spelling_is_right(gold: str, completion: str) -> None:
    assert value(gold, completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "1235",
        "-1234",
        "1,23,4",
        "12,34",
        ",234",
        "1,2345",
        "1234,000",
        "1 234",
        "1_234",
        "1.234",
        "1.234e3",
        "1234/1",
        "$1234",
        "1234%",
        "1234 apples",
        "= 1234",
        "1234\n1234",
        "It is 1234",
        "\\boxed{1234}",
        "\u0661\u0662\u0663\u0664",
        "\uff11234",
        "nan",
        "Infinity",
        "1234\x00",
        "\ud800",
    ],
)
def test_anything_else_is_wrong(completion: str) -> None:
    assert value("1234", completion) == 0.0


@pytest.mark.parametrize("gold", ["cat", "1/2", "", "5 apples", "1e3", "12,34"])
def test_a_gold_that_is_no_number_is_not_applicable(gold: str) -> None:
    score = EXACT(problem(gold), "5")
    assert (score.value, score.applicable) == (None, False)


@pytest.mark.parametrize(
    ("absolute", "relative", "gold", "completion", "expected"),
    [
        (0.1, None, "0.3", "0.2", 1.0),  # as floats, 0.3 - 0.2 is less than 0.1 and 0.2 + 0.1 more than 0.3
        (0.1, None, "0.3", "0.4", 1.0),
        (0.1, None, "0.3", "0.40000000000000000000000000000000000001", 0.0),
        (None, 0.01, "-200", "-198", 1.0),
        (None, 0.01, "-200", "-197.99", 0.0),
        (None, 0.01, "0", "0.0001", 0.0),
        (0.5, 0.01, "10", "10.5", 1.0),
        (0.5, 0.01, "100", "101", 1.0),
        (0, 0, "10", "10.0", 1.0),
        (0, 0, "10", "10.1", 0.0),
        (1e-30, None, "1", "1.0000000000000000000000000000005", 1.0),
        (1e-30, None, "1", "1.000000000000000000000000000002", 0.0),
    ],
)
def test_tolerances_are_met_exactly(
    absolute: float | None, relative: float | None, gold: str, completion: str, expected: float
) -> None:
    assert value(gold, completion, NumericAnswer(absolute, relative)) == expected


@pytest.mark.parametrize("name", ["absolute_tolerance", "relative_tolerance"])
@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
def test_a_tolerance_that_means_nothing_is_refused(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is "):
        NumericAnswer(**{name: bad})


def test_large_numbers_are_compared_whole() -> None:
    assert value("9007199254740993", "9007199254740992") == 0.0
    assert value("9,007,199,254,740,993", "9007199254740993") == 1.0


def test_the_answer_found_is_recorded() -> None:
    assert EXACT(problem("5"), "1,000").parts == {"answer": "1,000"}
    assert EXACT(problem("5"), "5\n6").parts == {"answer": None}


@pytest.mark.parametrize("completion", ["9" * 100_000, "1" + ",000" * 30_000, "1" + "." * 99_999, "0." + "0" * 99_999])
def test_a_long_answer_is_judged_at_once(completion: str) -> None:
    start = time.process_time()
    assert value("5", completion, NumericAnswer(0.001, 0.001)) == 0.0
    assert time.process_time() - start < 1.0


def test_it_can_be_sent_to_a_worker() -> None:
    assert value("10", "10.5", pickle.loads(pickle.dumps(NumericAnswer(0.5)))) == 1.0


@given(st.text(), st.text())
def test_no_text_makes_it_raise(completion: str, gold: str) -> None:
    for check in (EXACT, NumericAnswer(0.1, 0.1)):
        score = check(problem(gold), completion)
        assert score.value in (0.0, 1.0) if score.applicable else score.value is None


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3), st.decimals(allow_nan=False, allow_infinity=False))
def test_what_exact_answer_pays_for_a_number_it_pays_too(gold: object, other: object) -> None:
    for completion in (f"{gold:f}", f"{other:f}", f"{gold:,f}"):
        assert (value(f"{gold:f}", completion) or 0) >= (exact_answer(problem(f"{gold:f}"), completion).value or 0)
    assert value(f"{gold:f}", f"{gold:,f}") == 1.0
    assert read_number(f"{gold:,f}") == gold
