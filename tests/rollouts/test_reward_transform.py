import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentParser

from grpo.records import Problem, Score
from grpo.rewards import RewardComponent
from grpo.rollouts.reward_transform import RewardTransform, reward_of, weighted_sum

AMOUNTS = st.floats(0, 10)
VALUES = st.floats(-1e6, 1e6)


def full_marks(_: Problem, __: str) -> Score:
    return Score(1.0)


def components(**weights: float) -> dict[str, RewardComponent]:
    return {name: RewardComponent(full_marks, weight) for name, weight in weights.items()}


def steps_of(
    transform: RewardTransform, values: Mapping[str, float], length: int = 3, calls: int = 0, **weights: float
) -> dict[str, float]:
    """Of components with these values; each weighs 1 unless told otherwise."""
    scores = {name: Score(value) for name, value in values.items()}
    parts = components(**{name: weights.get(name, 1.0) for name in values})
    return transform.steps(scores, parts, length=length, invalid_tool_calls=calls)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(1, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (15, -0.75), (16, -1.0), (17, -1.0), (20, -1.0)],
)
def test_the_overlong_zone_is_that_of_dapo(length: int, penalty: float) -> None:
    transform = RewardTransform(length_penalty=1.0, max_length=16, length_zone=4)
    steps = steps_of(transform, {"a": 1.0}, length)
    assert steps == {"weighted_sum": 1.0, "length_penalty": penalty}
    assert math.copysign(1, steps["length_penalty"]) == (-1 if penalty else 1)  # no -0.0 in the record
    assert reward_of(steps) == 1.0 + penalty


def test_the_length_penalty_is_weighted_and_its_zone_may_be_the_whole_length() -> None:
    transform = RewardTransform(length_penalty=0.5, max_length=8, length_zone=8)
    assert [steps_of(transform, {"a": 0.0}, n)["length_penalty"] for n in (0, 2, 8, 9)] == [0.0, -0.125, -0.5, -0.5]


def test_the_sum_is_clipped_before_penalties_come_off() -> None:
    transform = RewardTransform(
        clip=(0.0, 1.0),
        length_penalty=0.5,
        max_length=4,
        length_zone=2,
        format_penalty=0.125,
        format_component="form",
        invalid_tool_penalty=0.25,
    )
    steps = steps_of(transform, {"answer": 1.0, "form": 0.5}, length=4, calls=3, answer=2.0)
    assert list(steps.items()) == [
        ("weighted_sum", 2.5),
        ("clipped", 1.0),
        ("length_penalty", -0.5),
        ("format_penalty", -0.125),
        ("tool_penalty", -0.75),
    ]
    # 2.5 → 1 → 1 - 1.375. Clipped last it would be 1, clipped before the tool penalty 0.25.
    assert reward_of(steps) == -0.375


@pytest.mark.parametrize(("value", "clipped"), [(-0.75, -0.5), (-0.5, -0.5), (0.25, 0.25), (2.0, 1.0)])
def test_the_clip_has_two_sides(value: float, clipped: float) -> None:
    assert steps_of(RewardTransform(clip=(-0.5, 1.0)), {"a": value})["clipped"] == clipped


def test_one_side_of_the_clip_can_be_left_open() -> None:
    steps = steps_of(RewardTransform(clip=(-math.inf, 1.0)), {"a": -1e300})
    assert reward_of(steps) == -1e300


@pytest.mark.parametrize(("value", "penalty"), [(0.0, -0.5), (0.999, -0.5), (1.0, 0.0), (1.5, 0.0)])
def test_the_format_penalty_is_for_anything_below_full_marks(value: float, penalty: float) -> None:
    transform = RewardTransform(format_penalty=0.5, format_component="form")
    # judged by its raw value: a weight of 0 keeps it out of the sum alone
    steps = steps_of(transform, {"answer": 1.0, "form": value}, form=0.0)
    assert steps == {"weighted_sum": 1.0, "format_penalty": penalty}


def test_a_form_that_does_not_apply_costs_nothing() -> None:
    transform = RewardTransform(format_penalty=0.5, format_component="form")
    scores = {"answer": Score(0.5), "form": Score.not_applicable("no form asked for")}
    steps = transform.steps(scores, components(answer=1.0, form=1.0), length=1, invalid_tool_calls=0)
    assert steps == {"weighted_sum": 0.5, "format_penalty": 0.0}


@pytest.mark.parametrize("failed", [Score.unscorable("no sandbox"), Score.not_applicable("no")])
def test_what_is_unscored_has_no_steps(failed: Score) -> None:
    transform = RewardTransform(clip=(0.5, 1.0), invalid_tool_penalty=1.0)
    assert transform.steps({"a": failed}, components(a=1.0), length=1, invalid_tool_calls=1) == {}
    assert reward_of({}) is None


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=6))
def test_by_default_the_reward_is_the_correctly_rounded_sum(pairs: list[tuple[float, float]]) -> None:
    scores = {str(index): Score(value) for index, (value, _) in enumerate(pairs)}
    parts = components(**{str(index): weight for index, (_, weight) in enumerate(pairs)})
    expected = math.fsum(value * weight for value, weight in pairs)
    steps = RewardTransform().steps(scores, parts, length=9, invalid_tool_calls=9)
    assert steps == {"weighted_sum": expected}
    assert weighted_sum(scores, parts) == expected
    reward = reward_of(steps)
    assert reward is not None
    assert reward.hex() == expected.hex()


@given(
    values=st.dictionaries(st.sampled_from("abcd"), VALUES, min_size=1),
    amounts=st.tuples(AMOUNTS, AMOUNTS, AMOUNTS),
    clip=st.none() | st.tuples(st.floats(-5, 0), st.floats(0.1, 5)),
    length=st.integers(0, 40),
    zone=st.integers(1, 16),
    data=st.data(),
)
def test_equal_completions_tie_under_any_transform(
    values: dict[str, float],
    amounts: tuple[float, float, float],
    clip: tuple[float, float] | None,
    length: int,
    zone: int,
    data: st.DataObject,
) -> None:
    form = sorted(values)[0]
    transform = RewardTransform(clip, amounts[0], 16, zone, amounts[1], form, amounts[2])
    shuffled = {name: values[name] for name in data.draw(st.permutations(sorted(values)))}
    steps = steps_of(transform, values, length, 2, a=0.1, b=0.3)
    assert reward_of(steps) == reward_of(steps_of(transform, shuffled, length, 2, a=0.1, b=0.3))
    # a length outside the zone ties with any other there
    if length <= 16 - zone:
        assert steps == steps_of(transform, values, 0, 2, a=0.1, b=0.3)


def test_a_reward_past_the_float_range_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"weighted_sum', 'tool_penalty'\] is past the float range"):
        reward_of(steps_of(RewardTransform(invalid_tool_penalty=1e308), {"a": 1.0}, calls=10))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"clip": (1.0, 0.0)}, r"reward_transform.clip is \[1.0, 0.0\]: give a lower"),
        ({"clip": (1.0, 1.0)}, "reward_transform.clip"),
        ({"clip": (math.nan, 1.0)}, "reward_transform.clip"),
        ({"length_penalty": -1.0}, "reward_transform.length_penalty is -1.0: .* from 0"),
        ({"format_penalty": math.inf}, "reward_transform.format_penalty is inf"),
        ({"invalid_tool_penalty": math.nan}, "reward_transform.invalid_tool_penalty is nan"),
        ({"length_penalty": 1.0, "length_zone": 4}, "reward_transform.max_length is null with length_penalty = 1.0"),
        ({"length_penalty": 1.0, "max_length": 4}, "reward_transform.length_zone is null with length_penalty = 1.0"),
        ({"max_length": 4, "length_zone": 0}, "reward_transform.length_zone is 0: it must be at least 1"),
        ({"max_length": 0}, "reward_transform.max_length is 0"),
        ({"max_length": 4, "length_zone": 5}, "length_zone is 5, more than max_length = 4: .* at most 4"),
        ({"format_penalty": 0.5}, "reward_transform.format_component is null with format_penalty = 0.5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RewardTransform(**settings)


def test_a_format_component_has_to_be_one_where_1_is_good() -> None:
    transform = RewardTransform(format_penalty=0.5, format_component="form")
    transform.check_components(components(answer=1.0, form=0.0))
    with pytest.raises(ValueError, match="'form', which is not among the rewards: choose from answer, style"):
        transform.check_components(components(answer=1.0, style=1.0))
    with pytest.raises(ValueError, match=r"'form', whose weight is -0.5: .* name one that gives 1"):
        transform.check_components(components(answer=1.0, form=-0.5))
    RewardTransform().check_components({})


def test_a_penalty_past_the_longest_completion_is_refused() -> None:
    transform = RewardTransform(length_penalty=1.0, max_length=16, length_zone=4)
    transform.check_length(16)
    with pytest.raises(ValueError, match=r"max_length is 16, above sampling.max_new_tokens = 15: .* at most 15"):
        transform.check_length(15)
    RewardTransform(max_length=16, length_zone=4).check_length(15)  # switched off


def test_it_can_be_set_from_a_config_and_each_field_has_its_help() -> None:
    parser = ArgumentParser()
    parser.add_argument("--reward_transform", type=RewardTransform, default=RewardTransform())
    assert parser.instantiate_classes(parser.parse_args([])).reward_transform == RewardTransform()
    config = {"clip": [0, 1], "length_penalty": 0.5, "max_length": 16, "length_zone": 4, "format_component": None}
    parsed = parser.instantiate_classes(parser.parse_object({"reward_transform": config}))
    assert parsed.reward_transform == RewardTransform((0.0, 1.0), 0.5, 16, 4)
    text = " ".join(parser.format_help().split())
    for words in ("null leaves it as it is", "at most sampling.max_new_tokens", "grows linearly from 0"):
        assert words in text
    for words in ("less than full marks (1)", "judges the form", "each invalid tool call"):
        assert words in text
