"""Reasoning Gym's own graders as a reward, by task name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from grpo.records import Problem, Score
from grpo.rewards.exact_answer import final_answer, text_end

# Their graders give the answer to ``eval`` or to sympy's ``parse_expr``, which calls it: the policy's text runs
# as Python. A time limit bounds how long it runs, not what it does.
EVALUATES_ANSWERS = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)

Grader = Callable[[str, Mapping[str, Any]], float]


class ReasoningGymGrader:
    """1.0 where the task's own grader gives the answer full marks, else 0.0.

    The problem's metadata hold ``entry``, what the data set made beside question and answer. A problem without
    a task is not applicable; an unknown task, or a grader that fails, is unscorable. Many graders give parts of
    a point to wrong answers, most for holding the right one somewhere: that teaches to list guesses, so parts
    count as nothing unless ``partial_marks`` says otherwise.

    Args:
        task: the data set's name in Reasoning Gym; null: each problem's ``metadata.task``.
        strict_form: the completion must be the answer on one line
            (:func:`~grpo.rewards.exact_answer.final_answer`); false gives the grader the whole completion
            without outer white space and end marks, as answers of several lines need.
        partial_marks: give the grader's value as it is.
        evaluate_answers: allow the tasks of :data:`EVALUATES_ANSWERS`, whose graders run the policy's text as
            Python code with this user's rights. Only on a machine where that is no harm.
    """

    # Held-out answers judged by this scorer would be judged by the reward: evaluation refuses the two together.
    same_judge_as = "grpo.scorers.reasoning_gym_score"

    def __init__(
        self,
        task: str | None = None,
        strict_form: bool = True,
        partial_marks: bool = False,
        evaluate_answers: bool = False,
    ) -> None:
        self.task = task
        self.strict_form = strict_form
        self.partial_marks = partial_marks
        self.evaluate_answers = evaluate_answers

    def __call__(self, problem: Problem, completion: str) -> Score:
        task = self.task or problem.metadata.get("task")
        if task is None:
            return Score.not_applicable("the problem's metadata names no Reasoning Gym task")
        if task in EVALUATES_ANSWERS and not self.evaluate_answers:
            return Score.unscorable(f"the grader of {task} runs answers as Python code: see evaluate_answers")
        answer = final_answer(completion) if self.strict_form else completion[: text_end(completion)].strip()
        if not answer:
            return Score(0.0, reason="no answer alone on one line" if self.strict_form else "no answer")
        return self._graded(str(task), answer, problem)

    def _graded(self, task: str, answer: str, problem: Problem) -> Score:
        entry = {"question": problem.question, "answer": problem.answer, "metadata": problem.metadata.get("entry", {})}
        try:
            marks = float(_grader(task)(answer, entry))
        # Some eighty graders of somebody else's: what one raises at an odd text is not known beforehand.
        except Exception as error:  # noqa: BLE001
            return Score.unscorable(f"the grader of {task} failed: {type(error).__name__}: {error}"[:300])
        value = marks if self.partial_marks else float(marks >= 1)
        return Score(value, parts={"answer": answer, "marks": marks})

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A worker unpickles its checks before any limit runs, so the import of seconds costs no completion its score.
        self.__dict__.update(state)
        import reasoning_gym  # noqa: F401


@cache
def _grader(task: str) -> Grader:
    # Imported here because it takes seconds: who only names the class, to read a config, does without it.
    from reasoning_gym import get_score_answer_fn

    grader: Grader = get_score_answer_fn(task)
    return grader
