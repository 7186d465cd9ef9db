"""HumanEval as published: every reference solution passes, and nothing that is no solution does."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import pytest
from cases_folder import cases_file

from grpo.records import Problem
from grpo.rewards.code_tests import CodeTests
from grpo.rewards.sandbox import SandboxUnavailable


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    with gzip.open(cases_file("data/humaneval.jsonl.gz"), "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        Problem(
            row["task_id"],
            row["prompt"],
            row["canonical_solution"],
            "humaneval",
            {**{key: row[key] for key in ("prompt", "test", "entry_point")}, "code_form": "continuation"},
        )
        for row in rows
    ]


@pytest.fixture(scope="module")
def check() -> Iterator[CodeTests]:
    try:
        check = CodeTests(limit_seconds=20.0)
    except SandboxUnavailable as error:
        pytest.skip(f"programs cannot be isolated on this machine: {error}")
    yield check
    check.close()


def test_every_reference_solution_passes(check: CodeTests, problems: list[Problem]) -> None:
    scores = check.score_batch([(problem, problem.answer) for problem in problems])
    assert {problem.id: score for problem, score in zip(problems, scores, strict=True) if score.value != 1.0} == {}
    assert len(scores) == 164


SLOW = [pytest.param(stub, marks=pytest.mark.slow) for stub in ("    pass\n", "    return None\n", "    ...\n")]


@pytest.mark.parametrize("stub", ["", *SLOW])
def test_a_stub_fails_everywhere(check: CodeTests, problems: list[Problem], stub: str) -> None:
    scores = check.score_batch([(problem, stub) for problem in problems])
    assert {problem.id: score for problem, score in zip(problems, scores, strict=True) if score.value != 0.0} == {}


@pytest.mark.slow
def test_the_same_in_a_fenced_block(check: CodeTests, problems: list[Problem]) -> None:
    items = [
        (
            Problem(p.id, p.question, p.answer, p.slice, {**p.metadata, "code_form": "block"}),
            f"So:\n```python\n{p.question}{p.answer}```\nDone.",
        )
        for p in problems
    ]
    assert [score.value for score in check.score_batch(items)] == [1.0] * 164
