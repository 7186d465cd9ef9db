from __future__ import annotations

import gzip
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases_folder import cases, cases_file
from hypothesis import given
from hypothesis import strategies as st

from grpo.problem_files import ProblemFileError, parse_problem, write_problems
from grpo.problem_sources import (
    GSM8K,
    MATH,
    MBPP,
    HubRows,
    HumanEval,
    MappedProblems,
    PlainProblems,
    ProblemSource,
    ReasoningGymTasks,
    SavedRows,
    as_sources,
)
from grpo.problem_sources.layout import content_id
from grpo.problem_sources.prepared_files import described
from grpo.problem_sources.reasoning_gym_slices import SliceRecipe
from grpo.problem_sources.worked_maths import last_boxed
from grpo.records import Problem
from grpo.rewards import RewardComponent
from grpo.rewards.code_problems import read_problem
from grpo.rewards.coin_flip import CoinFlip
from grpo.rewards.exact_answer import exact_answer

PROMPT = 'def one():\n    """One."""\n'
GSM = {"question": "Two and two?", "answer": "2+2=<<2+2=4>>4\n#### 4"}


def lines(path: Path, *rows: object) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def problems(source: ProblemSource) -> list[Problem]:
    return [row.problem for row in source.read()]


def complaint(source: ProblemSource) -> str:
    with pytest.raises(ProblemFileError) as caught:
        list(source.read())
    return str(caught.value)


@pytest.mark.parametrize(("name", "count"), [("gsm8k_train", 7473), ("gsm8k_test", 1319)])
def test_gsm8k_is_read_whole_and_its_answers_as_published(name: str, count: int) -> None:
    name = f"data/{name}.jsonl.gz"
    found = problems(GSM8K(rows=cases_file(name)))
    assert len(found) == count == len({each.id for each in found})
    for row, problem in zip(cases(name), found, strict=True):
        assert problem.question == row["question"]
        assert problem.metadata == {"role": "train", "solution": row["answer"]}
        assert row["answer"].endswith(f"\n#### {problem.answer}")
        assert problem.answer.replace(",", "").removeprefix("-").isdigit()
    assert any("," in each.answer for each in found)


def test_humaneval_is_read_whole_and_its_tests_where_the_reward_reads_them() -> None:
    found = problems(HumanEval(rows=cases_file("data/humaneval.jsonl.gz")))
    assert len(found) == 164
    assert found[0].id == "HumanEval/0"
    for problem in found:
        assert read_problem(problem.metadata) is not None
        assert problem.answer.startswith(f"```python\n{problem.question}")
        assert problem.metadata["solution"].rstrip() in problem.answer


def test_code_tasks_are_in_the_form_that_is_asked_for(tmp_path: Path) -> None:
    row = {
        "task_id": "T/1", "prompt": PROMPT, "entry_point": "one", "canonical_solution": "    return 1\n",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
    }  # fmt: skip
    path = lines(tmp_path / "tasks.jsonl", row)
    (block,) = problems(HumanEval(rows=path))
    (tail,) = problems(HumanEval(rows=path, code_form="continuation"))
    assert block.answer == f"```python\n{PROMPT}    return 1\n```"
    assert (tail.answer, tail.metadata["code_form"]) == ("    return 1\n", "continuation")
    code = read_problem(tail.metadata)
    assert code is not None
    assert code.prompt == PROMPT
    assert "field 'test' is missing" in complaint(HumanEval(rows=lines(path, {k: row[k] for k in list(row)[:-1]})))


def test_mbpp_shows_as_many_tests_as_declared_and_keeps_all(tmp_path: Path) -> None:
    tests = ["assert two(1) == 2", "assert two(2) == 4"]
    row = {"task_id": 7, "text": "Double it.", "code": "def two(n):\n    return 2 * n", "test_list": tests}
    path = lines(tmp_path / "mbpp.jsonl", row | {"test_setup_code": ""})
    (shown,) = problems(MBPP(rows=path))
    assert (shown.id, shown.slice) == ("mbpp/7", "mbpp")
    assert shown.question == "Double it.\n\nYour code should pass:\nassert two(1) == 2"
    assert shown.metadata["test_list"] == tests
    assert read_problem(shown.metadata) is not None
    assert problems(MBPP(rows=path, shown_tests=0))[0].question == "Double it."
    sanitized = {
        "prompt": "Double it.",
        "test_imports": ["import math"],
        **{k: row[k] for k in ("task_id", "code", "test_list")},
    }
    assert problems(MBPP(rows=lines(path, sanitized)))[0].metadata["test_imports"] == ["import math"]
    assert "'test_list' is 'x'" in complaint(MBPP(rows=lines(path, row | {"test_list": "x"})))
    assert "'test_list' is empty" in complaint(MBPP(rows=lines(path, row | {"test_list": []})))
    with pytest.raises(ProblemFileError, match="shown_tests is -1"):
        MBPP(rows=path, shown_tests=-1)


@pytest.mark.parametrize(
    ("slice_by", "name"),
    [
        ("type", "math/algebra"),
        ("level", "math/level 5"),
        ("type and level", "math/algebra/level 5"),
        ("nothing", "math"),
    ],
)
def test_math_is_read_from_either_of_its_published_forms(tmp_path: Path, slice_by: Any, name: str) -> None:
    row = {"problem": "Half?", "solution": r"It is $\boxed{\frac{1}{2}}$.", "level": "Level 5", "type": "Algebra"}
    folder = tmp_path / "algebra"
    folder.mkdir()
    for number in (10, 2):
        (folder / f"{number}.json").write_text(json.dumps(row | {"problem": f"Half of {number}?"}, indent=1))
    found = list(MATH(rows=tmp_path, slice_by=slice_by).read())
    assert [each.place for each in found] == [str(folder / "10.json"), str(folder / "2.json")]
    assert [each.problem.answer for each in found] == [r"\frac{1}{2}"] * 2
    assert found[0].problem.slice == name
    later = {"problem": "Half?", "solution": row["solution"], "level": 5, "subject": "Algebra", "unique_id": "test/1"}
    (problem,) = problems(MATH(rows=lines(tmp_path / "math500.jsonl", later), slice_by=slice_by))
    assert (problem.id, problem.slice, problem.metadata["level"]) == ("test/1", name, "level 5")


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        (r"\boxed{1}, no, \boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\fbox{7}", "7"),
        (r"$\boxed 7$", "7"),
        (r"$\boxed 12$ ok", "12"),
        (r"$\boxed\frac12$.", r"\frac12"),
        (r"$\boxed -3$", "-3"),
        (r"\(\boxed \frac 12\)", r"\frac 12"),
        (r"\boxed 12 is it", None),
        (r"$\boxed{5}$, not \boxed $", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{x\right.}", r"\left\{x\right."),  # an escaped brace opens nothing
        (r"\boxed{}", None),
        (r"\boxed{1", None),
        ("7", None),
    ],
)
def test_the_last_box_is_gold(text: str, gold: str | None) -> None:
    assert last_boxed(text) == gold


@given(
    st.text(alphabet="ab{}\\$ \n", max_size=30),
    st.recursive(st.sampled_from(["x", "1", r"\frac"]), lambda inner: st.builds("{{{}}}{}".format, inner, inner)),
)
def test_any_balanced_content_of_a_last_box_is_found(before: str, content: str) -> None:
    assert last_boxed(f"{before} \\boxed{{{content}}} end") == content


def test_a_solution_without_its_mark_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    bad = complaint(GSM8K(rows=lines(path, GSM, GSM | {"answer": "It is 4."})))
    assert bad.startswith(f"{path}:2: field 'answer' ends in 'It is 4.', not in a line `#### <the answer>`")
    assert "`#### <the answer>`" in complaint(GSM8K(rows=lines(path, GSM | {"answer": "4\n#### "})))
    row = {"problem": "?", "solution": "It is 4.", "level": "Level 1", "type": "Algebra"}
    assert f"{path}:1: field 'solution' holds no whole" in complaint(MATH(rows=lines(path, row)))


MAPPED = {"prompt": "2 + 2 =", "gold": {"text": "4"}, "uid": 17, "kind": "sums", "level": 3, "unused": float("1.5")}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet", ".parquet.gz"])
def test_a_table_of_any_kind_is_read_by_a_map_of_its_fields(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    if "parquet" in suffix:
        pq.write_table(pa.Table.from_pylist([MAPPED]), tmp_path / "plain")
        data = (tmp_path / "plain").read_bytes()
        path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    else:
        lines(path, MAPPED)
    fields: Any = {"question": "prompt", "answer": "gold.text", "id": "uid", "slice": "kind"}
    (row,) = MappedProblems(rows=path, fields=fields, keep=["level"], role="heldout_only", split="heldout").read()
    assert row.problem == Problem("17", "2 + 2 =", "4", "sums", {"role": "heldout_only", "level": 3})
    assert row.split == "heldout"
    assert row.place == (f"{path}: row 1" if "parquet" in suffix else f"{path}:1")


def test_a_row_may_name_its_own_role_and_context(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", MAPPED | {"part": "heldout_only", "page": "Sums."})
    fields: Any = {"question": "prompt", "answer": "gold.text", "role": "part", "context": "page"}
    (problem,) = problems(MappedProblems(rows=path, fields=fields, slice="all"))
    assert (problem.metadata, problem.context, problem.slice) == ({"role": "heldout_only"}, "Sums.", "all")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": None}, "field 'prompt' is None: make it a string"),
        ({"prompt": " "}, "field 'prompt' is ' ': give it some text"),
        ({"gold": {"text": 18.0}}, "field 'gold.text' is 18.0: make it a string"),
        ({"gold": {"text": True}}, "field 'gold.text' is True: make it a string"),
        ({"gold": "4"}, "field 'gold.text' is missing; the row has 'prompt', 'gold', 'uid'"),
        ({"prompt": "\ud800"}, "field 'question' holds half a surrogate pair"),
    ],
)
def test_a_bad_row_is_named_by_line_field_and_remedy(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = lines(tmp_path / "rows.jsonl", MAPPED, MAPPED | changes)
    fields: Any = {"question": "prompt", "answer": "gold.text"}
    message = complaint(MappedProblems(rows=path, fields=fields, slice="all"))
    assert message.startswith(f"{path}:2: ")
    assert words in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fields": {"question": "prompt"}, "slice": "s"}, "fields names no answer"),
        ({"fields": {"question": "q", "answer": "a"}}, "say either slice or fields.slice"),
        ({"fields": {"question": "q", "answer": "a", "slice": "s"}, "slice": "s"}, "say either slice"),
        ({"fields": {"question": "q", "answer": "a"}, "slice": "s", "keep": ["role"]}, "keep names 'role'"),
    ],
)
def test_a_map_that_cannot_work_is_refused_before_a_row_is_read(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ProblemFileError, match=words):
        MappedProblems(rows=Path("nowhere.jsonl"), **settings)


def test_two_settings_of_one_check_are_described_apart() -> None:
    coin = RewardComponent(CoinFlip(seed=1, chance=0.25), weight=0.5, limit_seconds=2.0)
    assert described(coin) == {
        "check": "grpo.rewards.coin_flip.CoinFlip",
        "weight": 0.5,
        "init_args": {"seed": 1, "chance": 0.25},
        "limit_seconds": 2.0,
    }
    assert described(RewardComponent(exact_answer)) == {
        "check": "grpo.rewards.exact_answer.exact_answer",
        "weight": 1.0,
    }


def test_what_json_cannot_write_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"q": "?", "a": "1", "blob": b"x"}]), path)
    fields: Any = {"question": "q", "answer": "a"}
    assert "cannot be written as JSON" in complaint(MappedProblems(rows=path, fields=fields, slice="s", keep=["blob"]))
    assert "'nope' is missing: take it out" in complaint(
        MappedProblems(rows=path, fields=fields, slice="s", keep=["nope"])
    )
    assert problems(MappedProblems(rows=path, fields=fields, slice="s"))[0].answer == "1"


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("rows.csv", b"a,b", "a file of this kind is not read: give .jsonl or .parquet"),
        ("rows.jsonl", b"", "the file is empty"),
        ("rows.jsonl", b"\xff\n", "not UTF-8"),
        ("rows.jsonl", b"[1]\n", "rows.jsonl:1: a list, not an object"),
        ("rows.jsonl", b"\n", "rows.jsonl:1: the line is blank"),
        ("rows.jsonl", b'{"a": 1, "a": 2}\n', "rows.jsonl:1: not JSON (field 'a' stands twice)"),
        ("rows.jsonl", b'{"a": NaN}\n', "the number NaN is not JSON"),
        ("rows.jsonl.gz", b"not gzip", "not a whole gzip file"),
        ("rows.jsonl.gz", gzip.compress(b"{}" * 1000)[:-9], "not a whole gzip file"),
        ("rows.parquet", b"PAR1 no", "not a Parquet file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    assert words in complaint(GSM8K(rows=tmp_path / name))


def test_a_missing_file_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    assert "no such file: check the path, or fetch the data" in complaint(GSM8K(rows=tmp_path / "none.jsonl"))
    assert "no .json file below this folder" in complaint(MATH(rows=tmp_path))
    assert "no such file" in complaint(PlainProblems(tmp_path / "none.jsonl"))


@given(st.text(min_size=1), st.text(min_size=1), st.text(min_size=1))
def test_an_id_hangs_on_the_words_of_the_question_alone(prefix: str, one: str, other: str) -> None:
    assert content_id(prefix, one) == content_id(prefix, f"  {one}\n")
    same = " ".join(one.split()).casefold() == " ".join(other.split()).casefold()
    assert same or one.strip() != other.strip() or content_id(prefix, one) == content_id(prefix, other)


def test_ids_do_not_change_with_the_order_of_the_rows(tmp_path: Path) -> None:
    rows = [GSM | {"question": f"{n}?"} for n in range(5)]
    forwards = problems(GSM8K(rows=lines(tmp_path / "a.jsonl", *rows)))
    backwards = problems(GSM8K(rows=lines(tmp_path / "b.jsonl.gz", *rows[::-1])))
    assert forwards == backwards[::-1]
    assert len({each.id for each in forwards}) == 5


@pytest.mark.parametrize("name", ["plain.jsonl", "plain.jsonl.gz"])
def test_a_plain_file_is_read_as_it_is(tmp_path: Path, name: str) -> None:
    given_problems = [Problem(f"p{n}", f"{n}?", str(n), "s", {"role": "train"}) for n in range(3)]
    write_problems(tmp_path / "plain", given_problems)
    data = (tmp_path / "plain").read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    (source,) = as_sources(tmp_path / name)
    assert problems(source) == given_problems
    assert [row.place for row in source.read()] == [f"{tmp_path / name}:{n}" for n in (1, 2, 3)]
    assert "bad.jsonl:2: unknown field 'x'" in complaint(
        PlainProblems(lines(tmp_path / "bad.jsonl", data.decode().splitlines()[0], {"x": 1}))
    )


def test_every_problem_can_be_read_back_from_its_line(tmp_path: Path) -> None:
    problem = problems(GSM8K(rows=lines(tmp_path / "a.jsonl", GSM)))[0]
    write_problems(tmp_path / "out.jsonl", [problem])
    assert parse_problem((tmp_path / "out.jsonl").read_text().strip()) == problem


def test_reasoning_gym_is_drawn_by_the_name_of_the_task() -> None:
    recipe = SliceRecipe("chain_sum", 5, config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    first, again = (
        list(ReasoningGymTasks(version="0.1.25", seed=1, slices={"sums": recipe}, split="heldout").read()) for _ in "ab"
    )
    assert first == again
    assert [row.place for row in first] == [f"reasoning-gym chain_sum: slice sums, row {n}" for n in range(1, 6)]
    assert {(row.problem.slice, row.split) for row in first} == {("sums", "heldout")}
    assert "version is 0.0.1" in complaint(ReasoningGymTasks(version="0.0.1", seed=1, slices={"sums": recipe}))
    assert "slices.none.size is 0" in complaint(
        ReasoningGymTasks(version="0.1.25", seed=1, slices={"none": SliceRecipe("chain_sum", 0)})
    )


def test_data_sets_of_the_hub_name_the_package_that_they_need(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    for rows in (HubRows("a/b", "0" * 40, "train"), SavedRows(tmp_path)):
        assert "pip install 'grpo[datasets]'" in complaint(GSM8K(rows=rows))


@pytest.mark.parametrize("revision", ["main", "v1.0", "0" * 39, "G" * 40])
def test_a_revision_that_may_move_is_refused(revision: str) -> None:
    with pytest.raises(ValueError, match="40 hexadecimal digits"):
        HubRows("a/b", revision, "train")


def stand_in(load: Callable[..., Any]) -> types.ModuleType:
    """What stands in for the optional package: its two functions, as this project calls them."""
    module = types.ModuleType("datasets")
    module.load_dataset = module.load_from_disk = load  # type: ignore[attr-defined]
    return module


def test_hub_rows_are_those_of_the_pinned_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, config: str | None, *, split: str, revision: str) -> list[dict[str, str]]:
        assert (name, config, split, revision) == ("openai/gsm8k", "main", "test", "a" * 40)
        return [GSM]

    monkeypatch.setitem(sys.modules, "datasets", stand_in(load))
    (row,) = GSM8K(rows=HubRows("openai/gsm8k", "a" * 40, "test", "main"), split="heldout").read()
    assert (row.problem.answer, row.place) == ("4", "openai/gsm8k@aaaaaaa test: row 1")


def test_a_data_set_that_is_not_there_says_how_it_could_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def offline(*_: object, **__: object) -> Any:
        raise ConnectionError("offline")

    monkeypatch.setitem(sys.modules, "datasets", stand_in(offline))
    assert "HF_HUB_OFFLINE=0" in complaint(GSM8K(rows=HubRows("a/b", "0" * 40, "train")))
    assert "no such folder" in complaint(GSM8K(rows=SavedRows(tmp_path / "none")))
    assert "split 'train' cannot be loaded (ConnectionError: offline)" in complaint(GSM8K(rows=SavedRows(tmp_path)))


@pytest.mark.parametrize(("mark", "one"), [("state.json", True), ("dataset_dict.json", False), ("x.parquet", True)])
def test_a_saved_data_set_is_read_with_or_without_splits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mark: str, one: bool
) -> None:
    (tmp_path / mark).write_text("")
    monkeypatch.setitem(sys.modules, "datasets", stand_in(lambda *_, **__: [GSM] if one else {"test": [GSM]}))
    assert problems(GSM8K(rows=SavedRows(tmp_path, "test")))[0].answer == "4"
    if not one:
        assert "KeyError: 'train'" in complaint(GSM8K(rows=SavedRows(tmp_path)))
