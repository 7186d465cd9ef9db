import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.records import Problem
from grpo.rewards.length import Length, Unit

PROBLEM = Problem("p", "q", "5", "s")
BAND = Length([(0, 0.0), (10, 1.0), (20, 1.0), (40, 0.5)])


@pytest.mark.parametrize(
    ("words", "expected"),
    [(0, 0.0), (1, 0.1), (5, 0.5), (10, 1.0), (20, 1.0), (30, 0.75), (40, 0.5), (999, 0.5)],
)
def test_between_the_points_it_runs_straight_and_outside_it_stays(words: int, expected: float) -> None:
    assert BAND(PROBLEM, "word " * words).value == pytest.approx(expected, abs=1e-15)


def test_white_space_and_end_marks_are_no_length() -> None:
    characters = Length([(0, 0.0), (10, 1.0)], unit="characters")
    for text in ("abcde", " a b\n\n\nc\tde  ", "abcde<|im_end|>\n</s> "):
        score = characters(PROBLEM, text)
        assert (score.value, score.parts) == (0.5, {"characters": 5})


def test_one_point_is_a_constant_and_a_step_can_be_declared() -> None:
    assert Length([(5, 0.25)])(PROBLEM, "a b").value == 0.25
    step = Length([(2, 1.0), (3, 0.0)])
    assert [step(PROBLEM, text).value for text in ("a", "a b", "a b c")] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([], "shape is empty"),
        ([(-1, 0.0)], "lengths start at 0"),
        ([(0, 1.1)], "values lie between 0 and 1"),
        ([(0, float("nan"))], "values lie between 0 and 1"),
        ([(5, 0.0), (5, 1.0)], "length 5 after 5: lengths must rise"),
    ],
)
def test_a_shape_that_is_none_is_refused(shape: list[tuple[int, float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Length(shape)


@given(st.text(), st.sampled_from(["words", "characters"]))
def test_any_text_gets_a_value_between_0_and_1(completion: str, unit: Unit) -> None:
    value = pickle.loads(pickle.dumps(Length([(0, 0.3), (3, 1.0), (7, 0.0)], unit)))(PROBLEM, completion).value
    assert 0 <= value <= 1
