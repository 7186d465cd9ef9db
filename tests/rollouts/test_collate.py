from dataclasses import replace

import pytest
import torch
from fixtures_policy import TOKENIZER, scored_group
from hypothesis import given
from hypothesis import strategies as st

from grpo.records import Rollout
from grpo.rollouts.collate import collate, micro_batches, pad


def rollouts(lengths: list[int], question: str = "1+1=", name: str = "p") -> list[Rollout]:
    return [member.rollout for member in scored_group([0.0] * len(lengths), lengths, name, question)]


def test_rows_are_padded_on_the_side_that_is_asked_for() -> None:
    left, left_mask = pad([(1, 2, 3), (4,)], torch.long, "left")
    right, right_mask = pad([(1, 2, 3), (4,)], torch.long, "right")
    assert left.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert left_mask.tolist() == [[True] * 3, [False, False, True]]
    assert right.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert right_mask.tolist() == [[True] * 3, [True, False, False]]


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=6),
    st.sampled_from(["left", "right"]),
)
def test_padding_is_told_by_place_and_loses_nothing(rows: list[list[int]], side: str) -> None:
    values, mask = pad(rows, torch.long, side)
    assert [value[keep].tolist() for value, keep in zip(values, mask, strict=True)] == rows
    assert values[~mask].sum() == 0
    assert values.shape == mask.shape == (len(rows), max(map(len, rows)))


def test_a_batch_holds_whole_groups_side_by_side() -> None:
    groups = [rollouts([3, 1], "12+3="), rollouts([2, 5], "1=")]
    batch = collate([member for group in groups for member in group])
    assert batch.rows_per_prompt.tolist() == [2, 2]
    assert batch.prompts.shape == (2, 5)
    assert batch.prompts[:, -1].tolist() == TOKENIZER("==").input_ids  # no padding between prompt and completion
    assert batch.prompt_mask.tolist() == [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]
    assert batch.mask.sum(1).tolist() == [3, 1, 2, 5]
    members = [member for group in groups for member in group]
    for row, member in enumerate(members):
        assert tuple(batch.completions[row][batch.mask[row]].tolist()) == member.tokens
        assert tuple(batch.recorded_logprobs[row][batch.mask[row]].tolist()) == member.logprobs
        # the sampled end token counts although the padding is the same token
        assert member.tokens[-1] == TOKENIZER.pad_token_id


def test_micro_batches_hold_whole_groups_of_like_prompts_within_the_limit() -> None:
    groups = [rollouts([2, 2], "1" * length) for length in (10, 100, 10, 10)]
    assert list(micro_batches(groups, 4)) == [[0, 2], [3, 1]]
    assert list(micro_batches(groups, 5)) == [[0, 2], [3, 1]]
    assert list(micro_batches(groups, 2)) == [[0], [2], [3], [1]]
    assert list(micro_batches(groups, 100)) == [[0, 2, 3, 1]]


def test_a_micro_batch_is_no_wider_than_its_own_rows() -> None:
    groups = [rollouts([10, 10], "1"), rollouts([100, 10], "11")]
    first, second = (collate([member for i in chosen for member in groups[i]]) for chosen in micro_batches(groups, 2))
    assert first.completions.shape == (2, 10)
    assert second.completions.shape == (2, 100)


def test_blocks_of_uneven_size_are_packed_whole() -> None:
    blocks = [rollouts([2] * size, "1" * 4) for size in (3, 1, 2, 5, 1)]
    assert list(micro_batches(blocks, 4)) == [[0, 1], [2], [3], [4]]
    assert list(micro_batches([], 4)) == []


def test_neighbours_of_one_prompt_share_it() -> None:
    batch = collate([*rollouts([2, 2, 2], "1="), *rollouts([3], "22="), *rollouts([1], "1=")])
    assert batch.rows_per_prompt.tolist() == [3, 1, 1]
    assert batch.prompts.shape == (3, 3)


def test_what_a_tool_inserted_is_seen_and_not_counted_as_drawn() -> None:
    first, second = rollouts([3, 2])
    first = replace(first, drawn=(True, False, True), sampling_logprobs=(-0.1, 0.0, -0.2))
    batch = collate([first, second])
    assert batch.mask.tolist() == [[True] * 3, [True, True, False]]
    assert batch.drawn.tolist() == [[True, False, True], [True, True, False]]
    assert batch.sampling_logprobs.tolist()[0] == pytest.approx([-0.1, 0.0, -0.2])
    assert batch.sampling_logprobs.tolist()[1] == batch.recorded_logprobs.tolist()[1]
