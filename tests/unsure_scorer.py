"""A scorer with gaps, in a file of its own, so that worker processes import little."""

from __future__ import annotations

from grpo.records import Problem, Score
from grpo.scorers import number_or_text


def unsure_of_silence(problem: Problem, answer: str | None) -> Score:
    """Has no verdict on a missing answer to every second problem."""
    if answer is None and problem.id.endswith(("1", "3")):
        return Score.unscorable("nothing was said")
    return number_or_text(problem, answer)
