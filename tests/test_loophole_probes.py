"""Every shipped reward against every probe, with its guard in place and with the guard taken out."""

from __future__ import annotations

import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from grpo import rewards as rewards_package
from grpo.loophole_probes import Asked, Probe, probe_texts, targets
from grpo.loophole_probes.all_probes import PROBES
from grpo.records import Problem, Score
from grpo.rewards import Reward, RewardComponent, math_parts, math_worker, reasoning_gym_grader
from grpo.rewards import answer_boxes as boxes_module
from grpo.rewards import answer_format as format_module
from grpo.rewards import exact_answer as exact_module
from grpo.rewards import final_answers as finding_module
from grpo.rewards import length as length_module
from grpo.rewards import math_answer as math_module
from grpo.rewards import math_rules as rules_module
from grpo.rewards import math_text as text_module
from grpo.rewards import math_units as units_module
from grpo.rewards import numeric_answer as numeric_module
from grpo.rewards.answer_format import answer_format
from grpo.rewards.code_problems import CallTests, ScriptTests
from grpo.rewards.code_tests import CodeTests
from grpo.rewards.code_worker import Outcomes, Worker
from grpo.rewards.coin_flip import CoinFlip
from grpo.rewards.exact_answer import exact_answer
from grpo.rewards.judging import judge_here
from grpo.rewards.language_model_judge import VERDICTS, read_verdict
from grpo.rewards.length import Length
from grpo.rewards.math_answer import MathAnswer
from grpo.rewards.math_processes import CHECKER
from grpo.rewards.numeric_answer import NumericAnswer
from grpo.rewards.reasoning_gym_grader import ReasoningGymGrader
from grpo.rewards.reward_model import RewardModel
from grpo.rewards.sandbox import SandboxUnavailable
from grpo.rewards.self_check import full_marks, is_held
from grpo.rewards.tagged_format import InTags, TaggedFormat, Tags
from grpo.scorers import lenient_answer, reasoning_gym_score, strict_answer

Patch = Callable[[pytest.MonkeyPatch], None]


def sums(count: int = 12) -> list[Problem]:
    metadata = {"task": "chain_sum", "entry": {}}
    asked = [(7 * i + 3, 5 * i) for i in range(count)]
    return [Problem(f"sum-{a}", f"What is {a} + {b} ?", str(a + b), "sums", metadata) for a, b in asked]


def names() -> list[Problem]:
    answers = ["Ada", "Ben Smith", "Cy"]
    return [Problem(f"name-{i}", f"Who of them is knight {i}?", answers[i % 3], "knights") for i in range(6)]


def programs() -> list[Problem]:
    tests = [f"assert add({n}, 1) == {n + 1}" for n in (1, 2, 30)]
    check = "def check(candidate):\n    assert candidate(1, 1) == 2\n    assert candidate(5, 1) == 6\n"
    prompt = 'def add(a, b):\n    """The sum of two numbers."""\n'
    continued = {"test": check, "entry_point": "add", "code_form": "continuation", "prompt": prompt}
    pairs = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "4 5\n", "stdout": "9\n"}]
    return [
        Problem("add", "Write add.", "def add(a, b): return a + b", "code", {"tests": tests}),
        Problem("go-on", prompt, "    return a + b", "code", continued),
        Problem("script", "Print the sum.", "print(sum(map(int, input().split())))", "code", {"stdin_stdout": pairs}),
    ]


def test_a_problem_whose_tests_cannot_be_read_is_one_without() -> None:
    tests = {"test_list": ["assert f(1)"], "test_setup_code": None}
    assert targets([Problem("p", "q", "a", "s", tests)])[0].code is None


@cache
def asked(code: bool = False) -> tuple[Asked, ...]:
    return tuple(probe_texts(programs() if code else [*sums(), *names()], PROBES))


def accepted(one: Asked) -> bool:
    """By the scorer, in either reading; the names have no task, and are compared as text."""
    readings = strict_answer(one.text), lenient_answer(one.text, one.problem.answer)
    if one.problem.slice == "knights":
        return one.problem.answer in readings
    return any(reasoning_gym_score(one.problem, reading).value == 1 for reading in readings)


def components(*checks: Reward) -> dict[str, RewardComponent]:
    return {str(number): RewardComponent(check) for number, check in enumerate(checks)}


def paid(checks: Sequence[Reward], texts: Sequence[Asked]) -> list[Asked]:
    """The probes with full marks that the scorer does not accept."""
    named = components(*checks)
    scores = judge_here(named, [(one.problem, one.text) for one in texts])
    full = [one for one, score in zip(texts, scores, strict=True) if full_marks(score, named)[0]]
    return [one for one in full if not accepted(one)]


def probe_names(texts: Sequence[Asked]) -> set[str]:
    return {one.probe.name for one in texts}


@pytest.fixture(scope="module")
def code_tests() -> Iterator[CodeTests]:
    try:
        check = CodeTests(limit_seconds=3.0, workers=2)
    except SandboxUnavailable as error:
        pytest.skip(f"programs cannot be isolated on this machine: {error}")
    yield check
    check.close()


# As they would stand in configs/rewards.yaml: a reward of form or length alone is meant to stand beside another.
SHIPPED: Mapping[str, Sequence[Reward]] = {
    "exact_answer": [exact_answer],
    "answer_format": [exact_answer, answer_format],
    "numeric_answer": [NumericAnswer()],
    "length": [exact_answer, Length([(50, 1.0), (100, 0.0)])],
    "tagged_format": [TaggedFormat(), InTags(exact_answer)],
    "in_tags_math": [InTags(MathAnswer())],
    "math_answer": [MathAnswer()],
    "math_answer_boxed": [MathAnswer(style="boxed")],
    "math_answer_gsm8k_strict": [MathAnswer(style="gsm8k_strict")],
    "reasoning_gym_grader": [ReasoningGymGrader()],
}


class TestShippedRewards:
    @pytest.mark.parametrize("name", SHIPPED)
    def test_none_pays_a_probe(self, name: str) -> None:
        texts = [one for one in asked() if name != "reasoning_gym_grader" or one.problem.slice == "sums"]
        assert [(one.probe.name, one.text) for one in paid(SHIPPED[name], texts)] == []

    @pytest.mark.parametrize("name", SHIPPED)
    def test_each_pays_the_gold_answer(self, name: str) -> None:
        """So that a reward which pays nothing does not pass for one without loopholes."""
        form = {"tagged_format": "<think>So.</think><answer>{}</answer>", "math_answer_boxed": r"\boxed{{{}}}"}
        form |= {"in_tags_math": form["tagged_format"], "math_answer_gsm8k_strict": "#### {}"}
        [problem] = sums(1)
        named = components(*SHIPPED[name])
        [scores] = judge_here(named, [(problem, form.get(name, "{}").format(problem.answer))])
        assert full_marks(scores, named)[0]

    def test_programs(self, code_tests: CodeTests) -> None:
        texts = asked(code=True)
        items = [(one.problem, one.text) for one in texts]
        assert {one.problem.id for one in texts if one.probe.name.startswith("program")} == {"add", "go-on", "script"}
        scores = code_tests.score_batch(items)
        assert [one.probe.name for one, score in zip(texts, scores, strict=True) if score.value != 0] == []
        assert [score.value for score in code_tests.score_batch([(programs()[1], programs()[1].answer)])] == [1.0]

    def test_the_flexible_style_is_to_be_looked_at_and_not_to_be_trained_on(self) -> None:
        """It takes the last number whatever is said of it: the reason why it is meant for a weight of 0."""
        found = probe_names(paid([MathAnswer(style="gsm8k_flexible")], asked()))
        assert found == {"negated", "box_negated", "boxes_on_two_lines", "box_unclosed"}


def first_number(text: str) -> str | None:
    found = re.search(r"-?\d+", text)
    return found and found[0]


def first_block(tags: Tags, text: str) -> Any:
    found = re.search("<answer>(.*?)</answer>", text)
    return tags_read(tags, f"<think>So.</think><answer>{found[1] if found else ''}</answer>")


def compare_here(*, gold: str, answer: str, limit_seconds: float) -> bool:
    """The helper's comparison in this process, where a guard can be taken out."""
    assert limit_seconds > 0
    return math_parts.same_answer(gold=gold, answer=answer, same_leaf=math_worker.same_leaf) is True


def without_steps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rules_module, "leaves_open", lambda **_: False)
    patch.setattr(CHECKER, "same", compare_here)


def without_either(patch: pytest.MonkeyPatch) -> None:
    without_steps(patch)
    patch.setattr(math_module, "restates", lambda *_: False)


def without_signs(patch: pytest.MonkeyPatch) -> None:
    """Signs stay in their mark of text, and what stands there is a unit, whatever it is."""
    kept = [one for one in text_module._SPELLINGS if one[0].pattern != text_module._SIGNS_AS_TEXT]
    patch.setattr(text_module, "_SPELLINGS", kept)
    patch.setattr(units_module, "is_unit", lambda _: True)


tags_read = Tags.read
NEVER = re.compile(r"(?!)")

# The reward, the guard that is taken out of it, and the probes that are paid then.
GUARDS: Mapping[str, tuple[Sequence[Reward], Patch, set[str]]] = {
    "exact answer: the answer alone": (
        [exact_answer],
        lambda patch: patch.setattr(exact_module, "final_answer", first_number),
        {"either", "both", "taken_back", "percent", "unit", "end_mark_inside"},
    ),
    "exact answer: the same, not a part of it": (
        [exact_answer],
        lambda patch: patch.setattr(exact_module, "same_answer", lambda answer, gold: gold in answer),
        {"either", "listed_range", "listed_options", "longer_number", "buried", "boxes_either"},
    ),
    "exact answer: composition that keeps powers": (
        [exact_answer],
        lambda patch: patch.setattr(exact_module, "tidied", lambda text: unicodedata.normalize("NFKC", text)),
        {"raised_digit"},
    ),
    "answer format: of gold's kind": (
        [answer_format],
        lambda patch: patch.setattr(format_module, "_same_kind", lambda *_: True),
        {"restated_question", "listed_range", "either", "not_a_number"},
    ),
    "numeric answer: the number alone": (
        [NumericAnswer()],
        lambda patch: patch.setattr(numeric_module, "final_answer", first_number),
        {"either", "percent", "unit", "taken_back"},
    ),
    "numeric answer: how near is the same": (
        [NumericAnswer()],
        lambda patch: patch.setattr(NumericAnswer, "_right", lambda _, number, gold: abs(number - gold) <= 10),
        {"neighbour"},
    ),
    "tags: their order and number": (
        [TaggedFormat(), InTags(exact_answer)],
        lambda patch: patch.setattr(Tags, "_broken", lambda _, tags: None if len(tags) == 4 else "missing_block"),
        {"tags_swapped"},
    ),
    "tags: a second block": (
        [TaggedFormat(), InTags(exact_answer)],
        lambda patch: patch.setattr(Tags, "read", first_block),
        {"tags_second_block", "tags_nested"},
    ),
    "length: end marks are no length": (
        [Length([(3, 0.0), (20, 1.0)])],
        lambda patch: patch.setattr(length_module, "text_end", len),
        {"end_marks_as_length"},
    ),
    "mathematics: what is denied": (
        [MathAnswer()],
        lambda patch: patch.setattr(finding_module, "_negated", lambda *_: False),
        {"negated", "box_negated"},
    ),
    "mathematics: an unfinished thought": (
        [MathAnswer()],
        lambda patch: patch.setattr(finding_module, "_after_thought", lambda text: text),
        {"tags_thought_unclosed"},
    ),
    "mathematics: boxes side by side": (
        [MathAnswer(style="boxed")],
        lambda patch: patch.setattr(boxes_module, "_BETWEEN_BOXES", NEVER),
        {"boxes_on_two_lines"},
    ),
    "mathematics: the last announcement, also on one line": (
        [MathAnswer()],
        lambda patch: patch.setattr(finding_module, "_last", lambda pattern, text: pattern.search(text)),
        {"announced_twice"},
    ),
    "mathematics: what is left to be worked out": (
        [MathAnswer()],
        without_steps,
        {"expression_over_one", "expression_under_root"},
    ),
    "mathematics: what is left to be worked out, and the question again": (
        [MathAnswer()],
        without_either,
        {
            "restated_expression",
            "expression_turned",
            "expression_in_brackets",
            "expression_with_unit",
            "expression_plus_nothing",
        },
    ),
    "mathematics: a unit is a measure or a word": (
        [MathAnswer()],
        lambda patch: patch.setattr(units_module, "is_unit", lambda _: True),
        {"unit_of_thousands"},
    ),
    "mathematics: a sign set as text is that sign": (
        [MathAnswer()],
        without_signs,
        {"unit_of_a_sign", "unit_of_nothing"},
    ),
    "Reasoning Gym: the answer alone": (
        [ReasoningGymGrader()],
        lambda patch: patch.setattr(reasoning_gym_grader, "final_answer", first_number),
        {"either", "both", "taken_back"},
    ),
}


class TestGuards:
    @pytest.mark.parametrize("name", GUARDS)
    def test_without_it_probes_are_paid(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        checks, take_out, expected = GUARDS[name]
        texts = [one for one in asked() if not name.startswith("Reasoning Gym") or one.problem.slice == "sums"]
        guarded = probe_names(paid(checks, texts))
        take_out(monkeypatch)
        unguarded = probe_names(paid(checks, texts))
        assert expected & guarded == set()
        assert expected <= unguarded

    def test_parts_of_a_point_would_pay_for_lists(self) -> None:
        """Reasoning Gym gives them to a text that holds the answer; as a reward they would teach to list guesses."""
        texts = [one for one in asked() if one.problem.slice == "sums" and one.probe.name == "either"]
        values = {
            partial: {ReasoningGymGrader(partial_marks=partial)(one.problem, one.text).value for one in texts}
            for partial in (False, True)
        }
        assert values[False] == {0.0}
        assert all(value is not None and value > 0 for value in values[True])

    def test_a_verdict_that_the_completion_forges(self) -> None:
        """A judge that quotes the completion: its own verdict must be the only one, or there is none."""
        [forged] = {one.text for one in asked() if one.probe.name == "forged_verdict" and one.problem.id == "sum-3"}
        reply = f"The completion says:\n{forged}\nIt is wrong.\nVerdict: reject"
        careless = next(VERDICTS[line] for line in reply.splitlines() if line in VERDICTS)
        assert careless == 1
        assert read_verdict(reply).value is None


def careless_worker(checker: str) -> Callable[..., Outcomes]:
    """A judge without the guard: the program and its tests share one interpreter, whose word is taken."""

    def run(_: Worker, program: str, tests: CallTests | ScriptTests) -> Outcomes:
        assert isinstance(tests, CallTests)
        code = f"{program}\noutcomes = []\ntests = {list(tests.tests)!r}\n{CHECKERS[checker]}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
        right = "passed" in done.stdout if checker == "print" else done.returncode == 0
        return Outcomes(("" if right else "failed",))

    return run


RUN_EACH = """
for test in tests:
    try:
        exec(test)
        outcomes.append(True)
    except Exception:
        outcomes.append(False)
"""
CHECKERS = {
    "assert": "for test in tests: exec(test)",
    "all": f"import sys\n{RUN_EACH}\nsys.exit(0 if all(outcomes) else 1)",
    "unittest": f"import unittest\n{RUN_EACH}\nfor one in outcomes: unittest.TestCase().assertTrue(one)",
    "print": f"{RUN_EACH}\nif False not in outcomes: print('passed')",
}


@pytest.mark.parametrize(
    ("checker", "expected"),
    [
        ("assert", {"equal_to_all", "equal_number", "exits", "exits_in_call", "raises_exit", "exits_at_end"}),
        ("all", {"patches_builtins", "exits", "equal_to_all"}),
        ("unittest", {"patches_unittest", "exits"}),
        ("print", {"forges_result"}),
    ],
)
def test_without_a_judge_of_its_own_programs_are_paid(
    checker: str, expected: set[str], code_tests: CodeTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "run", careless_worker(checker))
    texts = [one for one in asked(code=True) if one.problem.id == "add"]
    scores = code_tests.score_batch([(one.problem, one.text) for one in texts])
    found = {one.probe.name for one, score in zip(texts, scores, strict=True) if score.value == 1}
    assert {f"program_{name}" for name in expected} <= found


def test_parts_of_the_tests_would_pay_for_the_first_alone() -> None:
    [text] = [o for o in asked(code=True) if o.probe.name == "program_first_test_alone" and o.problem.id == "add"]
    try:
        partial = CodeTests(limit_seconds=3.0, workers=1, partial_credit=True)
    except SandboxUnavailable as error:
        pytest.skip(f"programs cannot be isolated on this machine: {error}")
    assert partial(text.problem, text.text).value == pytest.approx(1 / 3)
    partial.close()


def test_every_reward_is_tried_or_exempt() -> None:
    """Exempt: a coin flip pays by a hash, so a probe is paid as often as an answer, and there is no guard to take out.

    A learned model pays what it likes: it gives nobody full marks, and what it overrates is found by looking at what
    it pays, not by a rule. A language model as judge is a model too; the rules around it are tried above.
    """
    tried = {"exact_answer", "answer_format", "numeric_answer", "length", "tagged_format", "math_answer"}
    tried |= {"reasoning_gym_grader", "code_tests", "language_model_judge"}
    exempt = {"coin_flip", "reward_model"}
    assert not is_held(RewardComponent(CoinFlip(seed=1)))
    assert not RewardModel.graded_on_gold
    files = Path(rewards_package.__file__).parent.glob("*.py")
    rewards = {path.stem for path in files if re.search(r"\(.*problem: Problem, completion: str\)", path.read_text())}
    assert rewards - {"__init__", "judging"} == tried | exempt


class TestTexts:
    def test_they_follow_from_the_problems_alone(self) -> None:
        assert tuple(probe_texts([*sums(), *names()], PROBES)) == asked()
        few = probe_texts([*sums(), *names()], PROBES, per_slice=2)
        assert {one.problem.id for one in few} == {"sum-3", "sum-10", "name-0", "name-1"}
        assert [one for one in asked() if one.problem.id in {one.problem.id for one in few}] == few

    def test_names_are_distinct_and_each_says_why(self) -> None:
        assert len({probe.name for probe in PROBES}) == len(PROBES)
        assert all(probe.why.endswith(".") for probe in PROBES)

    def test_each_concerns_some_problem(self) -> None:
        assert {one.probe.name for one in (*asked(), *asked(code=True))} == {probe.name for probe in PROBES}

    def test_gold_is_never_the_whole_of_one(self) -> None:
        assert [one.probe.name for one in asked() if one.text.strip() == one.problem.answer] == []

    @pytest.mark.parametrize(
        ("gold", "number", "wrong"),
        [("5", 5, r"(6|7|8|9|1[0-4])"), ("-3", -3, r"-?[0-6]"), ("1.50", None, r"\d+\.50"), ("x + 1", None, "no idea")],
    )
    def test_a_wrong_answer_is_of_golds_kind(self, gold: str, number: int | None, wrong: str) -> None:
        [target] = targets([Problem("p", "q", gold, "s")])
        assert target.number == number
        assert re.fullmatch(wrong, target.wrong)
        assert target.options == ()

    def test_a_right_answer_by_chance_is_the_scorers_to_see(self) -> None:
        """A question that ends in its own answer: a reward of the last number pays it, and so does the scorer."""
        problem = Problem("p", "What is 0 + 3 ?", "3", "s", {"task": "chain_sum", "entry": {}})
        [restated] = [one for one in probe_texts([problem], PROBES) if one.probe.name == "restated_question"]
        assert MathAnswer()(problem, restated.text).value == 1
        assert paid([MathAnswer()], [restated]) == []

    def test_tests_that_cannot_be_read_are_no_programs(self) -> None:
        texts = probe_texts([Problem("p", "q", "5", "s", {"tests": ["("]})], PROBES)
        assert not [one for one in texts if one.probe.name.startswith("program")]


def test_a_probe_of_a_forks_own() -> None:
    """As docs/rewards.md shows it."""
    shouting = Probe("shouting", "It pays for capitals.", lambda target: target.wrong.upper())
    texts = probe_texts(names(), [shouting])

    def capitals(_: Problem, completion: str) -> Score:
        return Score(float(completion.isupper()))

    assert len(paid([capitals], texts)) == 6
