import pytest
from fixtures_policy import scored_group

from grpo.rollouts.flat_groups import (
    AtLimit,
    DrawnGroup,
    FlatGroups,
    GroupVerdict,
    OnlyFlatGroups,
    is_flat,
    judge_draw,
    judge_group,
    refuse_failed,
)


@pytest.mark.parametrize(
    ("rewards", "flat_groups", "verdict", "in_update"),
    [
        ([1.0, 0.0, 0.0, 0.0], "skip", "kept", True),
        ([1.0, 0.0, 0.0, 0.0], "keep", "kept", True),
        # equal and far from either end: a filter on the mean would let it pass
        ([0.4, 0.4, 0.4, 0.4], "skip", "skipped_flat", False),
        ([0.4, 0.4, 0.4, 0.4], "keep", "kept_flat", True),
        ([0.0, 0.0], "skip", "skipped_flat", False),
        # only what was scored is compared
        ([1.0, None, 1.0], "skip", "skipped_flat", False),
        ([1.0, None, 0.0], "skip", "kept", True),
        ([1.0, None, None], "skip", "unscored", False),
        ([1.0, None, None], "keep", "unscored", False),
        ([None, None], "keep", "unscored", False),
        # a difference in the last place is one
        ([0.1 + 0.2, 0.3], "skip", "kept", True),
    ],
)
def test_a_group_is_judged_as_a_whole(
    rewards: list[float | None], flat_groups: AtLimit, verdict: str, in_update: bool
) -> None:
    judged = judge_group(scored_group(rewards), flat_groups)
    assert judged.verdict == verdict
    assert judged.in_update is in_update
    assert bool(judged.reason) is (verdict != "kept")


def test_the_reason_says_what_was_seen() -> None:
    assert judge_group(scored_group([0.5, 0.5, None]), "skip").reason == "all 2 scored members earned 0.5"
    assert judge_group(scored_group([0.5, None]), "skip").reason == "1 of 2 members were scored: nothing to compare"


def test_flat_means_equal_scored_rewards() -> None:
    assert is_flat(scored_group([2.0, 2.0, None]))
    assert not is_flat(scored_group([2.0, 2.5]))
    assert not is_flat(scored_group([None, None]))


@pytest.mark.parametrize(
    ("rewards", "draw", "at_limit", "verdict"),
    [
        ([1.0, 1.0], 0, "skip", "resampled"),
        ([1.0, 1.0], 1, "keep", "resampled"),
        ([1.0, 1.0], 2, "skip", "skipped_flat"),
        ([1.0, 1.0], 2, "keep", "kept_flat"),
        ([1.0, 1.0], 2, "fail", "failed_flat"),
        ([1.0, 0.0], 0, "fail", "kept"),
        ([1.0, 0.0], 2, "fail", "kept"),
        # a checker that fails is no flat group: drawing again would not mend it
        ([1.0, None], 0, "fail", "unscored"),
    ],
)
def test_a_flat_draw_is_set_aside_until_the_limit(
    rewards: list[float | None], draw: int, at_limit: AtLimit, verdict: str
) -> None:
    judged = judge_draw(scored_group(rewards), "resample", draw, 3, at_limit)
    assert judged.verdict == verdict
    if judged.flat:
        place = f"draw {draw + 1} of at most 3" + (", the last" if draw == 2 else "")
        assert judged.reason == f"all 2 scored members earned 1.0; {place}"


@pytest.mark.parametrize("flat_groups", ["keep", "skip"])
def test_without_resampling_the_first_draw_is_the_last(flat_groups: FlatGroups) -> None:
    judged = judge_draw(scored_group([1.0, 1.0]), flat_groups, 0, 4, "fail")
    assert judged.verdict == {"keep": "kept_flat", "skip": "skipped_flat"}[flat_groups]


def test_a_group_that_may_not_stay_flat_stops_the_run_by_name() -> None:
    drawn = DrawnGroup(tuple(scored_group([0.5, 0.5], name="p7")), GroupVerdict("failed_flat", "all earned 0.5"))
    refuse_failed([DrawnGroup(drawn.members, GroupVerdict("kept_flat"))])
    with pytest.raises(OnlyFlatGroups, match=r"1 groups stayed flat, first that of problem p7 \(all earned 0\.5\)"):
        refuse_failed([drawn])
