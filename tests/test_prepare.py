import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cases_folder import cases_file
from hypothesis import given
from hypothesis import strategies as st

from grpo.prepare import PrepareError, PrepareSettings, main, prepare
from grpo.problem_files import ProblemFileError, question_key, read_problems, write_problems
from grpo.problem_sources import GSM8K, PlainProblems, ProblemSource, prepared_files
from grpo.problem_sources.prepared_files import Loaded, data_sha256
from grpo.problem_sources.splits import Row, repeated_questions, split_of
from grpo.records import Problem, Score
from grpo.rewards import RewardComponent
from grpo.rewards.answer_format import answer_format
from grpo.rewards.exact_answer import exact_answer
from grpo.rewards.sandbox import SandboxUnavailable
from grpo.scorers import ScorerError

CONFIGS = Path(__file__).parents[1] / "configs"
BOTH = {"answer": RewardComponent(exact_answer, 1.0), "form": RewardComponent(answer_format, 0.1)}


def problem(number: int, **more: object) -> Problem:
    fields = {"id": f"p{number:03}", "question": f"What is {number} + 1?", "answer": str(number + 1), "slice": "sums"}
    return Problem(**(fields | more))  # type: ignore[arg-type]


PROBLEMS = [
    *(problem(number) for number in range(60)),
    *(problem(number, slice="far", metadata={"role": "heldout_only"}) for number in range(60, 70)),
]
EXAMPLES = [problem(number) for number in range(100, 105)]


def settings(folder: Path, problems: list[Problem] = PROBLEMS, examples: list[Problem] = EXAMPLES) -> PrepareSettings:
    write_problems(folder / "problems.jsonl", problems)
    write_problems(folder / "worked.jsonl", examples)
    return PrepareSettings(
        problems=folder / "problems.jsonl",
        rewards=BOTH,
        seed=3,
        worked_examples=folder / "worked.jsonl",
        output=folder / "build" / "problems",
    )


def read_splits(output: Path) -> dict[str, list[Problem]]:
    return {split: read_problems(output / f"{split}.jsonl") for split in ("train", "validation", "heldout")}


def test_every_problem_goes_to_one_split_unchanged(tmp_path: Path) -> None:
    prepare(settings(tmp_path))
    splits = read_splits(tmp_path / "build" / "problems")
    assert sorted((each for split in splits.values() for each in split), key=lambda each: each.id) == PROBLEMS
    assert all(splits.values())
    assert {each.id for each in PROBLEMS[60:]} <= {each.id for each in splits["heldout"]}


def test_the_summary_counts_the_splits_and_names_data_and_settings(tmp_path: Path) -> None:
    given_settings = settings(tmp_path)
    prepare(given_settings)
    summary = json.loads((tmp_path / "build" / "problems" / "summary.json").read_text())
    splits = read_splits(tmp_path / "build" / "problems")
    for split, problems in splits.items():
        assert summary["counts"][split]["problems"] == len(problems)
        for name, count in summary["counts"][split]["slices"].items():
            assert count == sum(each.slice == name for each in problems)
    assert summary["counts"]["heldout"]["slices"]["far"] == 10
    assert summary["worked_examples"] == 5
    assert summary["settings"]["rewards"]["form"] == {
        "check": "grpo.rewards.answer_format.answer_format",
        "weight": 0.1,
    }
    assert (summary["settings"]["seed"], summary["settings"]["heldout"]) == (3, 0.25)
    read = [PlainProblems(tmp_path / "problems.jsonl"), PlainProblems(tmp_path / "worked.jsonl")]
    assert summary["data_sha256"] == data_sha256([Loaded(source, []) for source in read])


def test_the_data_hash_follows_the_content_and_not_the_place(tmp_path: Path) -> None:
    settings(tmp_path)
    shutil.copytree(tmp_path, tmp_path / "copy")
    copy = tmp_path / "copy" / "problems.jsonl"
    first, second = [[Loaded(PlainProblems(path), [])] for path in (tmp_path / "problems.jsonl", copy)]
    assert data_sha256(first) == data_sha256(second)
    copy.write_text(copy.read_text() + " ")
    assert data_sha256(first) != data_sha256(second)


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    output = tmp_path / "build" / "problems"
    prepare(settings(tmp_path))
    first = {path.name: path.read_bytes() for path in output.iterdir()}
    prepare(settings(tmp_path))
    assert {path.name: path.read_bytes() for path in output.iterdir()} == first
    assert sorted(path.name for path in output.parent.iterdir()) == ["problems"]


def test_adding_problems_moves_no_other(tmp_path: Path) -> None:
    prepare(settings(tmp_path / "before", PROBLEMS[:60]))
    prepare(settings(tmp_path / "after", [*PROBLEMS, problem(99)]))
    before, after = (read_splits(tmp_path / name / "build" / "problems") for name in ("before", "after"))
    for split, problems in before.items():
        assert {each.id for each in problems} <= {each.id for each in after[split]}


@given(st.text(min_size=1), st.integers())
def test_another_share_of_validation_leaves_heldout_alone(name: str, seed: int) -> None:
    narrow = split_of(name, "train", seed=seed, validation=0.01, heldout=0.25)
    wide = split_of(name, "train", seed=seed, validation=0.7, heldout=0.25)
    assert (narrow == "heldout") == (wide == "heldout")
    assert split_of(name, "heldout_only", seed=seed, validation=0.7, heldout=0.25) == "heldout"


def test_the_shares_are_kept_and_another_seed_splits_anew() -> None:
    def splits(seed: int) -> list[str]:
        return [split_of(f"p{n}", "train", seed=seed, validation=0.1, heldout=0.25) for n in range(10_000)]

    first, second = splits(1), splits(2)
    # Three standard deviations of a binomial count: 3 * sqrt(10 000 * p * (1 - p)).
    assert abs(first.count("heldout") - 2500) < 130
    assert abs(first.count("validation") - 1000) < 90
    assert sum(one == other for one, other in zip(first, second, strict=True)) < 6000


def fails(given_settings: PrepareSettings, words: str) -> str:
    """The message of the error, which must leave no output behind."""
    with pytest.raises((PrepareError, ProblemFileError), match=words) as caught:
        prepare(given_settings)
    left = [path.name for path in given_settings.output.parent.rglob("*") if path.is_file()]
    # The list of problems whose own answer fails is all that a refusal leaves.
    assert left == (["rejected.jsonl"] if "rejected.jsonl lists" in str(caught.value) else [])
    return str(caught.value)


def test_a_repeated_question_is_named_with_both_places(tmp_path: Path) -> None:
    problems = [*PROBLEMS, problem(200, question="  what IS 7 +\u00a01? "), problem(201, question="What is 61 + 1?")]
    message = fails(settings(tmp_path, problems), "questions that stand twice")
    path = tmp_path / "problems.jsonl"
    assert f"{path}:71: the question of {path}:8 again" in message
    assert f"{path}:72: the question of {path}:62 again" in message


def test_a_leak_is_told_from_a_duplicate() -> None:
    rows = [
        Row(problem(1), "f:1", "train"),
        Row(problem(1, id="b"), "f:2", "heldout"),
        Row(problem(1, id="c"), "f:3", "train"),
    ]
    leak, duplicate = repeated_questions(rows)
    assert (leak.row, leak.reason) == (rows[1], "the question of f:1 again (a leak between train and heldout)")
    assert (duplicate.row, duplicate.reason) == (rows[2], "the question of f:1 again (within train)")


def test_at_most_five_are_listed_and_the_others_counted(tmp_path: Path) -> None:
    problems = [*PROBLEMS, *(problem(number, id=f"q{number:03}") for number in range(7))]
    message = fails(settings(tmp_path, problems), r"questions that stand twice \(7\)")
    assert message.count("problems.jsonl:") == 2 * 5
    assert message.endswith("and 2 more")


def test_a_worked_example_that_is_held_out_is_refused_and_one_in_training_is_not(tmp_path: Path) -> None:
    shares = {"seed": 3, "validation": 0.1, "heldout": 0.25}
    by_split = {split_of(question_key(each.question), "train", **shares): each for each in PROBLEMS[:60]}  # type: ignore[arg-type]
    for split in ("validation", "heldout"):
        twin = replace(by_split[split], id="twin", question=by_split[split].question.upper())
        message = fails(settings(tmp_path / split, examples=[*EXAMPLES, twin]), "worked examples that are held out")
        assert f"worked.jsonl:6: the question of {tmp_path / split / 'problems.jsonl'}:" in message
        assert f"in {split}" in message
    prepare(settings(tmp_path, examples=[*EXAMPLES, replace(by_split["train"], id="twin")]))


def test_questions_of_the_same_words_share_a_split(tmp_path: Path) -> None:
    """`3 + 8` in training and `8 + 3` held out would be the same question twice."""
    mirrored = [
        replace(each, id=f"m{each.id}", question=" ".join(reversed(each.question.split()))) for each in PROBLEMS
    ]
    prepare(
        settings(
            tmp_path, [*PROBLEMS, *(m for m, p in zip(mirrored, PROBLEMS, strict=True) if m.question != p.question)]
        )
    )
    found = read_splits(tmp_path / "build" / "problems")
    keys = {split: {question_key(each.question) for each in rows} for split, rows in found.items()}
    assert all(keys.values())
    assert not keys["train"] & keys["heldout"]
    assert not keys["train"] & keys["validation"]


@pytest.mark.parametrize("where", ["problems", "examples"])
def test_a_gold_answer_without_full_marks_is_refused(tmp_path: Path, where: str) -> None:
    odd = [problem(300, answer="301."), problem(301, answer="two\nlines")]
    problems, examples = (PROBLEMS + odd, EXAMPLES) if where == "problems" else (PROBLEMS, EXAMPLES + odd)
    message = fails(settings(tmp_path, problems, examples), r"rewards that misjudge \(2\)")
    file, line = ("problems.jsonl", 71) if where == "problems" else ("worked.jsonl", 6)
    assert f"{file}:{line}: the gold answer '301.' must get full marks; it gets answer=0, form=0" in message


def test_a_reward_that_any_answer_satisfies_is_refused(tmp_path: Path) -> None:
    only_form = {"form": RewardComponent(answer_format)}
    message = fails(replace(settings(tmp_path), rewards=only_form), r"rewards that misjudge \(75\)")
    assert "the wrong answer" in message
    assert "must not get full marks; it gets form=1" in message


def test_a_component_without_weight_does_not_tell_right_from_wrong(tmp_path: Path) -> None:
    weightless = {"answer": RewardComponent(exact_answer, 0.0), "form": RewardComponent(answer_format)}
    assert "the gold answer" not in fails(replace(settings(tmp_path), rewards=weightless), "the wrong answer")


def test_a_reward_that_pays_for_silence_is_refused(tmp_path: Path) -> None:
    def generous(problem: Problem, completion: str) -> Score:
        return Score(1.0) if not completion else exact_answer(problem, completion)

    message = fails(replace(settings(tmp_path), rewards={"generous": RewardComponent(generous)}), "misjudge")
    assert "the empty answer '' must not get full marks; it gets generous=1" in message
    assert "gold" not in message
    assert "wrong" not in message


def test_a_reward_that_fails_is_named_with_its_reason(tmp_path: Path) -> None:
    def broken(problem: Problem, completion: str) -> Score:
        if problem.id == "p007" and completion == "":
            raise ZeroDivisionError("by zero")
        return exact_answer(problem, completion)

    message = fails(replace(settings(tmp_path), rewards={"broken": RewardComponent(broken)}), r"misjudge \(1\)")
    assert "problems.jsonl:8: the empty answer '' must not get full marks; it gets broken: ZeroDivisionError" in message


def test_a_reward_that_applies_nowhere_gives_no_full_marks(tmp_path: Path) -> None:
    nowhere = RewardComponent(lambda _problem, _completion: Score.not_applicable("never"))
    message = fails(replace(settings(tmp_path), rewards={"nowhere": nowhere}), "no component applies")
    assert "the gold answer" in message
    assert "the wrong answer" not in message
    prepare(replace(settings(tmp_path), rewards={**BOTH, "nowhere": nowhere}))


def test_a_penalty_gives_full_marks_at_zero(tmp_path: Path) -> None:
    clean = RewardComponent(lambda _problem, completion: Score(float(len(completion) > 10)), -0.5)
    prepare(replace(settings(tmp_path), rewards={**BOTH, "long": clean}))
    always = RewardComponent(lambda _problem, _completion: Score(1.0), -0.5)
    fails(replace(settings(tmp_path / "other"), rewards={**BOTH, "always": always}), "the gold answer")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rewards": {}}, "rewards is empty"),
        ({"validation": 0.0}, "validation is 0.0"),
        ({"heldout": float("nan")}, "heldout is nan"),
        ({"validation": 0.5, "heldout": 0.5}, "keep their sum below 1"),
        ({"validation": 1e-9}, "no problem falls into validation"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    given_settings = replace(settings(tmp_path), **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        prepare(given_settings)
    assert not given_settings.output.parent.exists()


def test_an_unknown_role_is_named(tmp_path: Path) -> None:
    problems = [*PROBLEMS, problem(300, metadata={"role": "test"})]
    assert "problems.jsonl:71: metadata.role is 'test'" in fails(settings(tmp_path, problems), "choose train")


def test_an_interrupted_write_leaves_the_old_output_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_settings = settings(tmp_path)
    prepare(given_settings)
    before = {path: path.read_bytes() for path in given_settings.output.parent.rglob("*.json*")}

    def full_disk(_: Path, __: bytes) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(prepared_files, "write_whole", full_disk)
    with pytest.raises(OSError, match="disk full"):
        prepare(replace(given_settings, seed=4))
    assert {path: path.read_bytes() for path in given_settings.output.parent.rglob("*.json*")} == before
    assert list(given_settings.output.parent.iterdir()) == [given_settings.output]


def test_the_shipped_configs_run_and_the_rewards_file_is_found_beside_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(tmp_path / "data")
    monkeypatch.chdir(tmp_path)  # the data paths start here, that of rewards.yaml at the config
    (tmp_path / "data" / "worked.jsonl").rename(tmp_path / "data" / "worked_examples.jsonl")
    main(["--config", str(CONFIGS / "prepare.yaml"), "--scorer", "grpo.scorers.number_or_text"])
    summary = json.loads((tmp_path / "build" / "problems" / "summary.json").read_text())
    assert summary["settings"]["rewards"]["exact_answer"]["check"] == "grpo.rewards.exact_answer.exact_answer"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("check: grpo.rewards.exact_answer.exactly", "exactly"),
        ("wieght: 2", "wieght"),
    ],
)
def test_a_mistake_in_the_rewards_file_ends_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    shutil.copy(CONFIGS / "prepare.yaml", tmp_path)
    check = "" if line.startswith("check") else "  check: grpo.rewards.exact_answer.exact_answer\n"
    (tmp_path / "rewards.yaml").write_text(f"exact_answer:\n{check}  {line}\n")
    with pytest.raises(SystemExit) as ended:
        main(["--config", str(tmp_path / "prepare.yaml")])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow  # as importing Lightning is
def test_lightning_reads_the_same_rewards_file(tmp_path: Path) -> None:
    from lightning.pytorch import LightningModule, cli

    class Module(LightningModule):
        def __init__(self, rewards: dict[str, RewardComponent]) -> None:
            super().__init__()
            self.rewards = rewards

    shutil.copy(CONFIGS / "rewards.yaml", tmp_path)
    (tmp_path / "train.yaml").write_text("model:\n  rewards: rewards.yaml\n")
    parser = cli.LightningArgumentParser()  # what LightningCLI parses with
    parser.add_argument("--config", action="config")
    parser.add_lightning_class_args(Module, "model")
    values = parser.instantiate(parser.parse_args(["--config", str(tmp_path / "train.yaml")]))
    assert values.model.rewards == {
        "exact_answer": RewardComponent(exact_answer, 1.0),
        "answer_format": RewardComponent(answer_format, 0.1),
    }


def gsm(folder: Path, name: str, numbers: range, **more: str) -> Path:
    """A file laid out like GSM8K."""
    rows = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} | more for n in numbers]
    path = folder / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sourced(folder: Path, *sources: ProblemSource | Path, **changes: object) -> PrepareSettings:
    given_settings = PrepareSettings(
        problems=list(sources), rewards={"answer": BOTH["answer"]}, seed=3, output=folder / "build" / "problems"
    )
    return replace(given_settings, **changes)  # type: ignore[arg-type]


def test_given_splits_are_kept_and_only_validation_is_taken_from_train(tmp_path: Path) -> None:
    train = GSM8K(rows=gsm(tmp_path, "train", range(60)), split="train")
    test = GSM8K(rows=gsm(tmp_path, "test", range(60, 80)), split="heldout")
    prepare(sourced(tmp_path, train, test))
    found = {
        split: {int(each.answer) for each in rows} for split, rows in read_splits(tmp_path / "build/problems").items()
    }
    assert found["heldout"] == set(range(61, 81))
    assert found["train"] | found["validation"] == set(range(1, 61))
    assert 0 < len(found["validation"]) < 20
    summary = json.loads((tmp_path / "build/problems/summary.json").read_text())
    assert summary["settings"]["problems"][1]["split"] == "heldout"
    assert summary["settings"]["problems"][0]["class_path"].endswith("GSM8K")


def test_several_sources_mix_with_plain_files_and_all_of_one_may_be_validation(tmp_path: Path) -> None:
    given_settings = settings(tmp_path)
    path = given_settings.problems
    assert isinstance(path, Path)
    more = GSM8K(rows=gsm(tmp_path, "more", range(500, 510)), split="validation")
    prepare(replace(given_settings, problems=[path, more]))
    found = read_splits(given_settings.output)
    assert sum(map(len, found.values())) == len(PROBLEMS) + 10
    assert {f"{n}" for n in range(501, 511)} <= {each.answer for each in found["validation"]}


def test_a_question_in_two_given_splits_is_a_leak_in_any_order_of_its_words(tmp_path: Path) -> None:
    train = GSM8K(rows=gsm(tmp_path, "train", range(60)), split="train")
    twisted = gsm(tmp_path, "test", range(100, 110))
    twisted.write_text(twisted.read_text() + json.dumps({"question": "what 1 + 7 is?", "answer": "#### 8"}) + "\n")
    shuffled = gsm(tmp_path, "train", range(60))
    shuffled.write_text(
        shuffled.read_text().replace("What is 7 + 1?", "what is? 7 + 1").replace("What is 8", "8 what is")
    )
    twisted.write_text(twisted.read_text().replace("what 1 + 7 is?", "is? what 7 + 1"))
    test = GSM8K(rows=twisted, split="heldout")
    message = fails(sourced(tmp_path, train, test), r"questions that stand twice \(1\)")
    assert f"{twisted}:11: the question of {shuffled}:8 again (a leak between" in message
    prepare(sourced(tmp_path, train, test, on_repeated_question="drop"))
    found = read_splits(tmp_path / "build" / "problems")
    assert "8" in {each.answer for each in found["heldout"]}  # what is held out stays whole
    assert "8" not in {each.answer for each in found["train"] + found["validation"]}
    (line,) = (tmp_path / "build/problems/rejected.jsonl").read_text().splitlines()
    assert json.loads(line)["place"] == f"{shuffled}:8"
    assert "a leak between heldout and" in json.loads(line)["reason"]


def test_an_id_that_two_sources_have_is_named(tmp_path: Path) -> None:
    rows = [Problem("p001", "Another question?", "1", "sums"), Problem("q", "And another?", "2", "sums")]
    write_problems(tmp_path / "more.jsonl", rows)
    given_settings = settings(tmp_path)
    path = given_settings.problems
    assert isinstance(path, Path)
    message = fails(replace(given_settings, problems=[path, tmp_path / "more.jsonl"]), "ids that stand twice")
    assert f"more.jsonl:1: field 'id' is 'p001', which {path}:2 has too" in message


def test_a_role_and_a_split_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    rows = gsm(tmp_path, "rows", range(40))
    message = fails(sourced(tmp_path, GSM8K(rows=rows, role="heldout_only", split="train")), "drop one")
    assert "rows.jsonl:1: metadata.role is 'heldout_only', but its source gives it to train" in message


def test_failed_references_are_listed_and_dropped_where_that_is_declared(tmp_path: Path) -> None:
    problems = [*PROBLEMS, problem(300, answer="301."), problem(301, answer="302")]
    given_settings = replace(settings(tmp_path, problems), on_failed_reference="drop")
    prepare(given_settings)
    output = given_settings.output
    (line,) = (output / "rejected.jsonl").read_text().splitlines()
    rejected = json.loads(line)
    assert (rejected["id"], rejected["place"]) == ("p300", f"{tmp_path / 'problems.jsonl'}:71")
    assert rejected["reason"] == "the gold answer '301.' must get full marks; it gets answer=0, form=0"
    assert rejected["problem"]["answer"] == "301."
    kept = {each.id for rows in read_splits(output).values() for each in rows}
    assert kept == {each.id for each in problems} - {"p300"}
    assert json.loads((output / "summary.json").read_text())["rejected"] == 1
    prepare(settings(tmp_path))  # a later run without any leaves no stale list
    assert not (output / "rejected.jsonl").exists()


def test_a_refusal_lists_every_failed_reference(tmp_path: Path) -> None:
    problems = [*PROBLEMS, *(problem(n, answer=f"{n + 1}.") for n in range(300, 307))]
    message = fails(settings(tmp_path, problems), "rejected.jsonl lists")
    assert message.count("must get full marks") == 5
    assert len((tmp_path / "build/problems/rejected.jsonl").read_text().splitlines()) == 7


def test_too_many_failed_references_are_refused_all_the_same(tmp_path: Path) -> None:
    problems = [*PROBLEMS, problem(300, answer="301."), problem(301, answer="302.")]
    given_settings = replace(settings(tmp_path, problems), on_failed_reference="drop")
    assert "2 of 72 problems would be dropped" in fails(given_settings, "max_rejected_share = 0.02")


def test_a_reward_that_pays_for_silence_is_no_fault_of_a_row_to_drop(tmp_path: Path) -> None:
    generous = RewardComponent(
        lambda row, text: Score(float(row.id == "p300" and not text)) if row.id == "p300" else exact_answer(row, text)
    )
    problems = [*PROBLEMS, problem(300)]
    given_settings = replace(settings(tmp_path, problems), on_failed_reference="drop", rewards={"generous": generous})
    assert "the empty answer" in fails(given_settings, r"misjudge \(1\)")


def test_solutions_are_graded_where_that_is_declared(tmp_path: Path) -> None:
    rows = gsm(tmp_path, "rows", range(60))
    prepare(sourced(tmp_path, GSM8K(rows=rows)))
    message = fails(sourced(tmp_path / "other", GSM8K(rows=rows), grade_solutions=True), r"misjudge \(60\)")
    assert "the solution answer 'It is 1.\\n#### 1' must get full marks" in message


def test_an_answer_may_be_written_into_a_form(tmp_path: Path) -> None:
    boxed = RewardComponent(lambda row, text: Score(float(text == f"[{row.answer}]")))
    given_settings = replace(settings(tmp_path), rewards={"boxed": boxed})
    assert "the gold answer" in fails(given_settings, "misjudge")
    prepare(replace(given_settings, answer_template="[{answer}]"))


def hangs(row: Problem, text: str) -> Score:
    time.sleep(60)
    return exact_answer(row, text)


def test_a_reward_that_hangs_cannot_hang_the_stage(tmp_path: Path) -> None:
    slow = {"slow": RewardComponent(hangs, limit_seconds=0.2)}
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"fail on 8 of 8 problems.*no verdict within limit_seconds = 0.2"):
        prepare(replace(settings(tmp_path), rewards=slow, on_failed_reference="drop"))
    assert time.monotonic() - started < 40


def test_gsm8k_as_published_passes_with_its_own_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer and every worked solution gets full marks, no other problem's answer does, nothing leaks."""
    (tmp_path / "data").mkdir()
    for name in ("gsm8k_train", "gsm8k_test"):
        shutil.copy(cases_file(f"data/{name}.jsonl.gz"), tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    main(["--config", str(CONFIGS / "prepare.yaml"), "--config", str(CONFIGS / "examples" / "gsm8k.yaml")])
    found = read_splits(tmp_path / "build" / "problems")
    assert len(found["heldout"]) == 1319
    assert len(found["train"]) + len(found["validation"]) == 7473
    assert 0.03 < len(found["validation"]) / 7473 < 0.07


def test_a_mistake_in_a_source_is_told_with_its_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(CONFIGS / "prepare.yaml", tmp_path)
    shutil.copy(CONFIGS / "rewards.yaml", tmp_path)
    source = "problems:\n  class_path: grpo.problem_sources.GSM8K\n  init_args: {rows: a.jsonl, spilt: heldout}\n"
    (tmp_path / "more.yaml").write_text(source)
    with pytest.raises(SystemExit):
        main(["--config", str(tmp_path / "prepare.yaml"), "--config", str(tmp_path / "more.yaml")])
    assert "spilt" in capsys.readouterr().err


@pytest.mark.slow  # 500 programs, each in a sandbox
def test_humaneval_as_published_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each published solution passes its tests, and neither silence nor another problem's solution does."""
    (tmp_path / "data").mkdir()
    shutil.copy(cases_file("data/humaneval.jsonl.gz"), tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    try:
        main(["--config", str(CONFIGS / "prepare.yaml"), "--config", str(CONFIGS / "examples" / "humaneval.yaml")])
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    found = read_splits(tmp_path / "build" / "problems")
    assert sum(map(len, found.values())) == 164


def test_a_scorer_that_does_not_fit_is_found_before_anything_is_trained(tmp_path: Path) -> None:
    made = replace(settings(tmp_path), scorer="grpo.scorers.reasoning_gym_score")
    with pytest.raises(ScorerError, match=r"does not fit these problems: .* names no Reasoning Gym task"):
        prepare(made)
    assert not made.output.exists()
    prepare(replace(made, scorer="grpo.scorers.number_or_text"))
    assert made.output.exists()
