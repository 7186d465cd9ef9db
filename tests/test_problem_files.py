import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.problem_files import ProblemFileError, normalised, question_key, read_problems, write_problems
from grpo.records import Problem

GOOD = {"id": "a", "question": "1 + 1 =", "answer": "2", "slice": "sums"}

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
problems = st.lists(
    st.builds(
        Problem,
        texts,
        texts,
        texts,
        texts,
        st.dictionaries(texts, json_values, max_size=2),
        st.just("") | texts,  # most problems have no context
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda problem: problem.id,
)


def file_of(folder: Path, *lines: object) -> Path:
    path = folder / "problems.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


@given(problems)
def test_what_is_written_is_read_back_whatever_the_text(
    tmp_path_factory: pytest.TempPathFactory, written: list[Problem]
) -> None:
    path = tmp_path_factory.mktemp("round") / "problems.jsonl"
    write_problems(path, written)
    assert read_problems(path) == sorted(written, key=lambda problem: problem.id)


def test_order_of_the_problems_does_not_change_the_bytes(tmp_path: Path) -> None:
    one, two = Problem("b", "é", "2", "s", {"y": 1, "x": [2]}), Problem("a", "q", "1", "s")
    write_problems(tmp_path / "first", [one, two])
    write_problems(tmp_path / "second", [two, one])
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    assert (tmp_path / "first").read_text().splitlines() == [
        '{"answer": "1", "id": "a", "metadata": {}, "question": "q", "slice": "s"}',
        '{"answer": "2", "id": "b", "metadata": {"x": [2], "y": 1}, "question": "é", "slice": "s"}',
    ]


def test_a_context_is_a_field_of_its_own_that_most_problems_do_not_have(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    written = [Problem("a", "q", "1", "s", context="One.\n{question}"), Problem("b", "q", "1", "s")]
    write_problems(path, written)
    assert read_problems(path) == written
    assert path.read_text().splitlines() == [
        '{"answer": "1", "context": "One.\\n{question}", "id": "a", "metadata": {}, "question": "q", "slice": "s"}',
        '{"answer": "1", "id": "b", "metadata": {}, "question": "q", "slice": "s"}',
    ]


def test_the_line_separator_inside_a_string_does_not_cut_the_line(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps(GOOD | {"question": "a\u2028b"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_problems(path)[0].question == "a\u2028b"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "blank"),
        ("{'id': 1}", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("\ufeff" + json.dumps(GOOD), "not JSON"),
        ("3", "a int, not an object"),
        (GOOD | {"answr": "2"}, "unknown field 'answr'"),
        ({"id": "a", "question": "q", "slice": "s"}, "field 'answer' is missing"),
        (GOOD | {"answer": 2}, "field 'answer' is 2: make it a string"),
        (GOOD | {"answer": None}, "field 'answer' is None"),
        (GOOD | {"answer": " \t"}, "give it some text"),
        (GOOD | {"slice": ""}, "field 'slice' is ''"),
        (GOOD | {"question": "\ud800"}, "field 'question' holds half a surrogate pair"),
        (GOOD | {"context": ""}, "field 'context' is '': give it some text"),
        (GOOD | {"context": " \n"}, "field 'context' is ' \\n': give it some text"),
        (GOOD | {"context": ["a"]}, "field 'context' is ['a']: make it a string"),
        (GOOD | {"context": None}, "field 'context' is None"),
        (GOOD | {"context": "\udc00"}, "field 'context' holds half a surrogate pair"),
        (GOOD | {"metadata": ["x"]}, "field 'metadata' is"),
        (GOOD | {"metadata": {"x": ["\udc00"]}}, "field 'metadata' holds half"),
        ('{"id": "a", "id": "b"}', "field 'id' stands twice"),
        (json.dumps(GOOD)[:-1] + ', "metadata": {"x": NaN}}', "number NaN"),
        (json.dumps(GOOD)[:-1] + ', "metadata": {"x": 1e999}}', "number 1e999"),
        (json.dumps(GOOD)[:-1] + ', "metadata": {"x": -Infinity}}', "number -Infinity"),
        (json.dumps(GOOD)[:-1] + ', "metadata": {"x": ' + "1" * 5000 + "}}", "not JSON"),
    ],
)
def test_a_bad_line_is_named_with_its_place_and_its_fault(tmp_path: Path, line: object, words: str) -> None:
    path = file_of(tmp_path, GOOD | {"id": "first"}, line)
    with pytest.raises(ProblemFileError) as caught:
        read_problems(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert words in str(caught.value)


def test_a_repeated_id_names_both_lines(tmp_path: Path) -> None:
    path = file_of(tmp_path, GOOD, GOOD | {"id": "b"}, GOOD)
    with pytest.raises(ProblemFileError, match=r":3: field 'id' is 'a', which line 1 has too"):
        read_problems(path)


def test_a_file_that_is_missing_empty_or_not_utf8_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    with pytest.raises(ProblemFileError, match=r"no such file.*dvc pull"):
        read_problems(path)
    path.write_bytes(b"")
    with pytest.raises(ProblemFileError, match="empty"):
        read_problems(path)
    path.write_bytes(json.dumps(GOOD).encode("utf-16"))
    with pytest.raises(ProblemFileError, match="not UTF-8"):
        read_problems(path)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (Problem("a", "q", "1", "s"), "two problems have the id 'a'"),
        (Problem("b", " ", "1", "s"), "field 'question'"),
        (Problem("b", "q", "1", "s", {"x": float("nan")}), "problem 'b' cannot be written"),
        (Problem("b", "q", "1", "s", {"x": {1, 2}}), "problem 'b' cannot be written"),
        (Problem("b", "q\ud800", "1", "s"), "half a surrogate pair"),
        (Problem("b", "q", "1", "s", context=" "), "field 'context'"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, problem: Problem, words: str) -> None:
    path = file_of(tmp_path, GOOD)
    before = path.read_bytes()
    with pytest.raises(ProblemFileError, match=words):
        write_problems(path, [Problem("a", "q", "1", "s"), problem])
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_normalised_examples() -> None:
    assert normalised("  What\u00a0is\n\uff12 + 2? ") == normalised("what is 2 + 2?") == "what is 2 + 2?"
    assert normalised("Straße") == normalised("STRASSE")
    assert normalised("2 + 2") != normalised("2 + 3")
    assert normalised("2\u200b + 2\u2060") == normalised("2 + 2")  # what shows nothing


def test_questions_of_the_same_words_and_signs_have_one_key() -> None:
    assert question_key("8 + 0 =") == question_key("0+8=") == question_key(" 8+ 0 =\u200b")
    assert question_key("8 + 0 =") != question_key("8 - 0 =")
    assert question_key("What is 12?") != question_key("What is 1 2?")


@given(st.text())
def test_normalising_twice_is_normalising_once(text: str) -> None:
    assert normalised(normalised(text)) == normalised(text)


@given(st.text(), st.sampled_from([" ", "\t", "\n ", "\u3000"]))
def test_outer_white_space_does_not_matter(text: str, space: str) -> None:
    assert normalised(space + text + space) == normalised(text)
