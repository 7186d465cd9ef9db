import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from grpo.records import Problem, PromptGroup, Rollout, RolloutKey, Score, ToolCall
from grpo.rewards import Reward, RewardComponent, judge
from grpo.rollouts.reward_transform import RewardTransform, reward_of
from grpo.rollouts.score_rollouts import (
    RewardFailure,
    refuse_failures,
    score_rollouts,
    validate_components,
)

PROBLEM = Problem("p", "q", "1", "s")


def rollouts(*texts: str) -> list[Rollout]:
    group = PromptGroup(PROBLEM, "plain", "q", (1,))
    keys = [RolloutKey(1, "train", 0, "p", "plain", member=member) for member in range(len(texts))]
    return [Rollout(key, group, (2,), text, (-0.1,), "end_token") for key, text in zip(keys, texts, strict=True)]


def number(_: Problem, completion: str) -> Score:
    """The number in the text; "na" is not applicable, and anything else is a bug of the reward."""
    return Score.not_applicable("na") if completion == "na" else Score(float(completion))


def part(index: int) -> Reward:
    return lambda problem, completion: number(problem, completion.split()[index])


def rewards_of(components: dict[str, RewardComponent], *texts: str) -> list[float | None]:
    return [row.reward for row in score_rollouts(rollouts(*texts), components, max_failure_share=1.0)]


def test_components_that_do_not_apply_drop_out_of_the_sum() -> None:
    two = {"a": RewardComponent(part(0), 2.0), "b": RewardComponent(part(1), 1.0)}
    assert rewards_of(two, "1 na", "na 0.5") == [2.0, 0.5]
    scored = score_rollouts(rollouts("na na"), two)
    assert scored[0].reward is None
    assert not scored[0].scored
    assert [score.applicable for score in scored[0].components.values()] == [False, False]
    weighted = {"a": RewardComponent(part(0), 0.8), "b": RewardComponent(part(1), 0.2)}
    assert rewards_of(weighted, "1 0.5") == [0.9]


def test_a_reward_that_raises_leaves_its_row_unscored_and_the_others_scored() -> None:
    scored = score_rollouts(
        rollouts("1", "oops", "0", "1"), {"number": RewardComponent(number)}, max_failure_share=0.25
    )
    assert [row.reward for row in scored] == [1.0, None, 0.0, 1.0]
    reason = scored[1].components["number"].reason
    assert reason.startswith("ValueError: could not convert string to float: 'oops' (test_score_rollouts.py:")


def test_one_failed_component_is_enough_to_leave_the_row_unscored() -> None:
    components = {"bad": RewardComponent(number), "good": RewardComponent(lambda _p, _c: Score(1.0))}
    row = score_rollouts(rollouts("oops"), components, max_failure_share=1.0)[0]
    assert row.reward is None
    assert row.components["good"].value == 1.0


def test_raw_values_are_kept_beside_the_sum_in_the_order_given() -> None:
    components = {"b": RewardComponent(part(0), 3.0), "a": RewardComponent(part(1), -1.0)}
    given_rollouts = rollouts("1 1", "0.5 0")
    scored = score_rollouts(given_rollouts, components)
    assert [row.rollout for row in scored] == given_rollouts
    assert [(name, score.value) for name, score in scored[0].components.items()] == [("b", 1.0), ("a", 1.0)]
    assert [row.reward for row in scored] == [2.0, 1.5]


def test_the_sum_is_the_same_in_any_order_of_the_components() -> None:
    names = {"a": 0.1, "b": 0.2, "c": 0.3, "d": 1e16, "e": -1e16}
    components = {name: RewardComponent(number, weight) for name, weight in names.items()}
    backwards = dict(reversed(components.items()))
    assert rewards_of(components, "1") == rewards_of(backwards, "1") == [0.1 + 0.2 + 0.3 - 1.1102230246251565e-16]


def test_the_default_transform_records_the_sum_alone() -> None:
    components = {"b": RewardComponent(part(0), 3.0), "a": RewardComponent(part(1), -1.0)}
    [row] = score_rollouts(rollouts("1 1"), components)
    assert row.steps == {"weighted_sum": 2.0}


def test_the_transform_sees_drawn_tokens_and_invalid_calls_of_each_rollout() -> None:
    [plain, other] = rollouts("1", "1")
    # ten tokens, of which a tool inserted four; one of its two calls was valid
    calls = (ToolCall("sum", "1+1", "2"), ToolCall("sum", "1+", "not a sum", valid=False))
    other = replace(
        other,
        tokens=tuple(range(10)),
        logprobs=(-0.1,) * 10,
        drawn=(True,) * 3 + (False,) * 4 + (True,) * 3,
        tool_calls=calls,
    )
    transform = RewardTransform(length_penalty=0.5, max_length=8, length_zone=4, invalid_tool_penalty=0.25)
    first, second = score_rollouts([plain, other], {"number": RewardComponent(number)}, transform=transform)
    assert (first.reward, list(first.steps.items())) == (
        1.0,
        [("weighted_sum", 1.0), ("length_penalty", 0.0), ("tool_penalty", 0.0)],
    )
    assert second.steps == {"weighted_sum": 1.0, "length_penalty": -0.25, "tool_penalty": -0.25}
    assert second.reward == reward_of(second.steps) == 0.5


@pytest.mark.parametrize("text", ["oops", "na"])
def test_an_unscored_rollout_stays_so_under_any_transform(text: str) -> None:
    transform = RewardTransform(
        clip=(0.5, 1.0),
        length_penalty=1.0,
        max_length=1,
        length_zone=1,
        format_penalty=1.0,
        format_component="number",
        invalid_tool_penalty=1.0,
    )
    components = {"number": RewardComponent(number)}
    [row] = score_rollouts(rollouts(text), components, transform=transform, max_failure_share=1.0)
    assert (row.reward, row.steps, row.scored) == (None, {}, False)


def test_a_transform_that_does_not_fit_the_components_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reward_transform.format_component is 'form'.*choose from number"):
        score_rollouts(
            rollouts("1"), {"number": RewardComponent(number)}, transform=RewardTransform(format_component="form")
        )


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (1.0, "must return a Score"),
        (None, "must return a Score"),
        (Score(math.nan), "must be a finite number"),
        (Score(math.inf), "must be a finite number"),
        (Score("1"), "must be a finite number"),  # type: ignore[arg-type]
        (Score(10**400), "OverflowError"),
        (Score(None), "neither value nor reason"),
        (Score.unscorable("no sandbox"), "no sandbox"),
    ],
)
def test_what_is_no_sound_score_is_unscorable(returned: object, words: str) -> None:
    check: Callable[[Problem, str], object] = lambda _p, _c: returned  # noqa: E731
    score = judge(check, PROBLEM, "x")  # type: ignore[arg-type]
    assert score.value is None
    assert score.applicable
    assert words in score.reason


def test_values_become_floats_and_a_value_that_does_not_apply_is_dropped() -> None:
    assert repr(judge(lambda _p, _c: Score(True), PROBLEM, "x").value) == "1.0"
    assert judge(lambda _p, _c: Score(3.0, applicable=False), PROBLEM, "x").value is None


def test_a_reason_stays_short_however_long_the_message() -> None:
    def quoting(_: Problem, completion: str) -> Score:
        raise KeyError(completion)

    assert len(judge(quoting, PROBLEM, "x" * 100_000).reason) < 400


def test_leaving_the_program_is_not_caught() -> None:
    def leaving(_: Problem, __: str) -> Score:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge(leaving, PROBLEM, "x")


def test_too_many_failures_stop_the_run_and_name_component_count_and_first_reason() -> None:
    components = {"fine": RewardComponent(lambda _p, _c: Score(0.0)), "number": RewardComponent(number)}
    texts = ["first", "second", *["1"] * 8]
    with pytest.raises(RewardFailure, match=r"2 of 10.*= 0.1.*'number' failed on 2.*ValueError.*'first'"):
        score_rollouts(rollouts(*texts), components)
    assert len(score_rollouts(rollouts(*texts), components, max_failure_share=0.2)) == 10
    assert len(score_rollouts(rollouts(*texts[1:], "1"), components)) == 10


def test_a_row_counts_once_and_what_does_not_apply_never() -> None:
    components = {"a": RewardComponent(part(0)), "b": RewardComponent(part(1))}
    assert len(score_rollouts(rollouts(*["na na"] * 3), components, max_failure_share=0.0)) == 3
    scored = score_rollouts(rollouts("x x", "1 1"), components, max_failure_share=1.0)
    refuse_failures(scored, 0.5)
    with pytest.raises(RewardFailure, match="failed on 1 of 2"):
        refuse_failures(scored, 0.49)


def test_no_rollouts_are_no_scores() -> None:
    assert score_rollouts([], {"number": RewardComponent(number)}) == []


@pytest.mark.parametrize("weights", [(1e308, 1e308), (1e308, -1e308)])
def test_a_sum_past_the_float_range_is_an_error(weights: tuple[float, float]) -> None:
    components = {str(weight): RewardComponent(number, weight) for weight in weights}
    with pytest.raises(ValueError, match="past the float range"):
        score_rollouts(rollouts("1e10"), components)


@pytest.mark.parametrize(
    ("components", "words"),
    [
        ({}, "rewards is empty"),
        ({"mean": RewardComponent(number)}, "named 'mean': a metric is called reward/mean"),
        ({"a/b": RewardComponent(number)}, "named 'a/b': .* without a slash"),
        ({" ": RewardComponent(number)}, "named ' '"),
        ({"a": RewardComponent(number, math.nan)}, "rewards.a.weight is nan"),
        ({"a": RewardComponent(number, -math.inf)}, "rewards.a.weight is -inf"),
        ({"a": RewardComponent(number, 0.0), "b": RewardComponent(number, -0.0)}, "every weight is 0"),
    ],
)
def test_components_that_cannot_teach_are_refused(components: dict[str, RewardComponent], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        validate_components(components)
    with pytest.raises(ValueError, match=words):
        score_rollouts(rollouts("1"), components)


def test_a_weight_of_zero_beside_another_is_allowed() -> None:
    components = {"kept": RewardComponent(part(0), 0.0), "counted": RewardComponent(part(1))}
    validate_components(components)
    assert rewards_of(components, "1 0.5") == [0.5]


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_outside_zero_to_one_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="max_failure_share"):
        score_rollouts(rollouts("1"), {"number": RewardComponent(number)}, max_failure_share=share)
