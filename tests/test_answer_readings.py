"""The readings of held-out answers, each against texts read by hand, and apart from the rewards' own search."""

from __future__ import annotations

import pytest
from cases_folder import cases
from import_graph import read_imports

from grpo.answer_readings import READINGS, STRICT, ReadingError, load_reading
from grpo.records import Problem
from grpo.scorers import ScorerError, check_scorer, number_or_text

LATEX = r"So it is \boxed{1}. No: \boxed{\frac{1}{2}}."


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("strict_answer", " 5.", "5"),
        ("strict_answer", "It is\n5", None),
        ("last_hash_line", "2 + 3 = 5\n#### 5", "5"),
        ("last_hash_line", "#### 4\nNo.\nAnswer: #### 1,200.\nDone", "1,200"),
        ("last_hash_line", "#### 5\n####", None),
        ("last_hash_line", "5", None),
        ("last_hash_line", "#### ...", None),
        ("last_boxed", LATEX, r"\frac{1}{2}"),
        ("last_boxed", r"\boxed {x \in \{1, 2\}}", r"x \in \{1, 2\}"),
        ("last_boxed", r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        ("last_boxed", r"\boxed{5", None),
        ("last_boxed", r"\boxed{5} or \boxed{", None),
        ("last_boxed", r"\boxed{ }", None),
        ("last_boxed", r"\fbox{5} {5}", None),
        ("answer_block", "<think>2+3</think>\n<answer>\n 5 </answer>\n", "5"),
        ("answer_block", "<answer>5</answer> or <answer>6</answer>", None),
        ("answer_block", "</answer> <answer>5</answer>", None),
        ("answer_block", "<answer><answer>5</answer>", None),
        ("answer_block", "<answer>5", None),
        ("answer_block", "<answer> </answer>", None),
        ("answer_block", "5", None),
        ("final_code", "    return 1\n", "    return 1\n"),
        ("final_code", "```python\nx = 1\n```\nor\n```py\nx = 2\n```", "x = 2\n"),
        ("final_code", "```\nx = 1\n```\n```text\nout\n```", "x = 1\n"),
        ("final_code", "~~~python\ns = '''\n```\n'''\n~~~", "s = '''\n```\n'''\n"),
        ("final_code", "```python\nx = 1", "x = 1\n"),
        ("final_code", '```python\ns = "\x0c\u2028"\n```', 's = "\x0c\u2028"\n'),
        ("final_code", "```sh\nls\n```", None),
        ("final_code", " \n", None),
        ("final_code", "```python\n```", None),
    ],
)
def test_what_a_reading_finds(name: str, text: str, answer: str | None) -> None:
    assert READINGS[name].read(text) == answer


@pytest.mark.parametrize("name", READINGS)
def test_what_is_written_for_a_reading_is_read(name: str) -> None:
    assert READINGS[name].read(READINGS[name].written("1,200")) == "1,200"


def test_no_reading_and_no_scorer_shares_the_rewards_search() -> None:
    graph = read_imports()
    searches = {f"grpo.rewards.{name}" for name in ("final_answers", "tagged_format", "code_blocks", "exact_answer")}
    assert graph.closure("grpo.answer_readings") & searches == set()
    judges = {f"grpo.rewards.code_{name}" for name in ("blocks", "judge", "problems", "tests", "worker")}
    assert (graph.closure("grpo.code_scorer") - {"grpo.rewards"}) & (judges | searches) == set()


def after_a_colon(text: str) -> str | None:
    """A fork's own reading."""
    return text.rpartition(": ")[2] if ": " in text else None


after_a_colon.answer_template = "Answer: {answer}"  # type: ignore[attr-defined]


def test_a_reading_by_its_dotted_path() -> None:
    own = load_reading("test_answer_readings.after_a_colon")
    assert (own.path, own.read("It is: 5"), own.written("5")) == (
        "test_answer_readings.after_a_colon",
        "5",
        "Answer: 5",
    )
    assert load_reading("grpo.answer_readings.last_boxed") is READINGS["last_boxed"]
    assert load_reading("strict_answer") is STRICT


@pytest.mark.parametrize(
    "name", ["nothing", "grpo.answer_readings.nothing", "no.such.module", "grpo.answer_readings._WORD"]
)
def test_a_reading_that_is_none(name: str) -> None:
    with pytest.raises(ReadingError, match=f"reading is '{name}'.*choose one of strict_answer, last_hash_line"):
        load_reading(name)


def test_a_scorer_is_proved_on_what_the_reading_finds() -> None:
    problems = [Problem(str(i), "q", answer, "s") for i, answer in enumerate(["1,200", "7", "x y"])]
    for name in ("strict_answer", "last_hash_line", "last_boxed", "answer_block"):
        check_scorer("numbers", lambda *item: number_or_text(*item), problems, READINGS[name])


@pytest.mark.parametrize(
    ("name", "gold", "message"),
    [
        ("last_hash_line", "...", "read as what follows #### .* 1 of 2 problems .* of b: give these"),
        ("last_boxed", "{", r"read as what stands in the last \\boxed"),
        ("answer_block", "</answer>", "read as what stands in the one <answer> block"),
        ("final_code", " ", "read as the last fenced block"),
        # Read as Yes, which is another text than gold: every policy would be wrong.
        ("strict_answer", "Yes.", "gold answer 'Yes.' of b scores 0 and must score 1, read as one line"),
    ],
)
def test_gold_that_does_not_fit_the_reading(name: str, gold: str, message: str) -> None:
    problems = [Problem("a", "q", "1", "s"), Problem("b", "q", gold, "s")]
    with pytest.raises(ScorerError, match=message):
        check_scorer("numbers", lambda *item: number_or_text(*item), problems, READINGS[name])


def test_published_solutions_are_read_as_their_answers() -> None:
    rows = cases("data/gsm8k_test.jsonl.gz")
    reading = READINGS["last_hash_line"]
    golds = [row["answer"].rpartition("#### ")[2] for row in rows]
    read = [reading.read(row["answer"]) for row in rows]
    assert [
        number_or_text(Problem("p", "q", gold, "s"), answer).value for gold, answer in zip(golds, read, strict=True)
    ] == [1.0] * len(rows)
