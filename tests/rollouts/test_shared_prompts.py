"""Attention to prompts that are kept once, held against attention to copies and to formulas written out."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from fixtures_policy import random_llama
from fixtures_rounds import watch
from fixtures_sampling import CONFIGS, KEYS, MANY, MANY_KEYS, PROMPTS, SOME_ENDS, build, drawn, flat, sampler
from transformers import BloomConfig, BloomForCausalLM

from grpo.rollouts.growing_rows import GrowingRows, WaitingGroups
from grpo.rollouts.prompt_sharing import can_share_prompts
from grpo.rollouts.shared_prompts import (
    OwnTokensCache,
    Places,
    SharedPrompts,
    attention_part,
    joined,
    shared_attention,
)

SHARING = [name for name in CONFIGS if name != "gemma2"]  # whose scores are capped


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("rows", [128, 8])
def test_a_prompt_kept_once_gives_the_tokens_of_copies(name: str, rows: int) -> None:
    """Prompts of uneven lengths; members end one by one, and with 8 places others take theirs."""
    model = build(name)
    assert can_share_prompts(model)
    once, copied = (
        sampler(model, SOME_ENDS, max_new_tokens=20, max_rows=rows, shared_prompt=shared).sample(MANY, MANY_KEYS, 4)
        for shared in (True, False)
    )
    assert drawn(once) == drawn(copied)
    assert len({len(rollout.tokens) for rollout in flat(once)}) > 5
    for one, other in zip(flat(once), flat(copied), strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_where_scores_are_capped_prompts_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("gemma2")
    assert not can_share_prompts(model)
    made = watch(monkeypatch, GrowingRows, "__init__")
    sampler(model, max_new_tokens=3).sample(PROMPTS, KEYS, 2)
    assert made[-1]["share_prompts"] is False


def test_where_positions_bend_the_scores_prompts_are_copied() -> None:
    """Bloom's attention does not go by the interface of transformers."""
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2))
    assert not can_share_prompts(model)


def test_a_model_whose_sharing_gives_other_logits_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And said: copies cost memory."""
    monkeypatch.setattr("grpo.rollouts.shared_prompts.joined", lambda *parts: parts[0][0])
    with pytest.warns(UserWarning, match="LlamaForCausalLM.*copied for every completion"):
        assert not can_share_prompts(random_llama())


def test_keys_and_values_of_a_prompt_are_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that rows have drawn themselves take no more columns than there are steps."""
    model = random_llama()
    assert can_share_prompts(model)
    admitted = watch(monkeypatch, GrowingRows, "admit")
    sampler(model, max_new_tokens=5).sample(PROMPTS, KEYS, 16)
    cache: Any = admitted[0]["self"].cache
    assert isinstance(cache, OwnTokensCache)
    own: Any = cache.layers[0]
    prompts: Any = cache.prompts.cache.layers[0]
    longest = max(len(group.prompt_tokens) for group in PROMPTS)
    assert own.keys.shape[::2] == (3 * 16, 5)
    assert prompts.keys.shape[::2] == (3, longest)


def test_a_prompt_leaves_with_its_last_row() -> None:
    model = random_llama()
    with torch.no_grad(), shared_attention(model):
        growing = GrowingRows(model, WaitingGroups(PROMPTS, 2, 128), 8, share_prompts=True)
        growing.admit([PROMPTS[2], PROMPTS[0], PROMPTS[1]], [[4, 5], [0, 1], [2, 3]])
        cache: Any = growing.cache
        prompts: SharedPrompts = cache.prompts
        assert (prompts.names, cache.names) == ([0, 1, 2], [0, 0, 1, 1, 2, 2])
        growing.append(torch.tensor([5, 6, 7, 8, 9, 10]))
        assert growing.keep([1, 4, 5]) == [4, 1, 5]  # the last fill the gaps
        assert (sorted(prompts.names), cache.names) == ([0, 2], [2, 0, 2])
        growing.keep([1])
        assert (prompts.names, cache.names, prompts.cache.rows) == ([0], [0], 1)
        growing.keep([])
        assert (prompts.names, cache.names, prompts.cache.rows) == ([], [], 0)


def test_more_prompts_than_there_was_room_for() -> None:
    """One long row of each group can stay: then more prompts are kept than whole groups have places."""
    model = random_llama()
    prompts = SharedPrompts(model, slots=1, room=4)
    rows = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 2, 4, 4)
    [layer, *_] = prompts.cache.row_layers
    layer.end = 4
    for i in range(3):
        layer.rows = i
        layer.reserve(rows[i : i + 1], rows[i : i + 1], i + 1)
        assert layer.keys is not None
        layer.keys[i] = rows[i]
    assert layer.slots == 4
    assert layer.keys is not None
    torch.testing.assert_close(layer.keys[:3], rows)


def test_two_parts_of_attention_make_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(2, 3, n, 8, generator=generator, dtype=torch.float64) for n in (4, 9, 9))
    hidden = torch.zeros(2, 1, 1, 9, dtype=torch.float64)
    hidden[1, ..., :4] = -1e30  # of the first part nothing is seen
    parts = [
        attention_part(query, keys[:, :, cut], values[:, :, cut], hidden[..., cut], 0.3)
        for cut in (slice(4), slice(4, 9))
    ]
    whole = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=hidden, scale=0.3)
    torch.testing.assert_close(joined(*parts), whole)
    scores = 0.3 * query @ keys.mT + hidden
    torch.testing.assert_close(attention_part(query, keys, values, hidden, 0.3)[1][..., 0], scores.logsumexp(-1))


def test_rows_are_gathered_by_prompt_and_spread_again() -> None:
    places = Places.of([1, 0, 1, 1, 0], torch.device("cpu"))
    assert places.members.tolist() == [[1, 4, 1], [0, 2, 3]]  # the shorter one filled up
    assert places.back.tolist() == [3, 0, 4, 5, 1]
    rows = torch.arange(5 * 2 * 1 * 2).view(5, 2, 1, 2)  # [rows, heads, Q, D]
    gathered = places.gather(rows)
    assert gathered.shape == (2, 2, 3, 2)
    assert gathered[1, 0].tolist() == rows[[0, 2, 3], 0, 0].tolist()
    assert places.spread(gathered).equal(rows)
    in_order = Places.of([0, 0, 1, 1], torch.device("cpu"))
    assert in_order.in_order
    assert not places.in_order
    assert in_order.spread(in_order.gather(rows[:4])).equal(rows[:4])


def test_the_model_has_its_own_attention_back_afterwards() -> None:
    model = random_llama()
    before = model.config._attn_implementation
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler(model, max_new_tokens=2).sample(PROMPTS, KEYS, 2)
    assert model.config._attn_implementation == before
    with pytest.raises(RuntimeError, match="inside"), shared_attention(model):
        raise RuntimeError("inside")
    assert model.config._attn_implementation == before
