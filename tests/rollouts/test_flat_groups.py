import pytest
from fixtures_policy import scored_group

from grpo.rollouts.flat_groups import FlatGroups, is_flat, judge_group


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
    rewards: list[float | None], flat_groups: FlatGroups, verdict: str, in_update: bool
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
