"""Groups whose members several processes draw: threads stand for the processes, and nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, local
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures_policy import policy_folder, problem_folder

from grpo.records import Problem, PromptGroup, Rollout, RolloutKey, SamplingPolicy, Score
from grpo.rewards import RewardComponent
from grpo.rewards.judging import Judges
from grpo.rollouts.flat_groups import DrawnGroup, judge_draw
from grpo.rollouts.group_keys import MixedGroup, member_keys
from grpo.rollouts.prompts import PromptTemplate
from grpo.rollouts.reward_transform import RewardTransform
from grpo.training import draw_groups
from grpo.training.draw_groups import GroupSource
from grpo.training.phase_clock import PhaseClock
from grpo.training.prompt_group_datamodule import PromptGroupDataModule, RoundOfGroups
from grpo.training.settings import RoundSettings

RANK = local()
Draws = list[list[DrawnGroup]]


class Named:
    """Stands for the sampler: a completion's text is its key, ``draw member template``."""

    def sample(
        self,
        groups: Sequence[PromptGroup],
        keys: Sequence[RolloutKey],
        group_size: int,
        weights_version: int = 0,
        members: Sequence[Sequence[int]] | None = None,
    ) -> list[list[Rollout]]:
        policy = SamplingPolicy(weights_version)
        return [
            [
                Rollout(
                    k, group, (1,), f"{k.draw} {k.member} {k.template_id}", (-1.0,), "length", sampling_policy=policy
                )
                for k in own
            ]
            for group, own in zip(groups, member_keys(keys, group_size, members), strict=True)
        ]


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return {"policy": policy_folder(tmp_path / "policy"), "problems": problem_folder(tmp_path / "problems")}


def rounds_of(folders: dict[str, Path], processes: int, split: bool = True, **options: Any) -> list[RoundOfGroups]:
    """The first round of each process."""
    found = []
    for rank in range(processes):
        data = PromptGroupDataModule(**folders, rounds=1, split_groups=split, **options)
        data.trainer = SimpleNamespace(global_rank=rank, world_size=processes)  # type: ignore[assignment]
        data.setup("fit")
        found += data.train_rounds
    return found


def drawn_by(
    rounds: Sequence[RoundOfGroups],
    settings: RoundSettings,
    reward: Callable[[Problem, str], Score],
    monkeypatch: pytest.MonkeyPatch,
    versions: Sequence[int] = (0,) * 7,
) -> list[Draws]:
    """What each of the processes has in the end, which go on together."""
    barrier, said = Barrier(len(rounds), timeout=20), [None] * len(rounds)

    def all_processes(value: Any) -> list[Any]:
        said[RANK.number] = value
        barrier.wait()
        heard = list(said)
        barrier.wait()
        return heard

    monkeypatch.setattr(draw_groups, "all_processes", all_processes)
    components = {"made": RewardComponent(reward, limit_seconds=None)}
    judges = Judges(components, 1)
    source = GroupSource(Named(), components, judges, RewardTransform(), settings, 1)  # type: ignore[arg-type]

    def one(rank: int) -> Draws:
        RANK.number = rank
        return source.draw(rounds[rank], versions[rank], PhaseClock())

    with ThreadPoolExecutor(len(rounds)) as pool:
        return list(pool.map(one, range(len(rounds))))


def shown(draws: Draws) -> list[Any]:
    """Of every draw, who is in it in which order, with what reward, and the verdict."""
    return [[([(m.rollout.key, m.reward) for m in draw.members], draw.verdict) for draw in group] for group in draws]


def by_member(_: Problem, text: str) -> Score:
    """Equal for all that are even, and for all that are odd."""
    return Score(float(int(text.split()[1]) % 2))


def mixed_at_the_third_draw(_: Problem, text: str) -> Score:
    draw, member, _template = text.split()
    return Score(float(draw == "2" and member == "0"))


def unsure_of_all_but_one(_: Problem, text: str) -> Score:
    return Score(1.0) if text.split()[1] == "1" else Score.unscorable("not sure")


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
@pytest.mark.parametrize("reward", [by_member, mixed_at_the_third_draw, unsure_of_all_but_one])
def test_every_process_has_the_groups_that_one_process_has(
    folders: dict[str, Path], processes: int, reward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of their members, judged alike and drawn again alike, with seven processes for four members too."""
    settings = RoundSettings(group_size=4, flat_groups="resample", max_draws=3)
    options: dict[str, Any] = {"groups_per_round": 1 if processes == 7 else 3, "group_size": 4}
    [alone] = drawn_by(rounds_of(folders, 1, split=False, **options), settings, reward, monkeypatch)
    together = drawn_by(rounds_of(folders, processes, **options), settings, reward, monkeypatch)
    for draws in together:
        assert shown(draws) == shown(alone)
    for group in zip(*together, strict=True):
        for draw in zip(*group, strict=True):
            assert sorted(place for own in draw for place in own.own) == [0, 1, 2, 3]  # each drawn once
    most = max(len(group) for group in alone)
    assert most == (3 if reward is mixed_at_the_third_draw else 1)


def test_a_group_is_judged_whole_where_each_process_has_a_flat_part(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts alone would be judged otherwise, so the comparison can fail."""
    settings = RoundSettings(group_size=4, split_groups=True)
    rounds = rounds_of(folders, 2, groups_per_round=2, group_size=4)
    for draws in drawn_by(rounds, settings, by_member, monkeypatch):
        for [draw] in draws:
            assert draw.verdict.verdict == "kept"
            assert judge_draw(draw.own_members, "skip", 0, 1, "skip").verdict == "skipped_flat"


def test_the_variants_of_a_prompt_are_split_with_their_group(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RoundSettings(group_size=6, group_unit="problem_over_variants")
    options: dict[str, Any] = {"groups_per_round": 2, "group_size": 6, "group_unit": "problem_over_variants"}
    options["prompt_variants"] = [PromptTemplate("asked", "Q: {question}")]
    [alone] = drawn_by(rounds_of(folders, 1, split=False, **options), settings, by_member, monkeypatch)
    for draws in drawn_by(rounds_of(folders, 4, **options), settings, by_member, monkeypatch):
        assert shown(draws) == shown(alone)
    names = [m.rollout.key.template_id for m in alone[0][0].members]
    assert names == ["bare"] * 3 + ["asked"] * 3


def test_members_that_were_drawn_with_other_weights_are_no_group(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = rounds_of(folders, 2, groups_per_round=2, group_size=4)
    with pytest.raises(MixedGroup, match=r"mixes policy_version 3 and 4"):
        drawn_by(rounds, RoundSettings(group_size=4), by_member, monkeypatch, versions=(3, 4))
