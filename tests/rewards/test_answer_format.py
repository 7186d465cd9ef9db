import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.records import Problem
from grpo.rewards.answer_format import answer_format
from grpo.rewards.exact_answer import exact_answer


def value(gold: str, completion: str) -> float | None:
    return answer_format(Problem("p", "q", gold, "s"), completion).value


@pytest.mark.parametrize("completion", ["5", "7", "7.", "-7", "+7", "07", "7.25", " 7\n", "7<|im_end|>", "9" * 100_000])
def test_any_plain_number_has_the_form_of_a_number(completion: str) -> None:
    assert value("5", completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        " ",
        "<|im_end|>",
        "seven",
        "None",
        "NaN",
        "1e999",
        "--7",
        "7..",
        ".7",
        "7 8",
        "7\n8",
        "Thinking:\n7",
        "The answer is 7",
        "<answer>7</answer>",
        "<answer><answer>7</answer></answer>",
        "1,000",
        "\uff17",
        "\u0667",
        "7" * 50_000 + " " + "7" * 50_000,
    ],
)
def test_nothing_else_has_the_form_of_a_number(completion: str) -> None:
    assert value("5", completion) == 0.0


@pytest.mark.parametrize(
    ("gold", "completion", "expected"),
    [
        ("cat", "dog", 1.0),
        ("cat", "a dog", 0.0),
        ("the cat", "dog", 1.0),
        ("the cat", "a big dog", 0.0),
        ("cat", "5", 0.0),
        ("cat", "dog.", 1.0),
        ("cat", "dog\ncat", 0.0),
        ("cat", "!!!", 0.0),
        ("cat", "<b>dog</b>", 0.0),
        ("<b>", "<i>", 1.0),
        (">", "<", 1.0),
        ("1/2", "3/4", 1.0),
        ("cat", "", 0.0),
        ("cat", "dog</s>", 1.0),
    ],
)
def test_the_form_of_a_text(gold: str, completion: str, expected: float) -> None:
    assert value(gold, completion) == expected


def test_the_reason_is_given() -> None:
    problem = Problem("p", "q", "5", "s")
    assert answer_format(problem, "5\n5").reason == "not one line holding the answer alone"
    assert answer_format(problem, "five").reason == "an answer of another kind than the gold answer"
    assert answer_format(problem, "5").reason == ""


@pytest.mark.parametrize("completion", ["<" * 100_000, "<a" * 50_000, "<" + "a" * 100_000])
def test_long_text_without_end_of_tag_is_judged_at_once(completion: str) -> None:
    start = time.process_time()
    value("cat", completion)
    assert time.process_time() - start < 1.0


@given(st.text(min_size=1), st.text())
def test_a_right_answer_always_has_the_form(gold: str, completion: str) -> None:
    problem = Problem("p", "q", gold, "s")
    for text in (gold, completion):
        form, answer = answer_format(problem, text).value, exact_answer(problem, text).value
        assert form in (0.0, 1.0)
        assert answer is not None
        assert form is not None
        assert form >= answer
