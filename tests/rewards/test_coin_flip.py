import pickle
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.records import Problem
from grpo.rewards.coin_flip import CoinFlip


def flips(check: CoinFlip, problem: str = "p", count: int = 2000) -> list[float | None]:
    return [check(Problem(problem, "q", "5", "s"), str(i)).value for i in range(count)]


def test_the_same_coin_falls_the_same_way_everywhere() -> None:
    assert flips(CoinFlip(1)) == flips(pickle.loads(pickle.dumps(CoinFlip(1))))
    # Written down, so that a change of the key is noticed: records of older runs would no longer replay.
    assert flips(CoinFlip(1), count=12) == [0, 1, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1]


def test_another_seed_problem_or_text_is_another_coin() -> None:
    one = flips(CoinFlip(1))
    for other in (flips(CoinFlip(2)), flips(CoinFlip(1), problem="p2")):
        assert 0.4 < fmean(a == b for a, b in zip(one, other, strict=True)) < 0.6


@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5, 1.0])
def test_the_share_is_the_declared_one(chance: float) -> None:
    assert fmean(value or 0 for value in flips(CoinFlip(3, chance))) == pytest.approx(chance, abs=0.03)


def test_right_answers_pay_no_more_than_others() -> None:
    check = CoinFlip(4)
    right = [check(Problem(str(i), "q", "5", "s"), "5").value for i in range(2000)]
    assert fmean(value or 0 for value in right) == pytest.approx(0.5, abs=0.03)


def test_no_gold_answer_is_held_against_it() -> None:
    assert CoinFlip(1).control is True


@pytest.mark.parametrize("chance", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(chance: float) -> None:
    with pytest.raises(ValueError, match="chance is"):
        CoinFlip(1, chance)


@given(st.text(), st.text())
def test_no_text_makes_it_raise(completion: str, problem_id: str) -> None:
    assert CoinFlip(1)(Problem(problem_id, "q", "5", "s"), completion).value in (0.0, 1.0)


def test_half_a_surrogate_pair_is_a_text_too() -> None:
    assert CoinFlip(1)(Problem("p", "q", "5", "s"), "\ud800").value in (0.0, 1.0)
