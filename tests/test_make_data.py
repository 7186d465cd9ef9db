import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from grpo.make_data import MakeDataError, MakeDataSettings, SliceRecipe, main, make_data
from grpo.make_data import __file__ as make_data_file
from grpo.problem_files import normalised, read_problems

CONFIG = Path(__file__).parents[1] / "configs" / "data.yaml"


def sums(digits: int, size: int, **more: object) -> SliceRecipe:
    config = {"min_terms": 2, "max_terms": 2, "min_digits": digits, "max_digits": digits, **more}
    return SliceRecipe("chain_sum", size, config=config)


def settings(output: Path) -> MakeDataSettings:
    return MakeDataSettings(
        version="0.1.25",
        seed=1,
        slices={"small": sums(1, 30), "large": replace(sums(2, 20), role="heldout_only")},
        worked_examples={"small": sums(1, 40)},
        output=output,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_shipped_config_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    main(["--config", str(CONFIG), "--output", str(tmp_path / "here")])
    code = f"from grpo.make_data import main; main(['--config', {str(CONFIG)!r}, '--output', 'there'])"
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(make_data_file).parents[1])}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    assert contents(tmp_path / "here") == contents(tmp_path / "there")
    assert list(contents(tmp_path / "here")) == ["problems.jsonl", "source.json", "worked_examples.jsonl"]


def test_no_question_stands_twice_within_or_across_the_files(tmp_path: Path) -> None:
    make_data(settings(tmp_path))
    problems, examples = read_problems(tmp_path / "problems.jsonl"), read_problems(tmp_path / "worked_examples.jsonl")
    assert [len(problems), len(examples)] == [50, 40]
    assert len({normalised(problem.question) for problem in problems + examples}) == 90


def test_two_slices_of_one_task_share_no_question(tmp_path: Path) -> None:
    same = {"one": sums(1, 60), "two": sums(1, 60)}
    make_data(replace(settings(tmp_path), slices=same, worked_examples={"three": sums(2, 1)}))
    assert len({normalised(problem.question) for problem in read_problems(tmp_path / "problems.jsonl")}) == 120


def test_each_problem_carries_where_it_comes_from(tmp_path: Path) -> None:
    make_data(settings(tmp_path))
    for problem in read_problems(tmp_path / "problems.jsonl"):
        assert problem.id.startswith(f"{problem.slice}-")
        assert len(problem.id) == len(problem.slice) + 13
        assert problem.metadata["task"] == "chain_sum"
        assert problem.metadata["role"] == ("train" if problem.slice == "small" else "heldout_only")
        assert str(eval(problem.metadata["entry"]["expression"])) == problem.answer
    source = json.loads((tmp_path / "source.json").read_text())
    assert (source["version"], source["seed"], list(source["slices"])) == ("0.1.25", 1, ["large", "small"])
    assert source["slices"]["large"] == {
        "task": "chain_sum",
        "size": 20,
        "role": "heldout_only",
        "config": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
        "keep": "",
    }


def test_only_questions_to_keep_are_drawn_to_the_last_one(tmp_path: Path) -> None:
    additions = replace(sums(1, 100), keep=r"\d \+ \d")
    only = replace(settings(tmp_path), slices={"sums": additions}, worked_examples={"large": sums(2, 1)})
    make_data(only)
    expressions = {each.metadata["entry"]["expression"] for each in read_problems(tmp_path / "problems.jsonl")}
    assert expressions == {f"{left} + {right}" for left in range(10) for right in range(10)}
    with pytest.raises(MakeDataError, match="only 100 different problems"):
        make_data(replace(only, slices={"sums": replace(additions, size=101)}))


def test_a_larger_slice_holds_the_smaller_one_and_leaves_the_others(tmp_path: Path) -> None:
    small = settings(tmp_path / "small")
    make_data(small)
    make_data(replace(small, slices={**small.slices, "large": sums(2, 400)}, output=tmp_path / "large"))
    before = {problem.id for problem in read_problems(tmp_path / "small" / "problems.jsonl")}
    after = {problem.id for problem in read_problems(tmp_path / "large" / "problems.jsonl")}
    assert before < after
    assert len(after) == 430


def test_another_seed_draws_other_problems(tmp_path: Path) -> None:
    one = settings(tmp_path / "one")
    make_data(one)
    make_data(replace(one, seed=2, output=tmp_path / "two"))
    assert contents(tmp_path / "one")["problems.jsonl"] != contents(tmp_path / "two")["problems.jsonl"]


def test_a_space_that_is_too_small_is_used_up_and_then_an_error(tmp_path: Path) -> None:
    # Sums and differences of two digits: 10 * 10 * 2.
    whole = replace(settings(tmp_path), slices={"small": sums(1, 200)}, worked_examples={"large": sums(2, 1)})
    make_data(whole)
    assert len(read_problems(tmp_path / "problems.jsonl")) == 200
    before = contents(tmp_path)
    with pytest.raises(MakeDataError, match=r"slice 'small': only 200 different problems.*size is 201"):
        make_data(replace(whole, slices={"small": sums(1, 201)}))
    assert contents(tmp_path) == before


def test_another_version_of_the_library_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(MakeDataError, match=r"version is 0\.1\.24, but reasoning-gym here is 0\.1\.25"):
        make_data(replace(settings(tmp_path / "new"), version="0.1.24"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (SliceRecipe("no_such_task", 3), "refuses task 'no_such_task'"),
        (SliceRecipe("chain_sum", 3, config={"min_turms": 2}), "refuses task 'chain_sum'.*min_turms"),
        (SliceRecipe("chain_sum", 3, config={"min_terms": 9, "max_terms": 2}), "refuses task 'chain_sum'"),
        (SliceRecipe("chain_sum", 0), r"slices\.x\.size is 0"),
        (SliceRecipe("chain_sum", 3, keep="("), r"slices\.x\.keep is '\('"),
        (SliceRecipe("chain_sum", 3, config={"seed": 2}), r"slices\.x\.config\.seed"),
    ],
)
def test_a_bad_recipe_is_named(tmp_path: Path, recipe: SliceRecipe, words: str) -> None:
    with pytest.raises(MakeDataError, match=words):
        make_data(replace(settings(tmp_path / "new"), slices={"x": recipe}))
    assert not (tmp_path / "new").exists()


def test_worked_examples_are_for_training_only(tmp_path: Path) -> None:
    with pytest.raises(MakeDataError, match=r"worked_examples\.w\.role is 'heldout_only'"):
        make_data(replace(settings(tmp_path), worked_examples={"w": replace(sums(1, 1), role="heldout_only")}))


def test_an_unknown_key_in_the_config_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "data.yaml"
    recipe = "{s: {task: chain_sum, size: 1, sise: 2}}"
    config.write_text(f"version: 0.1.25\nseed: 1\nslices: {recipe}\nworked_examples: {recipe}\noutput: {tmp_path}\n")
    with pytest.raises(SystemExit) as ended:
        main(["--config", str(config)])
    assert ended.value.code == 2
    assert "sise" in capsys.readouterr().err
