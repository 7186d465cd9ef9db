"""Which groups join and when, what a pass over prompts holds, and how many columns the cache ever has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fixtures_policy import key, prompt, random_llama
from fixtures_rounds import watch
from fixtures_sampling import KEYS, MANY, MANY_KEYS, PROMPTS, SOME_ENDS, drawn, flat, sampler

from grpo.records import PromptGroup
from grpo.rollouts import drawing, growing_rows
from grpo.rollouts.growing_rows import PADDING_TOKENS, GrowingRows, WaitingGroups, passes
from grpo.rollouts.sharing_trial import can_share_prompts


def groups_of(*lengths: int) -> list[PromptGroup]:
    return [prompt("1" * length, f"g{i}") for i, length in enumerate(lengths)]


def test_the_longest_prompts_go_first_and_each_lot_is_ordered_by_length() -> None:
    waiting = WaitingGroups(groups_of(3, 1, 5, 4, 2), group_size=2, max_rows=5)
    assert waiting.slots == 5
    assert waiting.take(0, prompts=0) == [3, 2]
    assert waiting.take(0, prompts=0) == [4, 0]
    assert waiting.take(0, prompts=0) == [1]
    assert waiting.take(0, prompts=0) == []


def test_groups_join_when_a_quarter_of_the_places_is_free_or_none_waits_on() -> None:
    waiting = WaitingGroups(groups_of(*[1] * 30), group_size=2, max_rows=16)
    assert len(waiting.take(0, prompts=0)) == 8
    assert waiting.take(16, prompts=0) == waiting.take(14, prompts=0) == []  # 2 of 16 places: too few to pay
    assert waiting.take(13, prompts=0) == []  # room for one group
    assert len(waiting.take(12, prompts=0)) == 2
    assert len(waiting.take(0, prompts=0)) == 8
    assert len(waiting.take(0, prompts=0)) == 8
    assert len(waiting.take(8, prompts=0)) == 4
    few = WaitingGroups(groups_of(*[1] * 9), group_size=2, max_rows=16)
    few.take(0, prompts=0)
    assert few.take(15, prompts=0) == []
    assert len(few.take(14, prompts=0)) == 1  # the last that waits


def test_there_are_places_for_all_that_join() -> None:
    """Rows that grow on need not be whole groups: 4 of them and 3 groups of 3 are one more than 4 groups."""
    waiting = WaitingGroups(groups_of(*[1] * 9), group_size=3, max_rows=14)
    assert len(waiting.take(0, prompts=0)) == 4
    assert 4 + 3 * len(waiting.take(4, prompts=0)) == 13 <= waiting.slots


def test_a_group_larger_than_all_places_goes_by_itself() -> None:
    waiting = WaitingGroups(groups_of(1, 1), group_size=8, max_rows=4)
    assert (waiting.take(0, prompts=0), waiting.take(8, prompts=0), waiting.take(0, prompts=0)) == ([1], [], [0])


def test_prompts_are_run_together_while_padding_is_small() -> None:
    def cut(lengths: list[int]) -> list[list[int]]:
        return [lengths[together] for together in passes(lengths)]

    assert cut([5] * 40) == [[5] * 40]
    assert cut([3, 4, 9, 12]) == [[3, 4, 9, 12]]  # little in all
    assert cut([10] * 4 + [1000]) == [[10] * 4, [1000]]
    assert cut([900, 1000]) == [[900, 1000]]  # a small share
    assert cut([300, 1000, 1100]) == [[300], [1000, 1100]]
    lengths = sorted(7 * i % 700 + 1 for i in range(200))
    assert [length for lot in cut(lengths) for length in lot] == lengths
    for lot in cut(lengths):
        assert len(lot) * lot[-1] - sum(lot) <= max(PADDING_TOKENS, 0.25 * sum(lot))


def test_a_pass_over_very_uneven_prompts_is_cut_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_llama()
    expected = sampler(model, max_new_tokens=6).sample(PROMPTS, KEYS, 4)
    monkeypatch.setattr(growing_rows, "PADDING_TOKENS", 4)
    shapes = watch(monkeypatch, GrowingRows, "_run_prompts")
    got = sampler(model, max_new_tokens=6).sample(PROMPTS, KEYS, 4)
    assert [len(call["groups"]) for call in shapes] == [2, 1]
    assert drawn(got) == drawn(expected)


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
def test_taking_out_rows_that_ended_changes_nothing(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_llama(spread=0.3)
    expected = sampler(model, SOME_ENDS, max_new_tokens=16).sample(PROMPTS, KEYS, 8)
    assert len({len(rollout.tokens) for rollout in flat(expected)}) > 5
    monkeypatch.setattr(growing_rows, "COMPACT_WHEN_ENDED", share)
    for rows in (128, 8):
        got = sampler(model, SOME_ENDS, max_new_tokens=16, max_rows=rows).sample(PROMPTS, KEYS, 8)
        assert drawn(got) == drawn(expected)


@pytest.mark.parametrize("every", [2, 5])
def test_looking_at_the_ends_less_often_changes_nothing(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a look makes the CPU wait."""
    model = random_llama(spread=0.3)
    expected = sampler(model, SOME_ENDS, max_new_tokens=16).sample(MANY, MANY_KEYS, 4)
    monkeypatch.setitem(drawing.LOOK_EVERY, "cpu", every)
    got = sampler(model, SOME_ENDS, max_new_tokens=16, max_rows=8).sample(MANY, MANY_KEYS, 4)
    assert drawn(got) == drawn(expected)
    assert [r.logprobs for r in flat(got)] == [pytest.approx(r.logprobs, abs=1e-5) for r in flat(expected)]


@pytest.mark.parametrize("shared", [True, False])
def test_the_cache_never_grows_beyond_the_longest_row_and_its_slack(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far more groups than places: the columns in use move to the left, and the room is that of two."""
    model = random_llama(spread=0.3)
    groups = [prompt("1" * (1 + i % 9), f"s{i}") for i in range(40)]
    keys = [key(group.problem.id) for group in groups]
    moved = watch(monkeypatch, GrowingRows, "_shift")
    added = watch(monkeypatch, GrowingRows, "admit")
    got = sampler(model, SOME_ENDS, max_new_tokens=20, max_rows=8, shared_prompt=shared).sample(groups, keys, 2)
    cache = added[-1]["self"].cache
    longest = 20 if shared else 9 + 20
    assert cache.room == longest + 1 + int(0.25 * longest)
    assert cache.layers[0].keys.shape[:3] == (8, 2, cache.room)
    assert len(moved) > 1
    expected = sampler(model, SOME_ENDS, max_new_tokens=20, max_rows=1000).sample(groups, keys, 2)
    assert drawn(got) == drawn(expected)
    for one, other in zip(flat(got), flat(expected), strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_rows_that_fit_at_once_need_no_slack(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_llama()
    assert can_share_prompts(model)
    added = watch(monkeypatch, GrowingRows, "admit")
    sampler(model, max_new_tokens=7, shared_prompt=shared).sample(PROMPTS, KEYS, 4)
    assert len(added) == 1
    assert added[0]["self"].cache.room == 7 + (0 if shared else len(PROMPTS[1].prompt_tokens))


def test_no_row_is_run_beyond_its_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that has all its tokens leaves at once, however few have ended: its next position may not exist."""
    model = random_llama(spread=0.3)
    monkeypatch.setattr(growing_rows, "COMPACT_WHEN_ENDED", 2.0)
    positions: list[int] = []
    forward = model.forward

    def noted(position_ids: torch.Tensor, **rest: Any) -> Any:
        positions.append(int(position_ids.max()))
        return forward(position_ids=position_ids, **rest)

    monkeypatch.setattr(model, "forward", noted)
    sampler(model, SOME_ENDS, max_new_tokens=12, max_rows=8).sample(MANY, MANY_KEYS, 2)
    longest = max(len(group.prompt_tokens) for group in MANY)
    assert max(positions) == longest + 12 - 2


def test_waiting_groups_keep_the_batch_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far fewer passes of the model than lot after lot would take."""
    model = random_llama(spread=0.3)
    groups = [prompt("12", f"s{i}") for i in range(24)]
    keys = [key(group.problem.id) for group in groups]
    steps = watch(monkeypatch, GrowingRows, "append")
    expected = sampler(model, SOME_ENDS, max_new_tokens=40, max_rows=16).sample(groups, keys, 2)
    joined = len(steps)
    take = WaitingGroups.take
    monkeypatch.setattr(WaitingGroups, "take", lambda self, growing, _: [] if growing else take(self, 0, 0))
    steps.clear()
    got = sampler(model, SOME_ENDS, max_new_tokens=40, max_rows=16).sample(groups, keys, 2)
    assert drawn(got) == drawn(expected)
    assert joined < 0.8 * len(steps)


def test_the_room_is_zeros_at_first() -> None:
    """Masked columns weigh nothing, but nothing times NaN is NaN: fresh memory may hold any."""
    model = random_llama()
    waiting = WaitingGroups(PROMPTS, 2, 128)
    growing = GrowingRows(model, waiting, 4, share_prompts=False)
    with torch.no_grad():
        growing.admit([PROMPTS[2]], [[4, 5]])
    assert not growing.cache.layers[0].keys[2:].any()


@pytest.mark.parametrize("rows", [1000, 6])
@pytest.mark.parametrize("shared", [True, False])
def test_some_members_of_a_group_are_drawn_as_they_are_among_all(shared: bool, rows: int) -> None:
    """Uneven numbers of each group, beside groups that wait."""
    settings: dict[str, Any] = {"max_new_tokens": 16, "shared_prompt": shared}
    expected = sampler(random_llama(), SOME_ENDS, **settings).sample(MANY, MANY_KEYS, 5)
    members = [[i % 5, 4][: 1 + i % 2] if i % 5 < 4 else range(5) for i in range(len(MANY))]
    got = sampler(random_llama(), SOME_ENDS, max_rows=rows, **settings).sample(MANY, MANY_KEYS, 5, 0, members)
    assert len({len(own) for own in members}) == 3
    for whole, own, part in zip(expected, members, got, strict=True):
        assert [r.key for r in part] == [whole[member].key for member in own]
        assert [r.tokens for r in part] == [whole[member].tokens for member in own]
        for rollout, member in zip(part, own, strict=True):
            assert rollout.logprobs == pytest.approx(whole[member].logprobs, abs=1e-5)
