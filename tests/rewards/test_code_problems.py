from typing import Any

import pytest

from grpo.rewards.code_problems import BadTests, CallTests, CodeProblem, ScriptTests, read_problem


def call_tests(metadata: dict[str, Any]) -> CallTests:
    problem = read_problem(metadata)
    assert problem is not None
    assert isinstance(problem.tests, CallTests)
    return problem.tests


def test_a_problem_without_tests_has_none() -> None:
    assert read_problem({}) is None
    assert read_problem({"prompt": "x", "level": 3}) is None


def test_assert_statements() -> None:
    tests = call_tests({"tests": ["assert f(1) == g(2)", "x = [n for n in f(2)]\nassert len(x) == 1"]})
    assert tests.functions == {"f", "g"}
    assert tests.setup == ""


def test_what_the_setup_defines_is_not_asked_of_the_solution() -> None:
    setup = "import math as m\nclass Node: pass\ndef near(a, b): return m.isclose(a, b)\nLIMIT = 3"
    tests = call_tests({"setup": setup, "tests": ["assert near(f(LIMIT), m.pi)"]})
    assert tests.functions == {"f"}


def test_built_in_names_stay_the_tests_own() -> None:
    assert call_tests({"tests": ["assert sorted(set(f(3))) == [1]"]}).functions == {"f"}
    assert call_tests({"tests": ["assert sum(3) == 1"], "entry_point": "sum"}).functions == {"sum"}


def test_mbpp_as_published() -> None:
    row = {"test_list": ["assert f(1) == 1"], "test_setup_code": "import math", "test_imports": ["import re"]}
    tests = call_tests(row)
    assert tests.setup == "import re\nimport math"
    assert tests.functions == {"f"}


def test_human_eval_as_published() -> None:
    row = {"prompt": "def f(x):\n    '''Doc.'''\n", "test": "def check(candidate):\n    assert candidate(1) == 1\n"}
    row |= {"entry_point": "f", "code_form": "continuation"}
    problem = read_problem(row)
    assert problem is not None
    assert (problem.form, problem.prompt) == ("continuation", row["prompt"])
    tests = call_tests(row)
    assert tests.functions == {"f"}
    assert tests.tests == (f"{row['test']}\n\ncheck(f)\n",)


def test_pairs_of_input_and_output() -> None:
    problem = read_problem({"stdin_stdout": [{"stdin": "1\n", "stdout": "2\n"}]})
    assert problem == CodeProblem(ScriptTests((("1\n", "2\n"),)))


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({"tests": []}, "metadata.tests is"),
        ({"tests": "assert f() == 1"}, "metadata.tests is"),
        ({"tests": [1]}, "must be text"),
        ({"tests": ["assert f(1) =="]}, "no Python"),
        ({"tests": ["assert f(1)\0"]}, "no Python"),
        ({"tests": ["assert f(1)"], "setup": "def"}, "no Python"),
        ({"test_list": ["assert f(1)"], "test_setup_code": None}, "metadata.test_setup_code is None"),
        ({"test_list": ["assert f(1)"], "test_imports": None}, "metadata.test_imports is None"),
        ({"test_list": ["assert f(1)"], "test_imports": "import re"}, "metadata.test_imports is 'import re'"),
        ({"test_list": ["assert f(1)"], "test_imports": [1]}, "metadata.test_imports is"),
        ({"test": "x"}, "metadata.entry_point"),
        ({"test": 1, "entry_point": "f"}, "metadata.test is"),
        ({"stdin_stdout": [{"stdin": "1"}]}, "metadata.stdin_stdout holds"),
        ({"tests": ["assert f(1)"], "code_form": "all"}, "metadata.code_form is 'all': choose block or continuation"),
        ({"tests": ["assert f(1)"], "code_form": "continuation"}, "metadata.prompt is None"),
    ],
)
def test_tests_that_cannot_be_run_are_named(metadata: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadTests, match=complaint):
        read_problem(metadata)
