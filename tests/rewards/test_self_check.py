from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from grpo.records import Problem, Score
from grpo.rewards import RewardComponent
from grpo.rewards.answer_format import answer_format
from grpo.rewards.exact_answer import exact_answer
from grpo.rewards.self_check import SelfCheckError, full_marks, grade, self_check, wrong_answers

EXACT = {"answer": RewardComponent(exact_answer)}


def problem(number: int, **more: Any) -> Problem:
    fields = {"id": f"p{number:03}", "question": f"What is {number} + 1?", "answer": str(number + 1), "slice": "sums"}
    return Problem(**(fields | more))


PROBLEMS = [problem(number) for number in range(40)]


def hangs(_: Problem, __: str) -> Score:
    time.sleep(60)
    return Score(1.0)


def flip(_: Problem, completion: str) -> Score:
    return Score(float(len(completion) % 2))


def marked(attribute: str, value: bool, check: Callable[[Problem, str], Score]) -> RewardComponent:
    """A component whose check says something of itself."""

    def named(problem: Problem, completion: str) -> Score:
        return check(problem, completion)

    setattr(named, attribute, value)
    return RewardComponent(named)


def test_a_sound_reward_has_no_complaint() -> None:
    assert grade(EXACT, PROBLEMS) == []
    assert self_check(EXACT, PROBLEMS) == []


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (lambda _problem, _completion: Score(1.0), "the empty answer '' must not get full marks; it gets odd=1"),
        (lambda _problem, _completion: Score(0.0), "the gold answer '1' must get full marks; it gets odd=0"),
        (answer_format, "the wrong answer"),
        (lambda problem, completion: Score(0.5 * exact_answer(problem, completion).value), "it gets odd=0.5"),
        (lambda _problem, _completion: Score.unscorable("no server"), "odd: no server"),
    ],
)
def test_each_kind_of_unsound_reward_is_named(check: Callable[[Problem, str], Score], words: str) -> None:
    try:
        complaints = self_check({"odd": RewardComponent(check)}, PROBLEMS)
    except SelfCheckError as error:  # where the checks themselves fail
        complaints = [str(error)]
    assert words in "\n".join(complaints)
    assert "p000" in complaints[0]


def test_the_first_rows_are_of_all_slices_and_no_more_than_asked_for() -> None:
    seen: Counter[str] = Counter()

    def counting(problem: Problem, completion: str) -> Score:
        if completion == problem.answer:
            seen[problem.slice] += 1
        return exact_answer(problem, completion)

    rows = [*PROBLEMS, *(problem(number, slice="rare") for number in range(50, 53))]
    assert self_check({"counting": RewardComponent(counting, limit_seconds=None)}, rows, 20) == []
    assert seen == {"sums": 17, "rare": 3}


def test_a_check_that_hangs_is_stopped_after_its_first_portion() -> None:
    started = time.monotonic()
    with pytest.raises(SelfCheckError, match=r"fail on 8 of 8 problems, first on p000: .*no verdict within"):
        grade({"slow": RewardComponent(hangs, limit_seconds=0.2)}, PROBLEMS, workers=4)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(("attribute", "value"), [("control", True), ("graded_on_gold", False)])
def test_a_check_may_say_that_its_values_mean_nothing(attribute: str, value: bool) -> None:
    alone = {"flip": marked(attribute, value, flip)}
    assert grade(alone, PROBLEMS) == []
    # Beside it the form must still be right on gold, but nothing has to tell right from wrong.
    assert grade({**alone, "form": RewardComponent(answer_format)}, PROBLEMS) == []
    never = RewardComponent(lambda _problem, _completion: Score(0.0))
    assert {each.kind for each in grade({**alone, "never": never}, PROBLEMS)} == {"gold"}
    # Without the word the same values are complained of.
    assert grade({"flip": RewardComponent(flip)}, PROBLEMS)


def test_a_control_must_still_give_a_value() -> None:
    broken = marked("control", True, lambda _problem, _completion: Score.unscorable("no coin"))
    with pytest.raises(SelfCheckError, match="no coin"):
        grade({"flip": broken}, PROBLEMS)


def test_the_template_wraps_answers_and_leaves_silence_and_solutions_alone() -> None:
    seen: set[str] = set()

    def tagged(problem: Problem, completion: str) -> Score:
        seen.add(completion)
        return Score(float(completion in (f"<{problem.answer}>", problem.metadata["solution"])))

    rows = [problem(n, metadata={"solution": f"so {n + 1}"}) for n in range(3)]
    components = {"tagged": RewardComponent(tagged, limit_seconds=None)}
    assert grade(components, rows, answer_template="<{answer}>", solutions=True) == []
    assert seen == {"", "<1>", "<2>", "<3>", "so 1", "so 2", "so 3"}
    rows[1] = problem(1, metadata={"solution": 3})
    assert {(each.index, each.kind) for each in grade(components, rows)} == {(0, "gold"), (1, "gold"), (2, "gold")}
    with pytest.raises(SelfCheckError, match=r"must hold \{answer\}"):
        grade(EXACT, rows, answer_template="<>")


def test_a_worked_solution_that_the_reward_reads_otherwise_is_named() -> None:
    rows = [problem(1, metadata={"solution": "3"}), problem(2)]
    (only,) = grade(EXACT, rows, solutions=True)
    assert str(only) == "the solution answer '3' must get full marks; it gets answer=0"
    assert grade(EXACT, rows) == []


def test_the_wrong_answer_is_another_of_the_slice_and_no_other_spelling() -> None:
    rows = [
        problem(1, answer="5"),
        problem(2, answer="5.0"),
        problem(3, answer="6"),
        problem(4, answer="yes", slice="words"),
    ]
    wrong = wrong_answers(rows)
    assert [each[0] for each in wrong[:2]] == ["6", "6"]
    assert wrong[2][0] in ("5", "5.0")
    assert set(wrong[3]) == {"5", "5.0", "6"}  # the only answer of its slice
    assert wrong_answers(rows) == wrong
    with pytest.raises(SelfCheckError, match="every problem has the answer '5'"):
        wrong_answers(rows[:1])
    with pytest.raises(SelfCheckError, match="no problem"):
        self_check(EXACT, [])


def test_one_other_answer_that_is_right_by_chance_is_no_complaint_and_two_are() -> None:
    """`1,200` is another text than `1200`, and the same answer to a reward that reads numbers."""
    paid = {"1": {"1", "a"}, "2": {"2", "a", "b"}}
    lenient = {"lenient": RewardComponent(lambda row, text: Score(float(text in paid[row.answer])), limit_seconds=None)}
    rows = [problem(0), problem(1)]
    found = grade(lenient, rows, wrong=[("a", "b", "c"), ("a", "b", "c")])
    assert [(each.index, each.kind, each.text) for each in found] == [(1, "wrong", "a")]
    assert [each.kind for each in grade(lenient, rows[:1], wrong=[("a",)])] == ["wrong"]


def test_full_marks_count_what_has_weight_and_applies() -> None:
    components = {
        "answer": RewardComponent(exact_answer, 1.0),
        "noted": RewardComponent(exact_answer, 0.0),
        "penalty": RewardComponent(exact_answer, -0.5),
    }
    best = {"answer": Score(1.0), "noted": Score.unscorable("broken"), "penalty": Score(0.0)}
    assert full_marks(best, components) == (True, "answer=1, penalty=0")
    assert full_marks(best | {"penalty": Score(1.0)}, components)[0] is False
    assert full_marks(best | {"answer": Score.unscorable("down")}, components) == (None, "answer: down")
    nowhere = Score.not_applicable("never")
    assert full_marks(best | {"answer": nowhere, "penalty": nowhere}, components)[0] is False
