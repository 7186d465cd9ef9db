"""What an evaluation's file says of judged answers: all slices that were trained on together, and each slice alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo.answer_metrics import UNSCORED, Estimate, IntervalSettings, summarise
from grpo.held_out_answers import TRAINED_ROLE, HeldOutAnswer, role
from grpo.records import Problem

# Has no value where no lenient reading stands beside the strict one.
LENIENT = "lenient_accuracy"


def evaluation_numbers(
    answers: Sequence[HeldOutAnswer],
    problems: Sequence[Problem],
    intervals: IntervalSettings,
    pass_at_k: Sequence[int],
    lenient: bool = True,
) -> dict[str, Any]:
    """``overall``: the slices the policy was trained on, together. ``by_slice``: each alone.

    Args:
        answers: every completion of every problem, judged.
        problems: that were asked.
        intervals: how intervals are made.
        pass_at_k: each k of pass@k of the sampled answers.
        lenient: whether there is a lenient reading; its accuracy is null without.
    """

    def summary(chosen: Sequence[Problem]) -> dict[str, Any]:
        ids = {problem.id for problem in chosen}
        found: dict[str, Any] = {"problems": len(ids)}
        for mode, pass_ks in (("greedy", ()), ("sampled", pass_at_k)):
            attempts = [answer.attempt for answer in answers if answer.mode == mode and answer.problem_id in ids]
            estimates = summarise(attempts, intervals, pass_ks) | ({} if lenient else {LENIENT: Estimate(None)})
            found[mode] = {name: estimate.rounded() for name, estimate in estimates.items()}
        return found

    by_slice = {}
    for name in sorted({problem.slice for problem in problems}):
        chosen = [problem for problem in problems if problem.slice == name]
        by_slice[name] = {"relation": _relation(chosen[0], problems)} | summary(chosen)
    return {
        "overall": summary([problem for problem in problems if role(problem) == TRAINED_ROLE]),
        "by_slice": by_slice,
    }


def _relation(problem: Problem, problems: Sequence[Problem]) -> str:
    """How a slice stands to the training: ``trained_on``, ``other_setting`` of such a task, or ``other_task``."""
    if role(problem) == TRAINED_ROLE:
        return "trained_on"
    trained_tasks = {other.metadata.get("task") for other in problems if role(other) == TRAINED_ROLE}
    return "other_setting" if problem.metadata.get("task") in trained_tasks else "other_task"


def evaluation_headline(name: str, evaluation: Mapping[str, Any]) -> str:
    """The two accuracies in a line, and how many answers they leave out where that is any."""
    overall = evaluation["overall"]
    return f"{name}: correct on {overall['problems']} held-out problems: " + ", ".join(
        f"{mode} {_percent(Estimate(**overall[mode]['accuracy']))}{_without_verdict(overall[mode][UNSCORED]['value'])}"
        for mode in ("sampled", "greedy")
    )


def _without_verdict(share: float | None) -> str:
    return f" ({share:.2%} unscored)" if share else ""


def _percent(estimate: Estimate) -> str:
    if estimate.value is None or estimate.low is None or estimate.high is None:
        return "unknown"
    return f"{estimate.value:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]"
