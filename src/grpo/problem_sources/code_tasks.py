"""Programming tasks that bring tests: HumanEval and MBPP, and files laid out like them.

The tests go into the metadata under their published names, which is where the code reward reads them
(``grpo.rewards.code_problems``). ``answer`` is the published solution as a whole completion in the form that the
reward asks for, so that *prepare* can hold the reward to it; ``metadata.solution`` is the solution bare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from grpo.problem_files import ProblemFileError
from grpo.problem_sources.layout import Layout, field_value, has_field, text_field
from grpo.problem_sources.raw_rows import RawRow


@dataclass(frozen=True, kw_only=True)
class HumanEval(Layout):
    """``task_id``, ``prompt``, ``entry_point``, ``canonical_solution``, ``test`` (Chen et al., arXiv:2107.03374)."""

    slice: str = "humaneval"
    """The slice of all rows."""
    code_form: Literal["block", "continuation"] = "block"
    """block: a completion holds the whole program, fenced; continuation: it goes on where the prompt stops."""

    def fields_of(self, row: RawRow) -> dict[str, Any]:
        prompt, solution = text_field(row, "prompt"), text_field(row, "canonical_solution")
        return {
            "id": text_field(row, "task_id"),
            "question": prompt,
            "answer": solution if self.code_form == "continuation" else fenced(prompt + solution),
            "slice": self.slice,
            "metadata": {
                "test": text_field(row, "test"),
                "entry_point": text_field(row, "entry_point"),
                "prompt": prompt,
                "code_form": self.code_form,
                "solution": solution,
            },
        }


@dataclass(frozen=True, kw_only=True)
class MBPP(Layout):
    """``task_id``, ``text`` or ``prompt``, ``code``, ``test_list`` and, where there are some, ``test_setup_code`` and
    ``test_imports`` (Austin et al., arXiv:2108.07732; the sanitized file too)."""

    slice: str = "mbpp"
    """The slice of all rows, and the beginning of their ids."""
    shown_tests: int = 1
    """How many tests the question quotes. Without one nobody knows the function's name; with all of them a program
    that answers these very calls and nothing else passes."""

    def __post_init__(self) -> None:
        if self.shown_tests < 0:
            raise ProblemFileError(f"{self.rows}: shown_tests is {self.shown_tests}: give 0 or more")

    def fields_of(self, row: RawRow) -> dict[str, Any]:
        question, code = text_field(row, "text", "prompt"), text_field(row, "code")
        tests = _texts(row, "test_list")
        if not tests:
            raise ProblemFileError(
                f"{row.place}: field 'test_list' is empty: give at least one test, or leave the row out"
            )
        if shown := tests[: self.shown_tests]:
            question = "\n".join([question.strip(), "", "Your code should pass:", *shown])
        metadata: dict[str, Any] = {"test_list": tests, "solution": code}
        if has_field(row, "test_setup_code") and field_value(row, "test_setup_code"):
            metadata["test_setup_code"] = text_field(row, "test_setup_code")
        if has_field(row, "test_imports"):
            metadata["test_imports"] = _texts(row, "test_imports")
        task = f"{self.slice}/{text_field(row, 'task_id')}"
        return {"id": task, "question": question, "answer": fenced(code), "slice": self.slice, "metadata": metadata}


def fenced(code: str) -> str:
    """``code`` as a fenced block of Python.

    >>> fenced("x = 1")
    '```python\\nx = 1\\n```'
    """
    return f"```python\n{code.rstrip()}\n```"


def _texts(row: RawRow, name: str) -> list[str]:
    text_or_list = field_value(row, name) if has_field(row, name) else None
    if not isinstance(text_or_list, list) or not all(isinstance(text, str) for text in text_or_list):
        raise ProblemFileError(f"{row.place}: field {name!r} is {text_or_list!r:.80}: make it a list of strings")
    return text_or_list
