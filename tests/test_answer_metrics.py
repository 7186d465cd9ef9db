"""Rates, pass@k and intervals against numbers worked out by hand."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.answer_metrics import (
    Attempt,
    Estimate,
    IntervalSettings,
    Ratio,
    compare,
    estimate,
    paired_problems,
    pass_at_k,
    summarise,
    unanimous_interval,
)

SETTINGS = IntervalSettings(resamples=500)


def attempt(
    problem: str, answered: bool = True, correct: bool = False, ending: str = "end_token", length: int = 2
) -> Attempt:
    return Attempt(problem, answered, correct, correct, ending, length)


def ten_items() -> list[Attempt]:
    """6 right, 2 wrong, 2 without an answer."""
    right = [attempt(f"right-{i}", correct=True) for i in range(6)]
    wrong = [attempt(f"wrong-{i}") for i in range(2)]
    return right + wrong + [attempt(f"none-{i}", answered=False) for i in range(2)]


def test_wrong_and_missing_answers_are_told_apart() -> None:
    found = summarise(ten_items(), SETTINGS)
    assert found["accuracy"].value == pytest.approx(0.6)
    assert found["no_answer_rate"].value == pytest.approx(0.2)
    assert found["accuracy_among_answered"].value == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("attempts", "correct", "k", "expected"),
    [(4, 1, 2, 0.5), (4, 1, 1, 0.25), (4, 4, 1, 1.0), (4, 0, 4, 0.0), (5, 2, 3, 0.9), (4, 3, 2, 1.0)],
)
def test_pass_at_k_by_hand(attempts: int, correct: int, k: int, expected: float) -> None:
    """n=5, c=2, k=3: the one draw of 10 without a correct one, so 0.9."""
    assert pass_at_k(attempts, correct, k) == pytest.approx(expected)


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_success(attempts: int, data: st.DataObject) -> None:
    correct, k = data.draw(st.integers(0, attempts)), data.draw(st.integers(1, attempts))
    draws = list(combinations([True] * correct + [False] * (attempts - correct), k))
    assert pass_at_k(attempts, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("attempts", "correct", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1)])
def test_pass_at_k_refuses_what_it_cannot_say(attempts: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"pass_at_k|correct"):
        pass_at_k(attempts, correct, k)


def test_pass_at_k_is_a_mean_over_problems() -> None:
    """One problem with 1 of 4 right, one with none: pass@2 is (0.5 + 0) / 2."""
    attempts = [attempt("a", correct=i == 0) for i in range(4)] + [attempt("b") for _ in range(4)]
    found = summarise(attempts, SETTINGS, pass_ks=(1, 2))
    assert found["pass_at_2"].value == pytest.approx(0.25)
    assert found["pass_at_1"] == found["accuracy"]


def test_endings_and_lengths() -> None:
    """Lengths 2 (ended), 5 (cut off), 5 (the fifth token ends it): a third truncated, finished mean 3.5."""
    attempts = [attempt("a"), attempt("b", ending="length", length=5), attempt("c", length=5)]
    found = summarise([*attempts, attempt("d", ending="tool_error", length=0)], SETTINGS)
    assert found["other_invalid_endings"].value == pytest.approx(1 / 4)
    found = summarise(attempts, SETTINGS)
    assert found["truncated"].value == pytest.approx(1 / 3)
    assert found["mean_length"].value == pytest.approx(4.0)
    assert found["mean_finished_length"].value == pytest.approx(3.5)
    assert found["other_invalid_endings"].value == 0


def test_what_has_no_data_has_no_value() -> None:
    """No finished completion, no answer: no number, and never NaN."""
    found = summarise([attempt(str(i), answered=False, ending="length") for i in range(3)], SETTINGS)
    assert found["accuracy_among_answered"] == Estimate(None, None, None)
    assert found["mean_finished_length"] == Estimate(None, None, None)
    assert summarise([], SETTINGS)["accuracy"] == Estimate(None, None, None)


def test_no_interval_holds_nan_where_few_problems_have_answers() -> None:
    """In some resamples nobody answers; they say nothing of the accuracy among the answered."""
    attempts = [attempt("a", correct=True), attempt("b"), *(attempt(str(i), answered=False) for i in range(6))]
    found = summarise(attempts, SETTINGS)["accuracy_among_answered"]
    assert (found.value, found.low, found.high) == (0.5, 0.0, 1.0)


@pytest.mark.parametrize("problems", [1, 2, 30])
def test_unanimous_problems_get_the_exact_binomial_interval(problems: int) -> None:
    """0 of n: Clopper and Pearson's upper bound is 1 - 0.025^(1/n). n of n is its mirror image."""
    bound = 1 - 0.025 ** (1 / problems)
    none = summarise([attempt(str(i)) for i in range(problems)], SETTINGS)["accuracy"]
    every = summarise([attempt(str(i), correct=True) for i in range(problems)], SETTINGS)["accuracy"]
    assert (none.value, none.low, none.high) == (0.0, 0.0, pytest.approx(bound))
    assert (every.value, every.low, every.high) == (1.0, pytest.approx(1 - bound), 1.0)


def test_an_unchanged_difference_is_not_certain() -> None:
    """20 problems, none changed: up to 1 - 0.025^(1/20) = 16.8% of all might, in either direction."""
    same = [attempt(str(i), correct=i % 2 == 0) for i in range(20)]
    found = compare(same, same, SETTINGS)["accuracy"]
    bound = pytest.approx(0.168433, abs=1e-6)
    assert (found.value, -(found.low or 0), found.high) == (0.0, bound, bound)
    assert unanimous_interval(1.0, 20, (-1.0, 1.0), 0.95) == (pytest.approx(1 - 2 * 0.168433, abs=1e-6), 1.0)


def test_the_interval_is_close_to_the_normal_one_on_many_problems() -> None:
    """400 problems, half right: 0.5 +- 1.96 * sqrt(0.25 / 400) = 0.5 +- 0.049."""
    found = summarise([attempt(str(i), correct=i % 2 == 0) for i in range(400)], IntervalSettings())["accuracy"]
    assert found.low == pytest.approx(0.451, abs=0.004)
    assert found.high == pytest.approx(0.549, abs=0.004)


def test_samples_of_one_problem_do_not_narrow_the_interval() -> None:
    """The unit is the problem: four equal samples of each say no more than one."""
    once = [attempt(str(i), correct=i % 3 == 0) for i in range(30)]
    assert summarise(once * 4, SETTINGS)["accuracy"] == summarise(once, SETTINGS)["accuracy"]


def test_the_difference_is_paired() -> None:
    """Hard and easy problems, each solved once more often after: the difference is 0.25 of every problem."""
    before = [attempt(str(i), correct=member < i % 3) for i in range(30) for member in range(4)]
    after = [attempt(str(i), correct=member < i % 3 + 1) for i in range(30) for member in range(4)]
    found = compare(before, after, SETTINGS)["accuracy"]
    assert found.value == pytest.approx(0.25)
    unpaired = summarise(before, SETTINGS)["accuracy"]
    assert unpaired.high is not None
    assert unpaired.low is not None
    mixed = [attempt(str(i), correct=member < i % 3 + (i % 2)) for i in range(30) for member in range(4)]
    paired = compare(before, mixed, SETTINGS)["accuracy"]
    assert paired.low is not None
    assert paired.high is not None
    assert paired.value == pytest.approx(0.125)
    assert paired.high - paired.low < unpaired.high - unpaired.low


def test_a_difference_of_equal_steps_is_bounded_as_unanimous() -> None:
    ratio = Ratio(np.array([1.0, 2.0]), np.array([4.0, 4.0]))
    assert estimate(ratio, SETTINGS).value == pytest.approx(0.375)
    before = [attempt(str(i), correct=member < 1) for i in range(10) for member in range(4)]
    after = [attempt(str(i), correct=member < 3) for i in range(10) for member in range(4)]
    found = compare(before, after, SETTINGS)["accuracy"]
    share = 1 - 0.025 ** (1 / 10)
    assert found.low == pytest.approx(0.5 - share * 1.5)
    assert found.high == pytest.approx(0.5 + share * 0.5)


def test_different_problems_are_not_compared() -> None:
    with pytest.raises(ValueError, match="1 problems, such as 'c', were asked of one policy only"):
        compare([attempt("a"), attempt("b")], [attempt("a"), attempt("b"), attempt("c")], SETTINGS)


def test_order_and_repetition_change_nothing() -> None:
    assert summarise(ten_items(), SETTINGS) == summarise(ten_items()[::-1], SETTINGS)


def test_another_seed_moves_the_interval_a_little() -> None:
    attempts = [attempt(str(i), correct=i % 7 < 2) for i in range(60)]
    one = summarise(attempts, IntervalSettings(resamples=500, seed=1))["accuracy"]
    other = summarise(attempts, IntervalSettings(resamples=500, seed=2))["accuracy"]
    assert one.value == other.value
    assert one.low is not None
    assert other.low is not None
    assert math.isclose(one.low, other.low, abs_tol=0.05)


@pytest.mark.parametrize(("key", "value"), [("confidence", 1.0), ("confidence", 0.0), ("resamples", 10)])
def test_settings_that_make_no_interval_are_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"intervals.{key} is"):
        IntervalSettings(**{key: value})


def test_rounding_is_for_files() -> None:
    assert Estimate(1 / 3, -0.0000001, None).rounded() == {"value": 0.333333, "low": 0.0, "high": None}


def unscored(problem: str) -> Attempt:
    return Attempt(problem, True, None, None, "end_token", 2, unscored=True)


def test_an_attempt_without_a_verdict_is_in_no_accuracy() -> None:
    """Of 4 attempts one is right, one wrong, one without an answer and one without a verdict: 1 of 3, of 2 answered."""
    attempts = [attempt("a", correct=True), attempt("a"), attempt("b", answered=False), unscored("b")]
    found = summarise(attempts, SETTINGS)
    assert found["accuracy"].value == pytest.approx(1 / 3)
    assert found["lenient_accuracy"].value == pytest.approx(1 / 3)
    assert found["accuracy_among_answered"].value == pytest.approx(1 / 2)
    assert found["no_answer_rate"].value == pytest.approx(1 / 4)
    assert found["mean_length"].value == 2
    assert found["unscored"].value == pytest.approx(1 / 4)


def test_what_nobody_judged_has_no_accuracy() -> None:
    found = summarise([unscored("a"), unscored("b")], SETTINGS, pass_ks=(1,))
    assert [found[name].value for name in ("accuracy", "lenient_accuracy", "pass_at_1", "unscored")] == [None] * 3 + [1]


def test_a_verdict_that_the_lenient_reading_alone_lacks_leaves_the_accuracy_whole() -> None:
    attempts = [attempt("a", correct=True), Attempt("b", True, False, None, "end_token", 2, unscored=True)]
    found = summarise(attempts, SETTINGS)
    assert [found[name].value for name in ("accuracy", "lenient_accuracy", "unscored")] == [0.5, 1.0, 0.5]


def test_pass_at_k_is_from_the_attempts_with_a_verdict() -> None:
    """a: 1 of 3 right, so pass@2 is 2/3; b has one verdict, too few for pass@2, and enough for pass@1."""
    a = [attempt("a", correct=True), attempt("a"), attempt("a"), unscored("a")]
    b = [attempt("b", correct=True), *(unscored("b") for _ in range(3))]
    found = summarise([*a, *b], SETTINGS, pass_ks=(1, 2))
    assert found["pass_at_2"].value == pytest.approx(2 / 3)
    assert found["pass_at_1"].value == pytest.approx((1 / 3 + 1) / 2)
    with pytest.raises(ValueError, match="pass_at_k is 5 with 4 attempts"):
        summarise(b, SETTINGS, pass_ks=(5,))


def test_a_difference_is_over_problems_that_both_have_verdicts_for() -> None:
    """a and b: 1 of 2 right before, 2 of 2 after. c, right before, has no verdict after; d none before."""
    base = [attempt("a", correct=True), attempt("b"), attempt("c", correct=True), unscored("d")]
    trained = [attempt("a", correct=True), attempt("b", correct=True), unscored("c"), attempt("d")]
    found = compare(base, trained, SETTINGS, pass_ks=(1,))
    assert found["accuracy"].value == pytest.approx(1 / 2)
    assert found["pass_at_1"].value == pytest.approx(1 / 2)
    assert found["mean_length"].value == 0
    assert found["unscored"].value == 0
    paired = paired_problems(base, trained, pass_ks=(1,))
    names = ("accuracy", "lenient_accuracy", "accuracy_among_answered", "pass_at_1")
    assert paired == dict.fromkeys(names, 2)
