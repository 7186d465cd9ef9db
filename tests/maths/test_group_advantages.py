"""Advantages against numbers worked out by hand, and the laws they obey."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo.maths.group_advantages import (
    Baseline,
    Scale,
    centred_rewards,
    group_advantages,
    group_std,
    tied_groups,
)

BASELINES: tuple[Baseline, ...] = ("mean", "leave_one_out", "batch_mean", "none")
SCALES: tuple[Scale, ...] = ("group_std", "batch_std", "none")
NAN = math.nan
quick = settings(max_examples=25, deadline=None)

# Rewards as checkers give them: a few steps apart, so no std is near epsilon unless the group is tied.
reward_values = st.sampled_from([-1.0, 0.0, 0.1, 0.25, 0.3, 1.0, 2.0])


def reward_tables(min_groups: int = 1) -> st.SearchStrategy[list[list[float]]]:
    return st.integers(2, 6).flatmap(
        lambda size: st.lists(st.lists(reward_values, min_size=size, max_size=size), min_size=min_groups, max_size=4)
    )


def table(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def close(actual: Tensor, expected: list[list[float]], tolerance: float = 1e-7) -> None:
    torch.testing.assert_close(actual, table(expected), rtol=0, atol=tolerance)


# Worked out by hand


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # mean 1/2, std 1/2
        ([0.0, 1.0, 1.0, 0.0], [-1.0, 1.0, 1.0, -1.0]),
        # mean 1/4, std sqrt(3)/4: (3/4) / (sqrt(3)/4) = sqrt(3)
        ([1.0, 0.0, 0.0, 0.0], [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
        # mean 3/4, the same std: the rare loser is pushed as far as the rare winner was pulled
        ([1.0, 1.0, 1.0, 0.0], [0.5773503, 0.5773503, 0.5773503, -1.7320508]),
        # mean 2, deviations -2 0 2, std sqrt(8/3)
        ([0.0, 2.0, 4.0], [-1.2247449, 0.0, 1.2247449]),
    ],
)
def test_advantages_of_one_group(rewards: list[float], expected: list[float]) -> None:
    close(group_advantages(table([rewards])), [expected])


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("mean", [[0.75, -0.25, -0.25, -0.25], [0.0, 0.0, 0.0, 0.0]]),
        # the winner is compared with mean(0,0,0) = 0, a loser with mean(1,0,0) = 1/3
        ("leave_one_out", [[1.0, -1 / 3, -1 / 3, -1 / 3], [0.0, 0.0, 0.0, 0.0]]),
        # mean of the eight: 5/8; the solved group is praised for being above it
        ("batch_mean", [[0.375, -0.625, -0.625, -0.625], [0.375, 0.375, 0.375, 0.375]]),
        ("none", [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]),
    ],
)
def test_baselines_without_scale(baseline: Baseline, expected: list[list[float]]) -> None:
    rewards = table([[1, 0, 0, 0], [1, 1, 1, 1]])
    close(group_advantages(rewards, baseline=baseline, scale="none"), expected, 1e-12)
    close(centred_rewards(rewards, baseline=baseline), expected, 1e-12)


def test_batch_std_is_that_of_all_rewards() -> None:
    # [1,0,0,0 | 1,1,1,0]: half are 1, so the std of the batch is 1/2 and the centred 0.75 becomes 1.5
    rewards = table([[1, 0, 0, 0], [1, 1, 1, 0]])
    close(group_advantages(rewards, scale="batch_std"), [[1.5, -0.5, -0.5, -0.5], [0.5, 0.5, 0.5, -1.5]])


def test_sample_std_divides_by_one_less() -> None:
    # squares of [1,0] sum to 1/2: population std 1/2, sample std sqrt(1/2)
    assert group_std(table([[1, 0]])).tolist() == [0.5]
    assert group_std(table([[1, 0]]), std_correction=1).item() == pytest.approx(math.sqrt(0.5), abs=1e-15)


def test_epsilon_is_added_to_the_std() -> None:
    close(group_advantages(table([[1, 0]]), epsilon=0.5), [[0.5, -0.5]], 1e-15)


def test_unscored_members_are_left_out() -> None:
    rewards = table([[1, NAN, 0, 0], [1, NAN, NAN, math.inf], [NAN, NAN, NAN, NAN]])
    scored = torch.tensor([[True, False, True, True], [True, False, False, False], [False] * 4])
    # first group: mean 1/3, std sqrt(2)/3, so sqrt(2) and -sqrt(1/2); one or no scored member: zeros
    expected = [[1.4142136, 0.0, -0.7071068, -0.7071068], [0.0] * 4, [0.0] * 4]
    close(group_advantages(rewards, scored=scored), expected)
    assert tied_groups(rewards, scored=scored).tolist() == [False, True, True]


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
def test_a_lone_scored_member_gets_zero_under_every_option(baseline: Baseline, scale: Scale) -> None:
    scored = torch.tensor([[True, False], [True, True]])
    advantages = group_advantages(table([[9, 0], [0, 1]]), scored=scored, baseline=baseline, scale=scale)
    assert advantages[0].tolist() == [0.0, 0.0]
    assert advantages[1].abs().sum() > 0


def test_tied_groups_look_at_scored_rewards_as_they_are() -> None:
    close_to_one = 1.0 + 2**-52
    assert tied_groups(table([[0.1, 0.1, 0.1], [1.0, 1.0, close_to_one]])).tolist() == [True, False]


def test_integer_and_low_precision_rewards_are_taken_as_float64() -> None:
    for rewards in (torch.tensor([[0, 1, 1, 0]]), torch.tensor([[0, 1, 1, 0]], dtype=torch.bfloat16)):
        advantages = group_advantages(rewards)
        assert advantages.dtype == torch.float64
        close(advantages, [[-1.0, 1.0, 1.0, -1.0]])


def test_no_gradient_flows_through_the_rewards() -> None:
    assert not group_advantages(table([[0, 1]]).requires_grad_()).requires_grad


# Laws


@quick
@given(reward=st.floats(allow_nan=False, allow_infinity=False), size=st.integers(2, 9))
def test_a_tied_group_gives_exact_zeros_at_any_magnitude(reward: float, size: int) -> None:
    rewards = table([[reward] * size])
    for baseline, scale in itertools.product(BASELINES[:2], SCALES):
        assert group_advantages(rewards, baseline=baseline, scale=scale).tolist() == [[0.0] * size]
    for baseline in BASELINES:
        assert group_advantages(rewards, baseline=baseline).tolist() == [[0.0] * size]


@quick
@given(rewards=reward_tables(), data=st.data())
def test_reordering_members_and_groups_reorders_advantages(rewards: list[list[float]], data: st.DataObject) -> None:
    members = data.draw(st.permutations(range(len(rewards[0]))))
    groups = data.draw(st.permutations(range(len(rewards))))
    for baseline, scale in itertools.product(BASELINES, SCALES):
        straight = group_advantages(table(rewards), baseline=baseline, scale=scale)
        reordered = group_advantages(table(rewards)[groups][:, members], baseline=baseline, scale=scale)
        torch.testing.assert_close(reordered, straight[groups][:, members], rtol=0, atol=1e-12)


@quick
@given(rewards=reward_tables(), shift=st.floats(-100, 100))
def test_a_constant_added_to_the_rewards_changes_nothing(rewards: list[list[float]], shift: float) -> None:
    for baseline in BASELINES[:3]:
        plain = group_advantages(table(rewards), baseline=baseline)
        torch.testing.assert_close(
            group_advantages(table(rewards) + shift, baseline=baseline), plain, rtol=0, atol=1e-9
        )


@quick
@given(rewards=reward_tables(), power=st.integers(-4, 60))
def test_the_unit_of_reward_cancels(rewards: list[list[float]], power: int) -> None:
    scaled = group_advantages(table(rewards) * 2.0**power)
    torch.testing.assert_close(scaled, group_advantages(table(rewards)), rtol=0, atol=1e-4)


@quick
@given(rewards=reward_tables())
def test_advantages_of_a_group_sum_to_zero_and_have_unit_std(rewards: list[list[float]]) -> None:
    advantages = group_advantages(table(rewards))
    assert advantages.sum(dim=1).abs().max() < 1e-10
    for row, tied in zip(advantages.tolist(), tied_groups(table(rewards)).tolist(), strict=True):
        assert statistics.pstdev(row) == pytest.approx(0.0 if tied else 1.0, abs=1e-6)


@quick
@given(rewards=reward_tables(min_groups=2))
def test_a_group_does_not_depend_on_the_others(rewards: list[list[float]]) -> None:
    together = group_advantages(table(rewards))
    alone = torch.cat([group_advantages(table([row])) for row in rewards])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-14)


# Mistakes


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        (torch.zeros(4), {}, r"rewards has shape \(4,\).*\[prompts, group size\]"),
        (torch.zeros(0, 4), {}, r"rewards has shape \(0, 4\).*at least one group"),
        (torch.zeros(3, 1), {}, r"rewards has group size 1.*at least 2"),
        (torch.tensor([[0.0, NAN]]), {}, r"rewards holds nan.*scored"),
        (torch.tensor([[0.0, -math.inf]]), {}, r"rewards holds -inf.*scored"),
        (table([[-1.7e308, 1.7e308]]), {}, "float64 range.*scale the rewards down"),
        (table([[0, 1e200]]), {}, "float64 range.*scale the rewards down"),
        (torch.eye(2), {"baseline": "median"}, "baseline is 'median': choose 'mean'"),
        (torch.eye(2), {"scale": "std"}, "scale is 'std': choose 'group_std'"),
        (torch.eye(2), {"std_correction": 2}, "std_correction is 2: choose 0"),
        (torch.eye(2), {"std_correction": 2, "scale": "none"}, "std_correction is 2: choose 0"),
        (torch.eye(2), {"epsilon": 0.0}, "epsilon is 0.0: it must be positive"),
        (torch.eye(2), {"epsilon": NAN}, "epsilon is nan: it must be positive"),
        (torch.eye(2), {"epsilon": math.inf}, "epsilon is inf: it must be positive and finite"),
        (torch.eye(2), {"scored": torch.ones(2, 2)}, "scored is torch.float32.*must be bool"),
        (torch.eye(2), {"scored": torch.ones(2, dtype=torch.bool)}, r"scored is .* shape \(2,\)"),
    ],
)
def test_mistakes_name_argument_value_and_remedy(rewards: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, **options)
