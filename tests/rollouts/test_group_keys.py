from dataclasses import replace

import pytest
from fixtures_policy import scored_group

from grpo.records import Problem, Rollout, SamplingPolicy
from grpo.rollouts.group_keys import MixedGroup, group_key, require_one_group


def members() -> list[Rollout]:
    return [scored.rollout for scored in scored_group([1.0, 0.0, 0.5])]


def asked(rollout: Rollout, template_id: str = "bare", **problem: str) -> Rollout:
    group = replace(rollout.group, template_id=template_id, problem=replace(rollout.group.problem, **problem))
    return replace(rollout, group=group, key=replace(rollout.key, template_id=template_id))


def test_members_of_one_group_are_one_and_have_one_id() -> None:
    require_one_group(members())
    assert len({group_key(member).id("problem") for member in members()}) == 1


@pytest.mark.parametrize(
    ("field", "odd"),
    [
        ("problem_id", lambda r: asked(r, id="q")),
        ("template_id", lambda r: asked(r, "polite")),
        ("context_sha256", lambda r: asked(r, context="The sum is 2.")),
        ("tools", lambda r: replace(r, sampling_policy=SamplingPolicy(tools='{"calculator": "2"}'))),
        ("sampling_settings", lambda r: replace(r, sampling_policy=SamplingPolicy(settings='{"top_k": 5}'))),
        ("policy_version", lambda r: replace(r, sampling_policy=SamplingPolicy(weights_version=3))),
        ("engine", lambda r: replace(r, sampling_policy=SamplingPolicy(engine="vllm"))),
        ("draw", lambda r: replace(r, key=replace(r.key, draw=1))),
        ("round", lambda r: replace(r, key=replace(r.key, round=1))),
        ("occurrence", lambda r: replace(r, key=replace(r.key, occurrence=1))),
        ("purpose", lambda r: replace(r, key=replace(r.key, purpose="validation"))),
        ("seed", lambda r: replace(r, key=replace(r.key, seed=9))),
    ],
)
def test_a_member_of_another_group_is_refused_by_the_field_that_differs(field: str, odd: object) -> None:
    first, second, third = members()
    changed = odd(third)  # type: ignore[operator]
    with pytest.raises(MixedGroup, match=f"a group of problem 'p' mixes {field} "):
        require_one_group([first, second, changed])
    assert group_key(changed).id("problem") != group_key(first).id("problem")


def test_over_variants_the_prompt_may_differ_and_nothing_else() -> None:
    first, second, third = members()
    variant = asked(third, "polite")
    require_one_group([first, second, variant], "problem_over_variants")
    assert group_key(variant).id("problem_over_variants") == group_key(first).id("problem_over_variants")
    with pytest.raises(MixedGroup, match="mixes context_sha256"):
        require_one_group([first, asked(variant, "polite", context="x")], "problem_over_variants")


def test_one_rollout_cannot_stand_in_a_group_twice() -> None:
    first, second, _ = members()
    with pytest.raises(MixedGroup, match="holds one rollout twice"):
        require_one_group([first, second, first])


def test_the_context_is_part_of_what_was_asked() -> None:
    [rollout, *_] = members()
    assert isinstance(rollout.group.problem, Problem)
    assert group_key(asked(rollout, context="a")) != group_key(asked(rollout, context="b"))
