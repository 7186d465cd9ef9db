import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.records import Problem
from grpo.rewards.exact_answer import END_MARKS, exact_answer, final_answer, plain_number, same_answer


def value(gold: str, completion: str) -> float | None:
    return exact_answer(Problem("p", "q", gold, "s"), completion).value


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("42", "42"),
        (" 42\t\n", "42"),
        ("\n\n42", "42"),
        ("42<|im_end|>", "42"),
        ("42 <|im_end|>\n<|endoftext|> ", "42"),
        ("42</s></s>", "42"),
        ("42<|eot_id|><|im_end|>", "42"),
        ("<|im_end|>42", "<|im_end|>42"),
        ("the cat", "the cat"),
        ("<answer><answer>42</answer></answer>", "<answer><answer>42</answer></answer>"),
        ("", None),
        (" \n", None),
        ("<|im_end|>", None),
        ("42.", "42"),
        ("42. <|im_end|>", "42"),
        ("42..", None),
        ("42 .", None),
        (".", None),
        ("42\n", "42"),
        ("42\n43", None),
        ("It is:\n42", None),
        ("42\r43", None),
        ("42\u202843", None),
        ("42\x0c43", None),
    ],
)
def test_the_strict_form(completion: str, answer: str | None) -> None:
    assert final_answer(completion) == answer


@pytest.mark.parametrize("completion", ["5", "5 ", "\n5\n", "+5", "05", "5.", "5.0", "5.000", "+005.0", "5<|im_end|>"])
def test_the_number_in_another_plain_spelling_is_right(completion: str) -> None:
    assert value("5", completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "6",
        "-5",
        "--5",
        "+-5",
        "5..",
        ".5",
        "5\n6",
        "5 6",
        "5,0",
        "5e0",
        "5_0",
        "0x5",
        "5.0.0",
        "5.0000000000000000000000000000000001",
        "1e999",
        "NaN",
        "nan",
        "Infinity",
        "None",
        "null",
        "five",
        "$5",
        "5%",
        "**5**",
        "\\boxed{5}",
        "<answer>5</answer>",
        "= 5",
        "4+1",
        "\uff15",  # full width
        "\u0665",  # Arabic-Indic
        "\u2075",  # superscript
        "5\u200b",  # zero width space
        "5\x00",
        "\ud800",
    ],
)
def test_anything_but_the_number_is_wrong(completion: str) -> None:
    assert value("5", completion) == 0.0


def test_compatible_characters_do_not_make_another_number() -> None:
    assert value("42", "4\u00b2") == 0.0
    assert value("x2", "x\u00b2") == 0.0


@pytest.mark.parametrize(
    ("gold", "completion", "expected"),
    [
        ("the  cat", "the cat", 1.0),
        ("the cat", "The cat", 0.0),
        ("caf\u00e9", "cafe\u0301", 1.0),
        ("1,000", "1,000", 1.0),
        ("1,000", "1000", 0.0),
        ("1/2", "0.5", 0.0),
        ("0", "-0.0", 1.0),
        ("-30", "-30", 1.0),
        ("0.1", "0.10", 1.0),
        ("9007199254740993", "9007199254740992", 0.0),
        ("cat", "None", 0.0),
    ],
)
def test_against_other_golds(gold: str, completion: str, expected: float) -> None:
    assert value(gold, completion) == expected


def test_a_gold_that_ends_in_a_full_stop_cannot_be_given() -> None:
    assert value("5.", "5.") == 0.0


def test_the_answer_found_is_recorded() -> None:
    problem = Problem("p", "q", "5", "s")
    assert exact_answer(problem, " 6 ").parts == {"answer": "6"}
    assert exact_answer(problem, "6\n7").parts == {"answer": None}


@pytest.mark.parametrize(
    "completion",
    ["9" * 100_000, "0" * 99_999 + "6", "5" + " " * 100_000 + "5", "<|im_end|>" * 10_000 + "5", "5\n" * 50_000],
)
def test_a_long_wrong_answer_is_judged_at_once(completion: str) -> None:
    start = time.process_time()
    assert value("5", completion) == 0.0
    assert time.process_time() - start < 1.0


def test_long_right_answers_are_right() -> None:
    assert value("5", "0" * 100_000 + "5") == 1.0
    assert value("5", "5" + "<|im_end|> " * 10_000) == 1.0
    assert value("7" * 100_000, "7" * 100_000) == 1.0
    assert value("7" * 100_000, "7" * 99_999 + "8") == 0.0


@given(st.text(), st.text(min_size=1))
def test_no_text_makes_it_raise(completion: str, gold: str) -> None:
    assert value(gold, completion) in (0.0, 1.0)


@given(st.text(), st.sampled_from(END_MARKS), st.sampled_from(["", " ", "\n"]))
def test_a_trailing_end_mark_changes_nothing(completion: str, mark: str, space: str) -> None:
    assert final_answer(completion + space + mark) == final_answer(completion)


@given(st.text(), st.text())
def test_sameness_has_no_order(one: str, other: str) -> None:
    assert same_answer(one, other) == same_answer(other, one)
    assert same_answer(one, one)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3), st.integers(0, 4), st.integers(0, 4))
def test_zeros_around_a_number_do_not_change_it(number: object, left: int, right: int) -> None:
    text = f"{number:f}"
    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
    assert plain_number(sign + "0" * left + digits + "0" * right) == number
    assert same_answer(sign + "0" * left + digits + "0" * right, text)


@given(st.integers(), st.integers())
def test_whole_numbers_are_right_exactly_when_equal(one: int, other: int) -> None:
    assert value(str(one), str(other)) == float(one == other)
