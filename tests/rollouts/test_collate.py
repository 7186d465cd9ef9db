from dataclasses import replace

import pytest
import torch
from fixtures_policy import TOKENIZER, scored_group
from hypothesis import given
from hypothesis import strategies as st

from grpo.records import Rollout
from grpo.rollouts.collate import PassLimits, collate, micro_batches, pad


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


def sizes(blocks: list[list[Rollout]], limits: PassLimits) -> list[list[list[int]]]:
    return [[list(piece) for piece in pieces] for pieces in micro_batches(blocks, limits)]


def test_micro_batches_hold_whole_groups_of_like_length_within_the_limit() -> None:
    groups = [rollouts([2, 2], "1" * length) for length in (10, 100, 10, 10)]
    assert sizes(groups, PassLimits(4)) == [[[0, 1], [4, 5]], [[6, 7], [2, 3]]]
    assert sizes(groups, PassLimits(5)) == [[[0, 1], [4, 5]], [[6, 7], [2, 3]]]
    assert sizes(groups, PassLimits(2)) == [[[0, 1]], [[4, 5]], [[6, 7]], [[2, 3]]]
    assert sizes(groups, PassLimits(None)) == [[[0, 1], [4, 5], [6, 7], [2, 3]]]
    assert sizes([], PassLimits(4)) == []


def test_a_group_that_does_not_fit_is_cut() -> None:
    groups = [rollouts([2] * size, "1" * 4) for size in (3, 5)]
    assert sizes(groups, PassLimits(2)) == [[[2], [7]], [[0, 1]], [[3, 4]], [[5, 6]]]
    assert sizes(groups, PassLimits(1)) == [[[i]] for i in range(8)]


def test_a_token_budget_counts_padding_and_a_prompt_once_for_all_that_share_it() -> None:
    # a prompt of 10 and 3 tokens read of each of two completions: 16; then 12 and 10
    groups = [rollouts([4, 4], "1" * 10), rollouts([2, 2], "1" * 10), rollouts([1, 1], "1" * 10)]
    assert sizes(groups, PassLimits(None, 3 * 16)) == [[[4, 5], [2, 3], [0, 1]]]
    assert sizes(groups, PassLimits(None, 3 * 16 - 1)) == [[[4, 5], [2, 3]], [[0, 1]]]
    assert sizes(groups, PassLimits(None, 15)) == [[[4, 5]], [[2, 3]], [[0]], [[1]]]
    assert sizes(groups, PassLimits(None, 1)) == [[[i]] for i in (4, 5, 2, 3, 0, 1)]  # nothing is too long to be run
    assert sizes(groups, PassLimits(4, 3 * 16)) == [[[4, 5], [2, 3]], [[0, 1]]]  # both limits hold


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=5),
    st.one_of(st.none(), st.integers(1, 8)),
    st.one_of(st.none(), st.integers(1, 60)),
    st.booleans(),
)
def test_every_completion_is_run_once_and_limits_hold(
    lengths: list[list[int]], rows: int | None, tokens: int | None, shared: bool
) -> None:
    blocks = [rollouts(of_block, "1" * (3 + i)) for i, of_block in enumerate(lengths)]
    flat = [rollout for block in blocks for rollout in block]
    batches = sizes(blocks, PassLimits(rows, tokens, shared))
    assert sorted(i for pieces in batches for piece in pieces for i in piece) == list(range(len(flat)))
    for pieces in batches:
        read = [
            len(flat[piece[0]].group.prompt_tokens) + sum(len(flat[i].tokens) - 1 for i in piece) for piece in pieces
        ]
        assert all(len({flat[i].group.prompt_tokens for i in piece}) == 1 for piece in pieces)
        assert shared or max(map(len, pieces)) == 1
        assert rows is None or sum(map(len, pieces)) <= rows
        assert tokens is None or max(read) * len(read) <= tokens or pieces == [pieces[0][:1]]


def test_siblings_share_a_pass_until_their_attention_costs_more_than_the_prompt_again() -> None:
    [short] = sizes([rollouts([65] * 8, "1" * 30)], PassLimits(None, width=64))
    assert [len(piece) for piece in short] == [8]  # 512 tokens
    [long] = sizes([rollouts([66] * 8, "1" * 30)], PassLimits(None, width=64))
    assert sorted(len(piece) for piece in long) == [1, 7]
    [wide] = sizes([rollouts([66] * 8, "1" * 30)], PassLimits(None, width=4096))
    assert [len(piece) for piece in wide] == [8]


def test_a_micro_batch_is_no_wider_than_its_own_rows() -> None:
    groups = [rollouts([10, 10], "1"), rollouts([100, 10], "11")]
    flat = [member for group in groups for member in group]
    first, second = (
        collate([flat[i] for piece in pieces for i in piece]) for pieces in micro_batches(groups, PassLimits(2))
    )
    assert first.completions.shape == (2, 10)
    assert second.completions.shape == (2, 100)


def test_passes_over_a_prompt_can_be_shared_by_fewer_than_stand_side_by_side() -> None:
    batch = collate([*rollouts([2, 2, 2], "1="), *rollouts([3], "22=")], [2, 1, 1])
    assert batch.rows_per_prompt.tolist() == [2, 1, 1]
    assert [prompt[mask.bool()].tolist() for prompt, mask in zip(batch.prompts, batch.prompt_mask, strict=True)] == [
        TOKENIZER(question).input_ids for question in ("1=", "1=", "22=")
    ]


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
