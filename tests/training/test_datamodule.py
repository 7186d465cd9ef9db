from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures_policy import policy_folder, problem_folder, problems

from grpo.problem_files import write_problems
from grpo.records import Problem
from grpo.rollouts.prompts import PromptTemplate
from grpo.training.prompt_group_datamodule import (
    PromptGroupDataModule,
    ResumableRoundLoader,
    RoundOfGroups,
    problem_order,
)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return {"policy": policy_folder(tmp_path / "policy"), "problems": problem_folder(tmp_path / "problems", 5, 3)}


def datamodule(folders: dict[str, Path], rank: int = 0, processes: int = 1, **settings: Any) -> PromptGroupDataModule:
    data = PromptGroupDataModule(**folders, **{"rounds": 5, "groups_per_round": 2} | settings)
    data.trainer = SimpleNamespace(global_rank=rank, world_size=processes)  # type: ignore[assignment]
    data.setup("fit")
    return data


def names(rounds: list[RoundOfGroups]) -> list[list[tuple[str, int]]]:
    return [[(group.problem.id, group.occurrence) for group in round_.groups] for round_ in rounds]


def test_every_problem_is_seen_once_before_any_is_seen_again(folders: dict[str, Path]) -> None:
    seen = [visit for round_ in names(datamodule(folders).train_rounds) for visit in round_]
    assert len(seen) == 10
    assert Counter(occurrence for _, occurrence in seen) == {0: 5, 1: 5}
    assert [occurrence for _, occurrence in seen] == [0] * 5 + [1] * 5
    assert {name for name, _ in seen[:5]} == {name for name, _ in seen[5:]}
    assert [name for name, _ in seen[:5]] != [name for name, _ in seen[5:]]


def test_rounds_are_numbered_and_full(folders: dict[str, Path]) -> None:
    rounds = list(datamodule(folders, rounds=4, groups_per_round=3).train_dataloader())
    assert [round_.round for round_ in rounds] == [0, 1, 2, 3]
    assert [len(round_.groups) for round_ in rounds] == [3] * 4


def test_the_order_follows_the_seed_alone(folders: dict[str, Path]) -> None:
    assert names(datamodule(folders).train_rounds) == names(datamodule(folders).train_rounds)
    assert names(datamodule(folders, seed=2).train_rounds) != names(datamodule(folders).train_rounds)
    some = problems(9)
    assert problem_order(some[::-1], 1, 0) == problem_order(some, 1, 0)
    # a problem more moves no other
    assert [p for p in problem_order(problems(10), 1, 0) if p.id != "p09"] == problem_order(some, 1, 0)


def test_processes_share_whole_groups_without_overlap(folders: dict[str, Path]) -> None:
    whole = names(datamodule(folders, groups_per_round=4).train_rounds)
    parts = [names(datamodule(folders, rank, 2, groups_per_round=4).train_rounds) for rank in range(2)]
    for i, round_ in enumerate(whole):
        assert round_ == [visit for pair in zip(parts[0][i], parts[1][i], strict=True) for visit in pair]
    validation = [
        [g.problem.id for g in next(iter(datamodule(folders, r, 2).val_dataloader())).groups] for r in range(2)
    ]
    assert sorted(validation[0] + validation[1]) == ["v00", "v01", "v02"]


@pytest.mark.parametrize(("groups", "remedy"), [(7, "make it 6 or 9, or set"), (2, "make it 3, or set")])
def test_groups_that_cannot_be_shared_evenly_are_an_error(folders: dict[str, Path], groups: int, remedy: str) -> None:
    with pytest.raises(ValueError, match=rf"data\.groups_per_round is {groups}, .* 3 processes .*: {remedy}"):
        datamodule(folders, 0, 3, groups_per_round=groups)


def test_an_error_says_how_fewer_groups_than_processes_can_be_shared(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"or set model\.round\.split_groups to true, and they share"):
        datamodule(folders, 0, 2, groups_per_round=1)


@pytest.mark.parametrize(("groups", "size", "processes"), [(2, 8, 2), (2, 8, 3), (1, 2, 4), (3, 6, 4), (1, 4, 1)])
def test_processes_that_split_groups_share_every_completion_once(
    folders: dict[str, Path], groups: int, size: int, processes: int
) -> None:
    options: dict[str, Any] = {"groups_per_round": groups, "group_size": size}
    parts = [datamodule(folders, r, processes, split_groups=True, **options).train_rounds for r in range(processes)]
    for i, whole in enumerate(datamodule(folders, **options).train_rounds):
        counts = []
        for part in parts:
            assert part[i].groups == whole.groups
            assert part[i].split
            assert not whole.split
            counts.append(sum(map(len, part[i].members or ())))
        assert sum(counts) == groups * size
        assert max(counts) - min(counts) <= 1
        for place in range(groups):
            assert sorted(m for part in parts for m in (part[i].members or ())[place]) == list(range(size))


def test_processes_that_split_groups_share_their_variants(folders: dict[str, Path]) -> None:
    options: dict[str, Any] = {"groups_per_round": 2, "group_size": 12, "split_groups": True}
    parts = [over_variants(folders, rank, 3, **options).train_rounds[0] for rank in range(3)]
    for part in parts:
        assert part.variants == 3
        assert sum(map(len, part.members or ())) == 8
    for place in range(6):
        assert sorted(m for part in parts for m in (part.members or ())[place]) == [0, 1, 2, 3]
    [second] = [part.only([1]) for part in parts[:1]]
    assert second.groups == parts[0].groups[3:]
    assert second.members == (parts[0].members or ())[3:]


def test_groups_of_no_known_size_cannot_be_split(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"data\.split_groups is true, but data\.group_size is not given"):
        datamodule(folders, split_groups=True)


def test_a_validation_is_shared_in_whole_groups_where_others_are_split(folders: dict[str, Path]) -> None:
    rounds = [next(iter(datamodule(folders, r, 2, split_groups=True, group_size=4).val_dataloader())) for r in (0, 1)]
    assert [len(round_.groups) for round_ in rounds] == [2, 1]
    assert not any(round_.split for round_ in rounds)


def test_the_loader_goes_on_where_its_state_says(folders: dict[str, Path]) -> None:
    rounds = datamodule(folders).train_rounds
    loader = ResumableRoundLoader(rounds)
    iterator = iter(loader)
    assert [next(iterator).round for _ in range(2)] == [0, 1]
    resumed = ResumableRoundLoader(rounds)
    resumed.load_state_dict(loader.state_dict())
    assert [round_.round for round_ in resumed] == [2, 3, 4]
    assert len(resumed) == 5


def test_validation_takes_the_first_problems_of_a_fixed_order_at_every_pass(folders: dict[str, Path]) -> None:
    loader = datamodule(folders, validation_problems=2).val_dataloader()
    [first], [second] = list(loader), list(loader)
    assert first.groups == second.groups
    assert len(first.groups) == 2
    [more] = datamodule(folders, validation_problems=3).val_dataloader()
    assert more.groups[:2] == first.groups
    assert list(datamodule(folders, validation_problems=0).val_dataloader()) == []


def test_a_prompt_past_the_limit_is_an_error_and_is_never_cut(folders: dict[str, Path]) -> None:
    write_problems(folders["problems"] / "train.jsonl", problems(20))  # "361 + 19 =" has 10 characters
    with pytest.raises(
        ValueError, match=r"10 prompts are longer than data\.max_prompt_tokens = 8, .*a prompt is never cut"
    ):
        datamodule(folders, rounds=10, max_prompt_tokens=8)
    groups = [
        group for round_ in datamodule(folders, rounds=10, max_prompt_tokens=10).train_rounds for group in round_.groups
    ]
    assert {len(group.prompt_tokens) for group in groups} == {7, 8, 10}
    assert all(len(group.prompt_tokens) == len(group.prompt_text) for group in groups)


def test_completions_that_the_model_has_no_places_for_are_refused(folders: dict[str, Path]) -> None:
    """The test's policy has 128 places; the longest prompt, "16 + 4 =", has 8 tokens."""
    datamodule(folders, max_new_tokens=120)
    for tokens in (121, 10**11):
        message = rf"max_new_tokens is {tokens}, and the longest prompt \(p04\) has 8 tokens, .* 128 .* at most 120"
        with pytest.raises(ValueError, match=message):
            datamodule(folders, max_new_tokens=tokens)


@pytest.mark.parametrize("name", ["rounds", "groups_per_round"])
def test_sizes_below_one_are_refused(folders: dict[str, Path], name: str) -> None:
    with pytest.raises(ValueError, match=rf"data\.{name} is 0: it must be at least 1"):
        PromptGroupDataModule(**folders, **{"rounds": 1, "groups_per_round": 1, name: 0})


def test_fewer_than_no_validation_problems_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"data\.validation_problems is -1"):
        PromptGroupDataModule(**folders, rounds=1, groups_per_round=1, validation_problems=-1)


# Variants of a prompt

ASKED, TOLD = PromptTemplate("asked", "Q: {question}"), PromptTemplate("told", "Work out {question}")


def over_variants(
    folders: dict[str, Path], rank: int = 0, processes: int = 1, **settings: Any
) -> PromptGroupDataModule:
    options = {"prompt_variants": [ASKED, TOLD], "group_unit": "problem_over_variants", "group_size": 6} | settings
    return datamodule(folders, rank, processes, **options)


def prompts(round_: RoundOfGroups) -> list[tuple[str, str]]:
    return [(group.problem.id, group.template_id) for group in round_.groups]


def test_the_variants_of_a_problem_stand_side_by_side_in_their_own_order(folders: dict[str, Path]) -> None:
    plain, varied = datamodule(folders), over_variants(folders)
    for one, many in zip(plain.train_rounds, varied.train_rounds, strict=True):
        assert many.variants == 3
        assert one.variants == 1
        # the same problems in the same order as without variants
        expected = [(g.problem.id, name) for g in one.groups for name in ("bare", "asked", "told")]
        assert prompts(many) == expected
        for place, group in enumerate(one.groups):
            bare, asked, told = many.of_group(place)
            assert bare == group
            assert asked.prompt_text == f"Q: {group.prompt_text}"
            assert told.prompt_text == f"Work out {group.prompt_text}"
            assert {prompt.occurrence for prompt in (bare, asked, told)} == {group.occurrence}


def test_processes_share_groups_over_variants_whole(folders: dict[str, Path]) -> None:
    whole = over_variants(folders, groups_per_round=4).train_rounds
    parts = [over_variants(folders, rank, 2, groups_per_round=4).train_rounds for rank in range(2)]
    for i, round_ in enumerate(whole):
        for rank, part in enumerate(parts):
            assert part[i].variants == 3
            assert len(part[i].groups) == 2 * 3
            mine = [round_.of_group(rank), round_.of_group(rank + 2)]
            assert [part[i].of_group(0), part[i].of_group(1)] == mine
            for group in mine:
                assert len({(prompt.problem.id, prompt.occurrence) for prompt in group}) == 1


def test_a_validation_asks_with_the_policys_own_template_alone(folders: dict[str, Path]) -> None:
    for rank in range(2):
        [round_] = over_variants(folders, rank, 2).val_dataloader()
        assert round_.variants == 1
        assert {group.template_id for group in round_.groups} == {"bare"}
    assert len(over_variants(folders).validation_groups) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_unit": "problem"}, r"data\.prompt_variants is given, but model\.round\.group_unit is problem"),
        ({"prompt_variants": ()}, r"group_unit is problem_over_variants, but data\.prompt_variants is empty"),
        ({"group_size": 8}, r"group_size is 8, which the 3 variants .* evenly: make it a multiple of 3"),
        ({"prompt_variants": [ASKED, ASKED], "group_size": 6}, r"have the ids \['bare', 'asked', 'asked'\]"),
        ({"max_prompt_tokens": 12}, r"prompts are longer than data\.max_prompt_tokens = 12"),
    ],
)
def test_variants_that_cannot_work_are_refused_by_name(
    folders: dict[str, Path], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        over_variants(folders, **settings)


def test_a_template_that_takes_a_context_gets_each_problems_own(folders: dict[str, Path]) -> None:
    with_context = [Problem(f"p{i}", f"{i} + 1 =", "1", "sums", context=f"hint {i}") for i in range(5)]
    write_problems(folders["problems"] / "train.jsonl", with_context)
    hinted = PromptTemplate("hinted", "{context}: {question}")
    data = over_variants(folders, prompt_variants=[hinted], group_size=4)
    for round_ in data.train_rounds:
        for place in range(2):
            bare, told = round_.of_group(place)
            number = bare.problem.id[1:]
            assert bare.prompt_text == f"{number} + 1 ="
            assert told.prompt_text == f"hint {number}: {number} + 1 ="


def test_a_problem_without_a_context_is_found_before_anything_is_trained(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"problem p\d\d has no context, and template 'hinted' has a place for one"):
        over_variants(folders, prompt_variants=[PromptTemplate("hinted", "{context} {question}")], group_size=4)
