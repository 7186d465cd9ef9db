"""Sampling on several families of models, with rows that leave and groups that join, held against other code."""

from __future__ import annotations

import pytest
import torch
from fixtures_policy import random_llama
from fixtures_rounds import watch
from fixtures_sampling import (
    CONFIGS,
    DIGITS,
    END,
    KEYS,
    MANY,
    MANY_KEYS,
    PROMPTS,
    SOME_ENDS,
    build,
    drawn,
    flat,
    full_logprobs,
    left_padded,
    sampler,
)
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from grpo.rollouts.growing_rows import GrowingRows
from grpo.rollouts.sampling import require_float64

# Its scores are capped, so that prompts are copied, which is said.
pytestmark = pytest.mark.filterwarnings("ignore:Gemma2ForCausalLM has the attention")


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of uneven lengths; rows end at different steps, leave, and others take their places."""
    model = build(name)
    ids, mask = left_padded(MANY)
    ends = (END, *DIGITS)
    expected = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=16, eos_token_id=list(ends), pad_token_id=END
    )[:, ids.shape[1] :]
    admitted = watch(monkeypatch, GrowingRows, "admit")
    rollouts = sampler(model, ends, temperature=0.0, max_new_tokens=16, max_rows=4).sample(MANY, MANY_KEYS, 1)
    assert len(admitted) > 2
    for [rollout], row in zip(rollouts, expected.tolist(), strict=True):
        assert rollout.tokens == tuple(row[: len(rollout.tokens)])
        assert set(row[len(rollout.tokens) :]) <= {END}
    assert len({rollout.tokens for [rollout] in rollouts}) > 5
    assert len({len(rollout.tokens) for [rollout] in rollouts}) > 1


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("name", CONFIGS)
def test_recorded_logprobs_are_those_of_a_full_pass(name: str, temperature: float) -> None:
    model = build(name)
    settings = {"temperature": temperature, "max_new_tokens": 10, "max_rows": 12}
    for rollout in flat(sampler(model, (END, *DIGITS), **settings).sample(MANY, MANY_KEYS, 4)):
        recorded = torch.tensor(rollout.logprobs)
        torch.testing.assert_close(recorded, full_logprobs(model, rollout, temperature), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_groups_that_join_growing_rows_are_sampled_as_if_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    expected = sampler(model, SOME_ENDS, max_new_tokens=20).sample(MANY, MANY_KEYS, 4)
    admitted = watch(monkeypatch, GrowingRows, "admit")
    got = sampler(model, SOME_ENDS, max_new_tokens=20, max_rows=8).sample(MANY, MANY_KEYS, 4)
    assert len(admitted) > 4
    assert drawn(got) == drawn(expected)
    for one, other in zip(flat(got), flat(expected), strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_neighbours_do_not_matter(name: str) -> None:
    model = build(name)
    together = sampler(model, max_new_tokens=10).sample(PROMPTS, KEYS, 3)
    for i, group in enumerate(PROMPTS):
        [alone] = sampler(model, max_new_tokens=10).sample([group], [KEYS[i]], 3)
        assert drawn([alone]) == drawn([together[i]])
        for one, other in zip(alone, together[i], strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        [[first]] = sampler(model, max_new_tokens=10).sample([group], [KEYS[i]], 1)
        assert first.tokens == together[i][0].tokens


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_a_model_in_half_precision_is_sampled_as_it_scores(name: str) -> None:
    """Two ways through bfloat16 differ by its rounding, some hundredths of a nat here, and by no more."""
    model = build(name, torch.bfloat16)
    with torch.no_grad():  # logits of a few, as a trained model has
        model.get_output_embeddings().weight.mul_(0.1)
    rollouts = flat(sampler(model, SOME_ENDS, max_new_tokens=10, max_rows=12).sample(MANY, MANY_KEYS, 4))
    recorded = torch.tensor([value for rollout in rollouts for value in rollout.logprobs])
    scored = torch.cat([full_logprobs(model, rollout) for rollout in rollouts])
    assert scored.dtype == torch.float32
    assert (recorded - scored).abs().max() < 0.1
    assert (recorded - scored).abs().mean() < 0.01
    assert any(value != float(torch.tensor(value).bfloat16()) for value in rollouts[0].logprobs)  # finer than bfloat16


@pytest.mark.parametrize("shared_prompt", [True, False])
def test_under_autocast_sampling_and_scoring_see_one_precision(shared_prompt: bool) -> None:
    model = random_llama(spread=0.3)
    with torch.autocast("cpu", torch.bfloat16):
        rollouts = flat(sampler(model, max_new_tokens=8, shared_prompt=shared_prompt).sample(MANY, MANY_KEYS, 4))
        inside = torch.cat([full_logprobs(model, rollout) for rollout in rollouts])
    outside = torch.cat([full_logprobs(model, rollout) for rollout in rollouts])
    recorded = torch.tensor([value for rollout in rollouts for value in rollout.logprobs])
    assert (recorded - inside).abs().mean() < (recorded - outside).abs().mean() / 2


def test_training_after_sampling_under_autocast_reaches_every_weight() -> None:
    """Half-precision copies made while sampling have no gradient and must not be taken for those of the training."""
    model = random_llama()
    with torch.autocast("cpu", torch.bfloat16):
        sampler(model, max_new_tokens=2).sample(PROMPTS, KEYS, 2)
        model(input_ids=torch.tensor([PROMPTS[0].prompt_tokens])).logits.float().square().sum().backward()
    assert {name for name, weight in model.named_parameters() if weight.grad is None} == set()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (
            lambda: MambaForCausalLM(MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1)),
            "MambaForCausalLM.*running state",
        ),
        (
            lambda: Qwen3NextForCausalLM(
                Qwen3NextConfig(
                    vocab_size=9,
                    hidden_size=8,
                    intermediate_size=8,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    num_key_value_heads=1,
                    layer_types=["linear_attention", "full_attention"],
                    num_experts=2,
                    moe_intermediate_size=4,
                    shared_expert_intermediate_size=4,
                )
            ),
            "Qwen3NextForCausalLM",
        ),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=9, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2)
            ),
            "T5ForConditionalGeneration.*encoder and a decoder",
        ),
    ],
    ids=["mamba", "linear attention", "encoder-decoder"],
)
def test_a_model_whose_past_is_more_than_keys_and_values_is_refused(model, why: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=f"(?s){why}.*choose a decoder"):
        sampler(model())


def test_a_device_without_64_bit_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mps.*trainer\.accelerator to cpu"):
        require_float64(torch.device("mps"))
    require_float64(torch.device("cpu"))
