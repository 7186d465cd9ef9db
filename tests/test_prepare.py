import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo import prepare as stage
from grpo.prepare import PrepareError, PrepareSettings, Row, data_sha256, main, prepare, split_of, wrong_answers
from grpo.problem_files import question_key, read_problems, write_problems
from grpo.records import Problem, Score
from grpo.rewards import RewardComponent
from grpo.rewards.answer_format import answer_format
from grpo.rewards.exact_answer import exact_answer

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
    assert summary["data_sha256"] == data_sha256([tmp_path / "problems.jsonl", tmp_path / "worked.jsonl"])


def test_the_data_hash_follows_the_content_and_not_the_place(tmp_path: Path) -> None:
    settings(tmp_path)
    shutil.copytree(tmp_path, tmp_path / "copy")
    first, second = [tmp_path / "problems.jsonl"], [tmp_path / "copy" / "problems.jsonl"]
    assert data_sha256(first) == data_sha256(second)
    second[0].write_text(second[0].read_text() + " ")
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
    with pytest.raises(PrepareError, match=words) as caught:
        prepare(given_settings)
    assert not given_settings.output.parent.exists()
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
    leak, duplicate = stage.repeated_questions(rows)
    assert "f:2: the question of f:1 again (a leak between train and heldout)" in leak
    assert "f:3: the question of f:1 again (within train)" in duplicate


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
        return Score(1.0 / len(completion) if completion == problem.answer else 1 / len(completion))

    message = fails(replace(settings(tmp_path), rewards={"broken": RewardComponent(broken)}), "misjudge")
    assert "the empty answer '' must not get full marks; it gets broken: ZeroDivisionError" in message


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


def test_the_wrong_answer_is_another_of_the_slice_and_no_other_spelling() -> None:
    problems = [
        problem(1, answer="5"),
        problem(2, answer="5.0"),
        problem(3, answer="6"),
        problem(4, answer="yes", slice="words"),
    ]
    wrong = wrong_answers(problems)
    assert wrong[:2] == ["6", "6"]
    assert wrong[2] in ("5", "5.0")
    assert wrong[3] in ("5", "5.0", "6")  # the only answer of its slice
    assert wrong_answers(problems) == wrong
    with pytest.raises(PrepareError, match="every problem has the answer '5'"):
        wrong_answers(problems[:1])


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

    monkeypatch.setattr(stage, "write_whole", full_disk)
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
    main(["--config", str(CONFIGS / "prepare.yaml")])
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
