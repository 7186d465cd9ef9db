"""Attention to prompts that are kept once, held against attention to copies and to formulas written out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fixtures_policy import key, prompt, random_llama
from fixtures_rounds import watch
from fixtures_sampling import (
    CONFIGS,
    KEYS,
    MANY,
    MANY_KEYS,
    PROMPTS,
    SIZES,
    SOME_ENDS,
    build,
    drawn,
    flat,
    full_logprobs,
    sampler,
)
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
)

from grpo.rollouts.drawing import Drawing
from grpo.rollouts.growing_rows import MOST_PROMPTS, GrowingRows, WaitingGroups
from grpo.rollouts.shared_attention import hiding, masked_scores, shared_attention, weighed_sums
from grpo.rollouts.shared_prompts import OwnTokensCache, Places, SharedPrompts
from grpo.rollouts.sharing_trial import can_share_prompts

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


def test_where_the_attention_is_another_prompts_are_copied_and_that_is_said_and_recorded() -> None:
    """Of Gemma 2, whose scores are capped."""
    model = build("gemma2")
    with pytest.warns(UserWarning, match="Gemma2ForCausalLM has the attention 'eager'.*each completion has a copy"):
        [[rollout, *_], *_] = sampler(model, max_new_tokens=3).sample(PROMPTS, KEYS, 2)
    assert json.loads(rollout.sampling_policy.settings)["shared_prompt"] is False
    assert not can_share_prompts(model)  # and no second warning, which would be an error here
    llama = random_llama()
    [[rollout, *_], *_] = sampler(llama, max_new_tokens=3).sample(PROMPTS, KEYS, 2)
    assert json.loads(rollout.sampling_policy.settings)["shared_prompt"] is True


def test_a_model_that_is_given_another_attention_is_asked_again() -> None:
    model = random_llama()
    assert can_share_prompts(model)
    model.set_attn_implementation("eager")
    with pytest.warns(UserWarning, match="'eager'"):
        assert not can_share_prompts(model)
    model.set_attn_implementation("sdpa")
    assert can_share_prompts(model)


MLA: dict[str, Any] = SIZES | {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 2,
    "first_k_dense_replace": 3,
}


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)), "Bloom"),
        # keys are kept in a smaller form, and made after the cache
        (
            lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**MLA)),
            "changes its keys between the cache and the attention",
        ),
        # a temperature that goes by the position
        (
            lambda: Llama4ForCausalLM(
                Llama4TextConfig(
                    **SIZES, head_dim=8, attention_chunk_size=None, no_rope_layers=[1, 0, 1], floor_scale=8
                )
            ),
            "scales its attention",
        ),
    ],
)
def test_what_cannot_be_shared_is_copied_and_why_is_said(model: Callable[[], Any], why: str) -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=why):
        assert not can_share_prompts(model().eval())


def test_a_model_whose_sharing_gives_other_logits_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = Places.spread
    monkeypatch.setattr(Places, "spread", lambda self, grouped: spread(self, grouped).flip(0))
    with pytest.warns(UserWarning, match="LlamaForCausalLM gives other logits"):
        assert not can_share_prompts(random_llama())


def test_running_out_of_memory_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("full")

    model = random_llama()
    with monkeypatch.context() as patch:
        patch.setattr(Places, "gather", full)
        with pytest.raises(torch.OutOfMemoryError):
            can_share_prompts(model)
    assert can_share_prompts(model)


def test_each_part_of_a_model_has_its_own_attention_back() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = Gemma3Config(
        text_config=Gemma3TextConfig(vocab_size=64, sliding_window=4, **sizes, **heads),
        vision_config={"num_attention_heads": 2, "image_size": 8, "patch_size": 4, **sizes},
        mm_tokens_per_image=1,
    )
    kinds = {"": "sdpa", "text_config": "sdpa", "vision_config": "eager"}
    model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation=kinds)
    parts = (model.config, model.config.text_config, model.config.vision_config)
    before = [part._attn_implementation for part in parts]
    assert before == ["sdpa", "sdpa", "eager"]
    with shared_attention(model):
        assert [part._attn_implementation for part in parts[1:]] == ["shared_prompts", "eager"]
    assert [part._attn_implementation for part in parts] == before


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_in_half_precision_sharing_is_as_near_to_a_full_pass_as_copies(name: str) -> None:
    model = build(name, torch.bfloat16)
    with torch.no_grad():  # logits of a few, as a trained model has
        model.get_output_embeddings().weight.mul_(0.1)
    distance = {}
    for shared in (True, False):
        rollouts = flat(sampler(model, SOME_ENDS, max_new_tokens=12, shared_prompt=shared).sample(MANY, MANY_KEYS, 8))
        gaps = [(torch.tensor(rollout.logprobs) - full_logprobs(model, rollout)).abs() for rollout in rollouts]
        distance[shared] = float(torch.cat(gaps).mean())
    assert distance[True] < 1.5 * distance[False]


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


def test_single_rows_that_outlast_their_groups_keep_no_more_prompts_than_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 4 members all but the first end at once; without the bound 13 prompts would find room in 16 places."""
    model = random_llama(spread=0.3)
    groups = [prompt("12", f"s{i}") for i in range(40)]
    keys = [key(group.problem.id) for group in groups]
    kept: list[int] = []
    arrange = SharedPrompts.arrange
    monkeypatch.setattr(
        SharedPrompts, "arrange", lambda self, names: (kept.append(len(self.names)), arrange(self, names))[1]
    )
    note_ends = Drawing._note_ends

    def only_first_members_go_on(self: Drawing, drawn: Any) -> Any:
        drawn = note_ends(self, drawn)
        self.ended = torch.tensor([row % 4 != 0 for row in self.growing.rows])
        return drawn

    monkeypatch.setattr(Drawing, "_note_ends", only_first_members_go_on)
    sampler(model, (), max_new_tokens=30, max_rows=16).sample(groups, keys, 4)
    assert max(kept) == MOST_PROMPTS * 4


def test_parts_of_attention_make_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(2, 3, n, 8, generator=generator, dtype=torch.float64) for n in (4, 9, 9))
    hidden = torch.zeros(2, 9, dtype=torch.bool)
    hidden[1, :4] = True  # of the first part nothing is seen
    mask = hiding(hidden)
    parts = slice(4), slice(4, 9)
    scores = [masked_scores(query, keys[:, :, part], mask[..., part], 0.3) for part in parts]
    largest = torch.maximum(*(part.amax(-1, keepdim=True) for part in scores))
    sums = [weighed_sums(one, largest, values[:, :, part]) for one, part in zip(scores, parts, strict=True)]
    joined = (sums[0][1] + sums[1][1]) / (sums[0][0] + sums[1][0])
    whole = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask.double(), scale=0.3)
    torch.testing.assert_close(joined, whole)


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
    sampler(model, max_new_tokens=2).sample(PROMPTS, KEYS, 2)
    assert model.config._attn_implementation == before
    with pytest.raises(RuntimeError, match="inside"), shared_attention(model):
        raise RuntimeError("inside")
    assert model.config._attn_implementation == before
