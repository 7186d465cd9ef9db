from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cases_folder import cases_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo import score as command
from grpo.named_checks import load_reward, reward_names
from grpo.problem_files import ProblemFileError
from grpo.records import Problem, Score
from grpo.rewards.exact_answer import exact_answer
from grpo.rewards.sandbox import SandboxUnavailable, require
from grpo.score import ScoreError, ScoreSettings, main, score

CONFIGS = Path(__file__).parents[1] / "configs"
PAIRS = [
    {"id": "a", "gold": "4", "completion": "4"},
    {"id": "b", "gold": "4", "completion": "5"},
    {"id": "a", "gold": "4", "completion": ""},
]


def sleeps_on_wait(_: Problem, completion: str) -> Score:
    if completion == "wait":
        time.sleep(60)
    if completion == "raise":
        raise RuntimeError("no luck")
    return Score(0.5, parts={"seen": {completion}, "nan": float("nan")})


def write(folder: Path, *rows: object) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def graded(folder: Path, *rows: object, **named: Any) -> list[dict[str, Any]]:
    named = named or {"reward": "grpo.rewards.exact_answer.exact_answer", "limit_seconds": None}
    score(ScoreSettings(write(folder, *rows), folder / "verdicts.jsonl", **named))
    return [json.loads(line) for line in (folder / "verdicts.jsonl").read_text().splitlines()]


def test_a_line_a_completion_in_their_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = graded(tmp_path, *PAIRS)
    assert [(each["id"], each["value"], each["scored"]) for each in verdicts] == [
        ("a", 1.0, True), ("b", 0.0, True), ("a", 0.0, True)
    ]  # fmt: skip
    assert verdicts[0]["parts"] == {"answer": "4"}
    assert verdicts[2]["reason"] == "not one line holding the answer alone"
    assert {tuple(each) for each in verdicts} == {("id", "value", "scored", "reason", "parts")}
    assert capsys.readouterr().out == (
        f"{tmp_path / 'verdicts.jsonl'}: 3 completions: 1 accepted, 2 rejected, 0 unscored; "
        "accepted of scored 0.333, mean value 0.333\n"
    )


def test_the_whole_problem_reaches_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Problem] = []

    def looks(problem: Problem, _: str) -> Score:
        seen.append(problem)
        return Score(1.0)

    monkeypatch.setattr(command, "load_reward", lambda _: looks)
    whole = {"id": "w", "question": "Q?", "answer": "4", "slice": "s", "metadata": {"m": [1]}, "context": "C"}
    short = {"id": "s", "gold": "4", "question": "Q?", "metadata": {"m": 1}, "note": "not read"}
    graded(tmp_path, whole | {"completion": "x"}, short | {"completion": "x"}, reward="any", limit_seconds=None)
    assert seen[0] == Problem("w", "Q?", "4", "s", {"m": [1]}, "C")
    assert (seen[1].question, seen[1].answer, seen[1].metadata) == ("Q?", "4", {"m": 1})


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.text(max_size=5), st.sampled_from(["4", "5"])), min_size=1, max_size=8))
def test_any_text_is_graded_as_the_reward_grades_it(tmp_path: Path, pairs: list[tuple[str, str]]) -> None:
    texts = [(f"{text}\ud800" if gold == "5" else text, gold) for text, gold in pairs]
    rows = [{"id": str(n), "gold": gold, "completion": text} for n, (text, gold) in enumerate(texts)]
    verdicts = graded(tmp_path, *rows)
    expected = [exact_answer(Problem("p", "?", gold, "s"), text).value for text, gold in texts]
    assert [(each["id"], each["value"]) for each in verdicts] == [(str(n), value) for n, value in enumerate(expected)]


def test_a_check_that_hangs_or_raises_leaves_its_line_unscored(tmp_path: Path) -> None:
    rows = [{"id": text, "gold": "4", "completion": text} for text in ("wait", "fine", "raise")]
    named = {"reward": f"{sleeps_on_wait.__module__}.sleeps_on_wait", "limit_seconds": 0.5}
    wait, fine, raises = graded(tmp_path, *rows, **named)
    assert (wait["value"], wait["scored"], wait["reason"]) == (None, False, "no verdict within limit_seconds = 0.5")
    assert (fine["value"], fine["scored"]) == (0.5, True)
    assert fine["parts"] == {"seen": "{'fine'}", "nan": "nan"}  # what JSON cannot write, by its text
    assert raises["scored"] is False
    assert raises["reason"].startswith("RuntimeError: no luck")


def test_a_share_of_failures_ends_the_command_after_writing(tmp_path: Path) -> None:
    rows = [{"id": text, "gold": "4", "completion": text} for text in ("fine", "raise")]
    named: dict[str, Any] = {"reward": f"{sleeps_on_wait.__module__}.sleeps_on_wait", "limit_seconds": None}
    assert len(graded(tmp_path, *rows, max_failure_share=0.5, **named)) == 2
    (tmp_path / "verdicts.jsonl").unlink()
    with pytest.raises(ScoreError, match=r"checks failed on 1 of 2 completions, more than max_failure_share = 0\.4"):
        graded(tmp_path, *rows, max_failure_share=0.4, **named)
    assert len((tmp_path / "verdicts.jsonl").read_text().splitlines()) == 2


def test_a_set_of_components_gives_their_weighted_sum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, *PAIRS)
    output = tmp_path / "verdicts.jsonl"
    main(["--config", str(CONFIGS / "rewards.yaml"), "--input", str(path), "--output", str(output)])
    verdicts = [json.loads(line) for line in output.read_text().splitlines()]
    assert [each["value"] for each in verdicts] == [1.1, 0.1, 0.0]
    assert verdicts[1]["parts"]["answer_format"] == {"value": 1.0, "reason": "", "parts": {}}
    assert verdicts[2]["reason"].startswith("exact_answer: not one line")
    assert "1 accepted, 2 rejected" in capsys.readouterr().out


def test_one_failed_component_leaves_the_sum_out(tmp_path: Path) -> None:
    bad = f"{sleeps_on_wait.__module__}.sleeps_on_wait"
    (tmp_path / "rewards.yaml").write_text(
        f"answer: {{check: grpo.rewards.exact_answer.exact_answer}}\nbad: {{check: {bad}, limit_seconds: null}}\n"
    )
    path = write(tmp_path, {"id": "r", "gold": "4", "completion": "raise"}, PAIRS[0])
    main(["--config", str(tmp_path / "rewards.yaml"), "--input", str(path), "--output", str(tmp_path / "out.jsonl")])
    failed, fine = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert (failed["value"], failed["parts"]["answer"]["value"], failed["parts"]["bad"]["value"]) == (None, 0.0, None)
    assert fine["value"] == 1.5


def test_a_scorer_sees_the_answer_that_evaluation_reads(tmp_path: Path) -> None:
    row = {"id": "a", "question": "1 + 3 =", "gold": "4", "metadata": {"task": "chain_sum"}}
    rows = [row | {"completion": text} for text in ("4.", "It is\n4", "5")]
    one, none, other = graded(tmp_path, *rows, scorer="reasoning_gym_score", limit_seconds=None)
    assert (one["value"], none["value"], none["reason"]) == (1.0, 0.0, "no answer")
    assert other["value"] < 1
    again = graded(tmp_path, *rows, scorer="grpo.scorers.reasoning_gym_score", limit_seconds=None)
    assert again == [one, none, other]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"id": "a", "gold": "4"}, "field 'completion' is missing"),
        ({"id": "a", "gold": "4", "completion": 4}, "field 'completion' is 4"),
        ({"id": "a", "completion": "4"}, "field 'gold' is missing: give the right answer"),
        ({"gold": "4", "completion": "4"}, "field 'id' is missing: add it as a string"),
        ({"id": 1, "gold": "4", "completion": "4"}, "field 'id' is 1: make it a string"),
        ({"id": "a", "gold": 4, "completion": "4"}, "field 'gold' is 4: make it a string"),
        ({"id": "a", "gold": " ", "completion": "4"}, "field 'gold' is ' ': give it some text"),
        ({"id": "a", "gold": "4", "answer": "4", "completion": "4"}, "'gold' and 'answer' both stand there"),
        ({"id": "a", "answer": "4", "completion": "4"}, "field 'question' is missing"),
        ({"id": "a", "gold": "4", "completion": "4", "metadata": 1}, "field 'metadata' is 1"),
        ("{", "not JSON"),
        ("", "the line is blank"),
    ],
)
def test_a_bad_line_is_named_and_nothing_written(tmp_path: Path, row: object, words: str) -> None:
    (tmp_path / "verdicts.jsonl").write_text("before")
    with pytest.raises(ProblemFileError) as caught:
        graded(tmp_path, PAIRS[0], row)
    assert str(caught.value).startswith(f"{tmp_path / 'pairs.jsonl'}:2: ")
    assert words in str(caught.value)
    assert (tmp_path / "verdicts.jsonl").read_text() == "before"


@pytest.mark.parametrize(
    ("named", "words"),
    [
        (
            {"reward": "exact_anwser"},
            r"reward is 'exact_anwser'.*choose one of answer_format, .*exact_answer.*math_answer",
        ),
        ({"reward": "grpo.rewards.nothing.here"}, "reward is 'grpo.rewards.nothing.here'"),
        ({"reward": "grpo.rewards.judging._CHECKS"}, "which is no function"),
        ({"reward": "coin_flip"}, "a class that needs arguments.*give --config"),
        ({"scorer": "nothing"}, "scorer is 'nothing'.*choose one of code_passes_tests, .*reasoning_gym_score"),
        ({"scorer": "grpo.scorers.nothing"}, "scorer is 'grpo.scorers.nothing'"),
        ({"reward": "exact_answer", "scorer": "reasoning_gym_score"}, "reward and scorer given: give exactly one"),
        ({"reward": "exact_answer", "limit_seconds": -1.0}, "limit_seconds is -1.0"),
        ({"reward": "exact_answer", "workers": 0}, "workers is 0"),
        ({"reward": "exact_answer", "max_failure_share": 2.0}, "max_failure_share is 2.0"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, named: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        graded(tmp_path, PAIRS[0], **named)
    assert not (tmp_path / "verdicts.jsonl").exists()


@pytest.mark.parametrize(
    "kind", ["pipe", "folder", "link to a pipe", "input", "link", "hard link", "under a file", "."]
)
def test_an_output_that_is_no_place_for_a_file_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pairs, output = write(tmp_path, *PAIRS), tmp_path / "out"
    before = pairs.read_bytes()
    if kind == "pipe":
        os.mkfifo(output)
    elif kind == "folder":
        output.mkdir()
    elif kind == "link to a pipe":
        os.mkfifo(tmp_path / "pipe")
        output.symlink_to(tmp_path / "pipe")
    elif kind == "link":
        output.symlink_to(pairs)
    elif kind == "hard link":
        output.hardlink_to(pairs)
    output = {"input": pairs, "under a file": pairs / "x", ".": Path()}.get(kind, output)
    mode = output.lstat().st_mode if output.exists() else None

    def works(_: object) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr(command, "load_reward", works)
    with pytest.raises(ValueError, match=r"^output[: ]") as caught:
        score(ScoreSettings(pairs, output, reward="exact_answer"))
    assert "\n" not in str(caught.value)
    assert pairs.read_bytes() == before
    assert (output.lstat().st_mode if output.exists() else None) == mode
    assert not list(tmp_path.glob(".*.partial"))


def test_a_verdict_file_of_before_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "verdicts.jsonl").write_text("before")
    assert len(graded(tmp_path, *PAIRS)) == 3


@pytest.mark.parametrize("reward", ["os.system", "builtins.print", "numpy.sin"])
def test_where_nothing_is_scored_that_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str], reward: str) -> None:
    [verdict] = graded(tmp_path, PAIRS[0], reward=reward, limit_seconds=None)
    assert verdict["scored"] is False
    assert "1 completions: nothing was scored; the first one: TypeError: " in capfd.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--config", "no_such_file.yaml"], "no_such_file.yaml"),
        (["--reward", "exact_answer", "--limit_seconds", "nan"], "limit_seconds"),
        (["--reward", "exact_answer", "--limit_seconds", "inf"], "limit_seconds"),
        (["--reward", "exact_answer", "--limit_seconds", "x"], "limit_seconds"),
        (["--reward", "exact_answer", "--max_failure_share", "nan"], "max_failure_share"),
        (["--reward", "exact_answer", "--nothing", "1"], "nothing"),
    ],
)
def test_bad_arguments_are_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        main(["--input", str(write(tmp_path, *PAIRS)), "--output", str(tmp_path / "out.jsonl"), *more])
    assert "\n" not in str(caught.value)
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_reading_finds_what_a_scorer_sees(tmp_path: Path) -> None:
    rows = [{"id": text, "gold": "4", "completion": text} for text in ("4", "So:\n#### 4")]
    named: dict[str, Any] = {"scorer": "number_or_text", "limit_seconds": None}
    assert [each["value"] for each in graded(tmp_path, *rows, **named)] == [1.0, 0.0]
    assert [each["value"] for each in graded(tmp_path, *rows, reading="last_hash_line", **named)] == [0.0, 1.0]
    with pytest.raises(ValueError, match=r"reading is 'nothing'.*choose one of strict_answer"):
        graded(tmp_path, *rows, reading="nothing", **named)
    with pytest.raises(ScoreError, match="reading is given without a scorer"):
        graded(tmp_path, *rows, reading="last_boxed", reward="exact_answer")


@pytest.mark.parametrize("name", ["code_passes_tests", "grpo.code_scorer.code_passes_tests"])
def test_a_program_is_found_in_its_fence(tmp_path: Path, name: str) -> None:
    try:
        require("bubblewrap")
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    row = {"id": "a", "gold": "-", "metadata": {"tests": ["assert f(2) == 4"]}}
    program = "def f(n):\n    return 2 * n\n"
    rows = [row | {"completion": text} for text in (f"So:\n```python\n{program}```\n", program, "4")]
    assert [each["value"] for each in graded(tmp_path, *rows, scorer=name)] == [1.0, 1.0, 0.0]
    strictly = graded(tmp_path, *rows, scorer=name, reading="strict_answer")
    assert [each["reason"] for each in strictly[:2]] == ["no answer"] * 2


def test_a_module_is_found_by_its_function_or_its_class() -> None:
    from grpo.rewards.code_tests import CodeTests
    from grpo.rewards.math_answer import math_answer

    assert load_reward("math_answer") is math_answer
    assert {"code_tests", "coin_flip", "exact_answer", "math_answer"} <= set(reward_names())
    assert not {"judging", "self_check", "math_text", "sandbox"} & set(reward_names())
    try:
        assert isinstance(load_reward("code_tests"), CodeTests)
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def test_nothing_to_grade_with_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScoreError, match="nothing given: give exactly one of --reward, --scorer and --config"):
        score(ScoreSettings(write(tmp_path, PAIRS[0]), tmp_path / "verdicts.jsonl"))


def test_the_command_runs_by_the_short_name_of_a_reward_on_packed_input(tmp_path: Path) -> None:
    packed = tmp_path / "pairs.jsonl.gz"
    packed.write_bytes(gzip.compress(write(tmp_path, *PAIRS).read_bytes()))
    arguments = ["--reward", "exact_answer", "--input", str(packed), "--output", str(tmp_path / "out.jsonl")]
    environment = os.environ | {"PYTHONPATH": str(Path(command.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "grpo", "score", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "3 completions: 1 accepted, 2 rejected, 0 unscored" in done.stdout
    wrong = [*arguments[:1], "none", *arguments[2:]]
    done = subprocess.run(
        [sys.executable, "-m", "grpo", "score", *wrong], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.startswith("grpo score: reward is 'none'")


def test_mathematics_is_judged_as_collected_cases_say(tmp_path: Path) -> None:
    path = cases_file("cases/math_pairs.jsonl")
    score(ScoreSettings(path, tmp_path / "out.jsonl", reward="math_answer"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    verdicts = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [each["id"] for each in verdicts] == [each["id"] for each in rows]
    settled = Counter(
        (row["verdict"] == "accept") == (verdict["value"] == 1)
        for row, verdict in zip(rows, verdicts, strict=True)
        if row["settled"]
    )
    assert settled[True] > 9 * settled[False]
