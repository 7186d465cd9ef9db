"""The held-out scorer of programs: right ones pass in every published layout, and no trick of a wrong one does."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from cases_folder import cases

from grpo.answer_readings import READINGS
from grpo.code_scorer import CodePassesTests, code_passes_tests
from grpo.code_scorer.plain_data import read_back, spelled
from grpo.problem_sources.code_tasks import fenced
from grpo.records import Problem, Score
from grpo.rewards.sandbox import SandboxUnavailable, require
from grpo.scorers import ScorerError, check_scorer, load_scorer, refuse_training_reward

PATH = "grpo.code_scorer.code_passes_tests"
DOUBLE = {
    "prompt": "def double(n):\n    '''Twice n.'''\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
    "entry_point": "double",
}
RIGHT = "def double(n):\n    return 2 * n\n"


@pytest.fixture(scope="module")
def scorer() -> CodePassesTests:
    try:
        require("bubblewrap")
    except SandboxUnavailable as error:
        pytest.skip(f"programs cannot be isolated on this machine: {error}")
    return CodePassesTests(limit_seconds=20.0)


def asked(metadata: dict[str, Any]) -> Problem:
    return Problem("p", "q", "gold", "s", metadata)


def test_a_prompt_that_is_no_code_by_itself(scorer: CodePassesTests) -> None:
    bare = {**DOUBLE, "prompt": "def double(n):\n"}
    assert scorer(asked(bare), RIGHT).value == 1.0
    assert scorer(asked({**bare, "code_form": "continuation"}), "    return n\n").value == 0.0


def test_a_right_program_passes(scorer: CodePassesTests) -> None:
    assert scorer(asked(DOUBLE), RIGHT) == Score(1.0)
    assert scorer(asked({**DOUBLE, "code_form": "continuation"}), "    return 2 * n\n") == Score(1.0)


TRICKS = {
    "nothing": "",
    "pass": "def double(n):\n    pass\n",
    "none": "def double(n):\n    return None\n",
    "half": "def double(n):\n    return 4\n",
    "no syntax": "def double(n",
    "another name": "def twice(n):\n    return 2 * n\n",
    "exit 0 when loaded": "import sys\nsys.exit(0)\n",
    "end when loaded": "import os\nos._exit(0)\n",
    "exit 0 when called": "import sys\ndef double(n):\n    sys.exit(0)\n",
    "end when called": "import os\ndef double(n):\n    os._exit(0)\n",
    "equal to everything": (
        "class E:\n    def __eq__(self, other):\n        return True\n    __hash__ = None\n"
        "def double(n):\n    return E()\n"
    ),
    "an int equal to everything": (
        "class E(int):\n    def __eq__(self, other):\n        return True\n    __hash__ = None\n"
        "def double(n):\n    return E()\n"
    ),
    "spelled as itself": (
        "class E(int):\n    def __eq__(self, other):\n        return True\n"
        "    def __repr__(self):\n        return 'E()'\n"
        "def double(n):\n    return E(1)\n"
    ),
    "a guessed secret, printed": "def double(n):\n    print('passed:' + '0' * 32, flush=True)\n    return 0\n",
    "a guessed secret, on every descriptor": (
        "import os\ndef double(n):\n    said = b'passed:' + b'0' * 32\n    for end in range(64):\n        try:\n"
        "            os.write(end, len(said).to_bytes(4, 'big') + said)\n        except OSError:\n            pass\n"
    ),
    "patched builtins": (
        "import builtins\nbuiltins.AssertionError = type('Never', (Exception,), {})\n"
        "builtins.isinstance = lambda *_: True\n"
        "def double(n):\n    return 0\n"
    ),
    "an exception": "def double(n):\n    raise StopIteration\n",
    "the tests' own name": "def check(candidate):\n    pass\ndef double(n):\n    return 0\n",
    "its own check": "def double(n):\n    import __main__\n    __main__.check = lambda candidate: None\n    return 0\n",
    "endless": "def double(n):\n    while True:\n        pass\n",
    "a flood": "def double(n):\n    return 'x' * (1 << 25)\n",
    "a deep answer": (
        "def double(n):\n    import os\n    said = b'-' * 100000 + b'1'\n    for end in range(3, 64):\n        try:\n"
        "            os.write(end, len(said).to_bytes(4, 'big') + said)\n        except OSError:\n            pass\n"
    ),
}


@pytest.mark.parametrize("program", TRICKS.values(), ids=TRICKS)
def test_a_program_that_does_not_do_it_gets_0(scorer: CodePassesTests, program: str) -> None:
    score = replace(scorer, limit_seconds=3.0)(asked(DOUBLE), program)
    assert (score.value, bool(score.reason)) == (0.0, True)


def test_no_answer_gets_0() -> None:
    assert code_passes_tests(asked(DOUBLE), None).value == 0.0


@pytest.mark.parametrize(
    ("metadata", "right", "wrong"),
    [
        (
            {
                "test_list": ["assert f(1) == (1, [2])", "assert sorted(f(0)[1]) == [1]"],
                "test_imports": ["import math"],
            },
            "def f(n):\n    return (n, [n + 1])\n",
            "def f(n):\n    return [n, [n + 1]]\n",
        ),
        (
            {"tests": ["assert close(f(2), 0.5)"], "setup": "def close(a, b):\n    return abs(a - b) < 1e-9\n"},
            "def f(n):\n    return 1 / n\n",
            "def f(n):\n    return 1 // n\n",
        ),
        (
            {"tests": ["try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass\nassert f(4) == 2"]},
            "import math\ndef f(n):\n    return math.sqrt(n)\n",
            "def f(n):\n    return n ** 0.5\n",
        ),
        (
            {"stdin_stdout": [{"stdin": "1\n2\n", "stdout": "3\n"}, {"stdin": "5\n5\n", "stdout": "10"}]},
            "print(int(input()) + int(input()))",
            "print(3)",
        ),
        (
            {"stdin_stdout": [{"stdin": "", "stdout": "3\n"}]},
            "print(3, ' ')",
            "print(3, flush=True)\nraise SystemExit(1)",
        ),
    ],
)
def test_each_published_layout(scorer: CodePassesTests, metadata: dict[str, Any], right: str, wrong: str) -> None:
    assert [scorer(asked(metadata), program).value for program in (right, wrong)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({}, "metadata.entry_point is None"),
        ({"entry_point": "f"}, "metadata.test is None"),
        ({"tests": []}, "metadata.tests is []"),
        ({"tests": ["assert True"]}, "test 1 never calls the program"),
        ({"tests": ["f(object())"]}, "a test calls f with something other than plain data"),
        ({"tests": ["f(1)", "assert f(1)=="]}, "test 2 is no Python: SyntaxError"),
        ({"tests": ["return f(1)"]}, "test 1 is no Python: SyntaxError"),
        ({"tests": ["f(1)"], "setup": "1 / 0"}, "the setup of the tests fails: ZeroDivisionError"),
        ({"tests": ["import os\nos._exit(0)"]}, "the side that runs the tests ended"),
        ({**DOUBLE, "code_form": "poem"}, "metadata.code_form is 'poem'"),
        ({"stdin_stdout": [1]}, "metadata.stdin_stdout holds 1"),
    ],
)
def test_tests_that_cannot_judge_give_no_score(scorer: CodePassesTests, metadata: dict[str, Any], reason: str) -> None:
    score = scorer(asked(metadata), "def f(n):\n    return n\n")
    assert score.value is None
    assert reason in score.reason


def test_tests_that_hang_cost_a_program_its_score_only_where_it_had_its_part(scorer: CodePassesTests) -> None:
    short = replace(scorer, limit_seconds=2.0)
    hangs = asked({"tests": ["while True: pass"]})
    assert short(hangs, "def f(n):\n    return n\n").value is None
    assert short(hangs, "import time\ntime.sleep(1.6)\ndef f(n):\n    return n\n").value == 0.0


def test_where_nothing_can_be_isolated_there_is_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise SandboxUnavailable("no bubblewrap here")

    monkeypatch.setattr("grpo.code_scorer.require", refuse)
    assert code_passes_tests(asked(DOUBLE), RIGHT) == Score.unscorable("no bubblewrap here")


DATA = (
    *(None, True, 0, -5, 1 << 70, -(1 << 70), 1.5, math.inf, -math.inf, "a'\n\ud800", b"\x00", 1 + 2j, (), (1,)),
    *([1, [2]], {1: {"a": ()}}, {1, 2}, set(), frozenset({1}), range(1, 9, 2), bytearray(b"x")),
)


@pytest.mark.parametrize("value", DATA, ids=repr)
def test_plain_data_comes_back_as_it_went(value: object) -> None:
    back = read_back(spelled(value))
    assert (type(back), back) == (type(value), value)


def test_an_iterator_comes_back_as_one() -> None:
    assert list(read_back(spelled(map(str, [1, 2])))) == ["1", "2"]
    assert math.isnan(read_back(spelled(math.nan)))


@pytest.mark.parametrize(
    "text",
    ["open('x')", "set", "iter([1]).__class__", "[x for x in ()]", "1 + 1", "f'{1}'", "(lambda: 1)()", "set(*[1])"],
)
def test_what_is_no_plain_data_is_not_read(text: str) -> None:
    with pytest.raises(ValueError, match="no plain data"):
        read_back(text)


def test_the_reward_is_another_judge() -> None:
    assert load_scorer(PATH) is code_passes_tests
    trained = {"rewards": {"code": {"check": {"class_path": "grpo.rewards.code_tests.CodeTests"}}}}
    refuse_training_reward(PATH, code_passes_tests, trained)


@pytest.mark.parametrize("named", [PATH, {"class_path": "grpo.code_scorer.CodePassesTests"}])
@pytest.mark.parametrize("path", [PATH, "test_code_scorer.alias"])
def test_it_is_refused_where_it_was_the_reward(named: object, path: str) -> None:
    with pytest.raises(ScorerError, match="which the policy was trained on"):
        refuse_training_reward(path, code_passes_tests, {"rewards": {"code": {"check": named}}})


@pytest.fixture(scope="module")
def published() -> list[Problem]:
    keys = ("prompt", "test", "entry_point")
    return [
        Problem(
            row["task_id"],
            row["prompt"],
            fenced(row["prompt"] + row["canonical_solution"]),
            "humaneval",
            {key: row[key] for key in keys} | {"solution": row["canonical_solution"]},
        )
        for row in cases("data/humaneval.jsonl.gz")
    ]


def not_worth(score: float, scorer: CodePassesTests, items: list[tuple[Problem, str]]) -> dict[str, Score]:
    with ThreadPoolExecutor(2) as pool:
        scores = list(pool.map(lambda item: scorer(*item), items))
    return {problem.id: found for (problem, _), found in zip(items, scores, strict=True) if found.value != score}


def test_every_published_program_passes(scorer: CodePassesTests, published: list[Problem]) -> None:
    read = READINGS["final_code"].read
    items = [(problem, read(problem.answer) or "") for problem in published]
    assert len(items) == 164
    assert not_worth(1.0, scorer, items) == {}


@pytest.mark.slow
def test_every_published_continuation_passes(scorer: CodePassesTests, published: list[Problem]) -> None:
    continued = [replace(each, metadata={**each.metadata, "code_form": "continuation"}) for each in published]
    assert not_worth(1.0, scorer, [(each, each.metadata["solution"]) for each in continued]) == {}


EVERYTHING = "    class E(int):\n        def __eq__(self, other):\n            return True\n    return E()\n"
STUBS = [
    "    pass\n",
    "    return None\n",
    "    import sys\n    sys.exit(0)\n",
    "    import os\n    os._exit(0)\n",
    EVERYTHING,
]
STUBS += ["import sys\nsys.exit(0)\n", "    print('passed:' + 32 * '0', flush=True)\n"]


@pytest.mark.parametrize("stub", ["    return 1\n", *(pytest.param(stub, marks=pytest.mark.slow) for stub in STUBS)])
def test_a_stub_fails_everywhere(scorer: CodePassesTests, published: list[Problem], stub: str) -> None:
    items = [(problem, problem.question + stub) for problem in published]
    passed = not_worth(0.0, scorer, items)
    assert passed == {}


def test_it_is_proved_as_any_scorer_is(scorer: CodePassesTests, published: list[Problem]) -> None:
    check_scorer(PATH, scorer, published[:6], READINGS["final_code"])
    broken = replace(published[0], answer=fenced("def nothing():\n    return 1"))
    with pytest.raises(ScorerError, match="of HumanEval/0 scores 0 and must score 1, read as the last fenced block"):
        check_scorer(PATH, scorer, [broken], READINGS["final_code"])
    with pytest.raises(ScorerError, match="read as one line, and 6 of 6 problems"):
        check_scorer(PATH, scorer, published[:6])
