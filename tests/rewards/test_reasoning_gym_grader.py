import inspect
import pickle
import re
import subprocess
import sys
from pkgutil import resolve_name

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.records import Problem, Score
from grpo.rewards import RewardComponent
from grpo.rewards.judging import Judges
from grpo.rewards.reasoning_gym_grader import EVALUATES_ANSWERS, ReasoningGymGrader
from grpo.scorers import reasoning_gym_score


def sums(**metadata: object) -> Problem:
    return Problem("p", "2 + 3 =", "5", "sums", metadata)


SUMS = sums(task="basic_arithmetic")


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("5", 1.0), ("5<|im_end|>", 1.0), ("6", 0.0), ("", 0.0), (" ", 0.0), ("It is\n5", 0.0), ("5 or 6 or 7", 0.0)],
)
def test_the_grader_of_the_problems_task_judges(completion: str, expected: float) -> None:
    assert ReasoningGymGrader()(SUMS, completion).value == expected


def test_parts_of_a_point_count_only_where_declared() -> None:
    guess = "5 or 6 or 7"
    strict, lenient = ReasoningGymGrader()(SUMS, guess), ReasoningGymGrader(partial_marks=True)(SUMS, guess)
    assert (strict.value, lenient.value) == (0.0, 1 / 11)
    assert strict.parts == lenient.parts == {"answer": guess, "marks": 1 / 11}


def test_an_answer_of_several_lines_needs_the_loose_form() -> None:
    problem = Problem("p", "q", "1 2\n3 4", "s", {"task": "basic_arithmetic"})
    assert ReasoningGymGrader()(problem, "1 2\n3 4").value == 0.0
    assert ReasoningGymGrader(strict_form=False)(problem, "\n1 2\n3 4 <|im_end|>").value == 1.0
    assert ReasoningGymGrader(strict_form=False)(problem, "<|im_end|>").reason == "no answer"


def test_the_task_can_be_fixed() -> None:
    assert ReasoningGymGrader(task="basic_arithmetic")(sums(), "5").value == 1.0


def test_where_it_cannot_judge_there_is_no_number() -> None:
    assert ReasoningGymGrader()(sums(), "5") == Score.not_applicable(
        "the problem's metadata names no Reasoning Gym task"
    )
    assert "Dataset 'nope' not registered" in ReasoningGymGrader(task="nope")(SUMS, "5").reason
    # A grader that needs what the data set made, and does not find it.
    broken = ReasoningGymGrader(task="word_ladder")(SUMS, "5")
    assert broken.value is None
    assert re.search("the grader of word_ladder failed: KeyError", broken.reason)


def test_answers_are_not_run_as_code_unless_declared(capsys: pytest.CaptureFixture[str]) -> None:
    problem = Problem("p", "q", "ab", "s", {"task": "string_insertion"})
    attack = "print('run by the grader') or ['a', 'b']"
    refused = ReasoningGymGrader()(problem, attack)
    assert refused.value is None
    assert "runs answers as Python code" in refused.reason
    assert capsys.readouterr().out == ""
    assert ReasoningGymGrader(evaluate_answers=True, partial_marks=True)(problem, attack).value == 0.1
    assert capsys.readouterr().out == "run by the grader\n"


def test_the_list_of_graders_that_run_answers_is_the_librarys() -> None:
    from reasoning_gym.factory import DATASETS

    runs_code = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(\s*\w*answer\b")
    found = {
        name
        for name, (dataset, _) in DATASETS.items()
        if runs_code.search(inspect.getsource(inspect.getmodule(dataset)).replace('eval(entry["answer"])', ""))
    }
    assert found == EVALUATES_ANSWERS


def test_it_names_the_scorer_that_judges_as_it_does() -> None:
    assert resolve_name(ReasoningGymGrader.same_judge_as) is reasoning_gym_score
    for answer in ("5", "6", "50"):
        reward = ReasoningGymGrader(partial_marks=True)(SUMS, answer)
        assert reward.value == reasoning_gym_score(SUMS, answer).value


def imported_by(code: str) -> bool:
    """Whether running ``code`` in a fresh interpreter imports the library."""
    code = f"import sys\n{code}\nprint('reasoning_gym' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout == "True\n"


def test_naming_it_does_not_import_the_library() -> None:
    assert not imported_by("import grpo.rewards.reasoning_gym_grader as room\nroom.ReasoningGymGrader()")


def test_a_worker_imports_the_library_before_any_limit_runs() -> None:
    assert imported_by(f"import pickle\npickle.loads({pickle.dumps(ReasoningGymGrader())!r})")
    with Judges({"gym": RewardComponent(ReasoningGymGrader(), limit_seconds=5.0)}, workers=1) as judges:
        assert [scores["gym"].value for scores in judges.judge([(SUMS, "5"), (SUMS, "4")])] == [1.0, 0.0]


@given(st.text())
def test_no_text_makes_it_raise(completion: str) -> None:
    for task in ("basic_arithmetic", "chain_sum", "number_sorting", "gcd", "letter_counting"):
        for strict_form in (True, False):
            score = ReasoningGymGrader(task, strict_form, partial_marks=True)(SUMS, completion)
            assert score.value is None or 0 <= score.value <= 1
