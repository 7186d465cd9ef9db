import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fixtures_policy import TOKENIZER, key, prompt, random_llama
from scipy.stats import chisquare
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from grpo.records import PromptGroup, Rollout, RolloutKey
from grpo.rollouts import sampling
from grpo.rollouts.draws import distribution_cuts, draw_cut_tokens
from grpo.rollouts.sampling import Sampler, SamplingSettings, draw_tokens, keyed_uniforms

END = TOKENIZER.eos_token_id
DIGITS = tuple(TOKENIZER("0123456789").input_ids)

SIZES = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": END,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "gemma": GemmaConfig(**SIZES, head_dim=8),
    # windows shorter than the prompts, so that what has left them matters
    "gemma2": Gemma2Config(**SIZES, head_dim=8, sliding_window=4),
    "gemma3": Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "gpt2": GPT2Config(
        vocab_size=len(TOKENIZER),
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=64,
        initializer_range=0.3,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
    ),
}
PROMPTS = [prompt("1+2=", "a"), prompt("12345 + 67890 =", "b"), prompt("x", "c")]
KEYS = [key("a"), key("b"), key("c")]


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(3)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    return model.eval()


def sampler(model: PreTrainedModel, ends: tuple[int, ...] = (END,), **settings: float) -> Sampler:
    return Sampler(model, TOKENIZER, ends, SamplingSettings(**settings))  # type: ignore[arg-type]


def drawn(groups: list[list[Rollout]]) -> list[list[tuple[int, ...]]]:
    return [[rollout.tokens for rollout in group] for group in groups]


def full_logprobs(model: PreTrainedModel, rollout: Rollout, temperature: float) -> torch.Tensor:
    """By one plain pass over prompt and completion, without padding, cache or sharing."""
    ids = torch.tensor([[*rollout.group.prompt_tokens, *rollout.tokens]])
    start = len(rollout.group.prompt_tokens)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[0, start:, None])[:, 0]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    model = build(name)
    width = max(len(group.prompt_tokens) for group in PROMPTS)
    ids = torch.full((len(PROMPTS), width), END)
    mask = torch.zeros_like(ids)
    for row, group in enumerate(PROMPTS):
        ids[row, width - len(group.prompt_tokens) :] = torch.tensor(group.prompt_tokens)
        mask[row, width - len(group.prompt_tokens) :] = 1
    ends = (END, *DIGITS)
    expected = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=12, eos_token_id=list(ends), pad_token_id=END
    )[:, width:]
    rollouts = sampler(model, ends, temperature=0.0, max_new_tokens=12).sample(PROMPTS, KEYS, 1)
    for [rollout], row in zip(rollouts, expected.tolist(), strict=True):
        assert rollout.tokens == tuple(row[: len(rollout.tokens)])
        assert set(row[len(rollout.tokens) :]) <= {END}
    assert len({rollout.tokens for [rollout] in rollouts}) > 1


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("name", CONFIGS)
def test_recorded_logprobs_are_those_of_a_full_pass(name: str, temperature: float) -> None:
    model = build(name)
    groups = sampler(model, (END, *DIGITS), temperature=temperature, max_new_tokens=10).sample(PROMPTS, KEYS, 4)
    for rollout in (rollout for group in groups for rollout in group):
        recorded = torch.tensor(rollout.logprobs)
        torch.testing.assert_close(recorded, full_logprobs(model, rollout, temperature), atol=1e-5, rtol=1e-5)


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


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
def test_taking_out_rows_that_ended_changes_nothing(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_llama(spread=0.3)
    ends = (END, *range(2, 22))  # so many that rows end at every step
    expected = sampler(model, ends, max_new_tokens=16).sample(PROMPTS, KEYS, 8)
    assert len({len(rollout.tokens) for group in expected for rollout in group}) > 5
    monkeypatch.setattr(sampling, "COMPACT_WHEN_ENDED", share)
    assert drawn(sampler(model, ends, max_new_tokens=16).sample(PROMPTS, KEYS, 8)) == drawn(expected)


@pytest.mark.parametrize("rows", [1, 5, 9, 128])
def test_how_many_rows_go_side_by_side_changes_nothing(rows: int) -> None:
    model = random_llama()
    expected = sampler(model, max_new_tokens=6).sample(PROMPTS, KEYS, 4)
    got = sampler(model, max_new_tokens=6, max_rows=rows).sample(PROMPTS, KEYS, 4)
    assert drawn(got) == drawn(expected)
    assert [group[0].group for group in got] == PROMPTS
    assert [[rollout.key.member for rollout in group] for group in got] == [[0, 1, 2, 3]] * 3


def test_members_differ_and_the_same_keys_draw_the_same() -> None:
    model = random_llama()
    once = sampler(model, max_new_tokens=8).sample(PROMPTS[:1], KEYS[:1], 8)
    again = sampler(model, max_new_tokens=8).sample(PROMPTS[:1], KEYS[:1], 8)
    assert once == again
    assert len(set(drawn(once)[0])) == 8
    other_seed = sampler(model, max_new_tokens=8).sample(PROMPTS[:1], [replace(KEYS[0], seed=2)], 8)
    assert not set(drawn(other_seed)[0]) & set(drawn(once)[0])


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_completion_ends_at_its_end_token_or_at_the_limit(limit: int) -> None:
    ends = (END, *DIGITS, *TOKENIZER("\n").input_ids)
    groups = sampler(random_llama(), ends, max_new_tokens=limit).sample(PROMPTS, KEYS, 32)
    rollouts = [rollout for group in groups for rollout in group]
    for rollout in rollouts:
        assert 1 <= len(rollout.tokens) <= limit
        assert len(rollout.logprobs) == len(rollout.tokens)
        assert not set(rollout.tokens[:-1]) & set(ends)
        if rollout.finish_reason == "end_token":
            assert rollout.tokens[-1] in ends
            assert rollout.text == TOKENIZER.decode(rollout.tokens[:-1])
        else:
            assert len(rollout.tokens) == limit
            assert rollout.tokens[-1] not in ends
            assert rollout.text == TOKENIZER.decode(rollout.tokens)
    assert {rollout.finish_reason for rollout in rollouts} == {"end_token", "length"}


def test_the_mode_of_the_model_is_given_back() -> None:
    model = random_llama()
    for training in (True, False):
        model.train(training)
        sampler(model, max_new_tokens=2).sample(PROMPTS, KEYS, 2)
        assert model.training is training
    model.train()
    with pytest.raises(IndexError):
        sampler(model, max_new_tokens=2).sample([replace(PROMPTS[0], prompt_tokens=(10**6,))], KEYS[:1], 2)
    assert model.training


def test_no_groups_give_no_rollouts() -> None:
    assert sampler(random_llama()).sample([], [], 4) == []


def test_the_same_problem_drawn_again_samples_afresh() -> None:
    again = replace(KEYS[0], occurrence=1)
    first, second = sampler(random_llama(), max_new_tokens=8).sample([PROMPTS[0]] * 2, [KEYS[0], again], 4)
    assert not set(drawn([first])[0]) & set(drawn([second])[0])


def test_uniforms_of_a_longer_sequence_begin_with_the_shorter() -> None:
    assert keyed_uniforms(key(), 50)[:7].tolist() == keyed_uniforms(key(), 7).tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"purpose": "validation"},
        {"round": 1},
        {"problem_id": "q"},
        {"template_id": "other"},
        {"occurrence": 1},
        {"member": 1},
        {"draw": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_part_of_the_key_counts(change: dict[str, object]) -> None:
    other: RolloutKey = replace(key(), **change)  # type: ignore[arg-type]
    assert not set(keyed_uniforms(key(), 8)) & set(keyed_uniforms(other, 8))


def test_uniforms_over_many_keys_are_uniform_at_every_position() -> None:
    numbers = np.stack([keyed_uniforms(key().of_member(member), 3) for member in range(2000)])
    for position in range(3):
        counts, _ = np.histogram(numbers[:, position], bins=20, range=(0, 1))
        assert chisquare(counts).pvalue > 1e-3


def draw(logits: list[float], uniform: float, temperature: float = 1.0) -> tuple[int, float]:
    tokens, logprobs = draw_tokens(torch.tensor([logits]), torch.tensor([uniform], dtype=torch.float64), temperature)
    return int(tokens), float(logprobs)


def test_temperature_divides_the_logits_once() -> None:
    # softmax([4, 2, 0]): log of 1 / (1 + e^-2 + e^-4)
    assert draw([2.0, 1.0, 0.0], 0.0, 0.5) == (0, pytest.approx(-0.142932, abs=1e-6))


def test_a_very_low_temperature_stays_finite() -> None:
    assert draw([2.0, 1.0, 0.0], 0.999, 1e-4) == (0, 0.0)


def test_temperature_zero_takes_the_largest_logit() -> None:
    token, logprob = draw([0.0, 2.0, 1.0], 0.999, 0.0)
    assert token == 1
    assert logprob == pytest.approx(-math.log(1 + math.exp(-1) + math.exp(-2)), abs=1e-6)


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.2, 0.0, 0.25, 0.05], dtype=torch.float64)
    uniforms = torch.tensor([keyed_uniforms(key().of_member(m), 1)[0] for m in range(4000)], dtype=torch.float64)
    logits = (probabilities.log() * 0.7).float().expand(4000, -1)
    tokens, logprobs = draw_tokens(logits, uniforms, 0.7)
    counts = torch.bincount(tokens, minlength=5)
    assert counts[2] == 0
    possible = probabilities > 0
    assert chisquare(counts[possible], 4000 * probabilities[possible]).pvalue > 1e-3
    torch.testing.assert_close(logprobs.double(), probabilities.log()[tokens], atol=1e-6, rtol=1e-6)


JUST_BELOW_ONE = math.nextafter(1.0, 0.0)


@pytest.mark.parametrize("size", [3, 100, 5000])
@pytest.mark.parametrize("seed", range(8))
def test_the_ends_of_the_uniform_range_never_fall_on_impossible_tokens(size: int, seed: int) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    possible = slice(size // 3, 2 * size // 3)
    cut = torch.full((size,), -math.inf)
    cut[possible] = logits[possible]
    first, last = size // 3, 2 * size // 3 - 1
    assert draw(cut.tolist(), 0.0)[0] == first
    assert draw(cut.tolist(), JUST_BELOW_ONE)[0] == last


def test_each_uniform_falls_in_its_tokens_share() -> None:
    logits = [math.log(0.25), math.log(0.25), math.log(0.5)]
    assert [draw(logits, u)[0] for u in (0.0, 0.2499, 0.2501, 0.4999, 0.5001, JUST_BELOW_ONE)] == [0, 0, 1, 1, 2, 2]


def test_half_precision_logits_give_single_precision_logprobs() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.bfloat16)
    _, logprobs = draw_tokens(logits, torch.zeros(1, dtype=torch.float64), 0.5)
    assert logprobs.dtype == torch.float32
    assert float(logprobs) == pytest.approx(-0.142932, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "key_named"),
    [
        ({"temperature": -0.1}, "sampling.temperature"),
        ({"temperature": math.inf}, "sampling.temperature"),
        ({"temperature": math.nan}, "sampling.temperature"),
        ({"temperature": 1e-6}, "sampling.temperature"),
        ({"max_new_tokens": 0}, "sampling.max_new_tokens"),
        ({"max_rows": 0}, "sampling.max_rows"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"top_p": 1.1}, "sampling.top_p"),
        ({"top_p": math.nan}, "sampling.top_p"),
        ({"top_k": -1}, "sampling.top_k"),
        ({"min_p": -0.1}, "sampling.min_p"),
        ({"min_p": 1.1}, "sampling.min_p"),
        ({"min_p": math.nan}, "sampling.min_p"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, float], key_named: str) -> None:
    with pytest.raises(ValueError, match=key_named):
        SamplingSettings(**settings)  # type: ignore[arg-type]


def test_a_prompt_is_run_once_however_large_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_llama()
    shapes = []
    forward = model.forward
    monkeypatch.setattr(
        model,
        "forward",
        lambda input_ids, **rest: (shapes.append(tuple(input_ids.shape)), forward(input_ids, **rest))[1],
    )
    long: PromptGroup = PROMPTS[1]
    sampler(model, max_new_tokens=3).sample([long], KEYS[:1], 8)
    assert shapes[0] == (1, len(long.prompt_tokens))
    assert all(rows <= 8 and width == 1 for rows, width in shapes[1:])


def cut_probabilities(probabilities: list[float], temperature: float = 1.0, **cuts: float) -> list[float]:
    """The cut distribution, read off the shares of the uniform range that fall to each token."""
    logits = torch.tensor(probabilities, dtype=torch.float64).log().float() * temperature
    numbers = (torch.arange(7000, dtype=torch.float64) + 0.5) / 7000
    settings = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | cuts
    tokens, logprobs, cut = draw_cut_tokens(
        logits.expand(7000, -1),
        numbers,
        temperature,
        distribution_cuts(**settings),  # type: ignore[arg-type]
    )
    torch.testing.assert_close(logprobs.exp(), torch.tensor(probabilities)[tokens])
    shares = torch.bincount(tokens, minlength=len(probabilities)) / 7000
    torch.testing.assert_close(cut.exp(), shares[tokens], atol=2e-4, rtol=0)
    return shares.tolist()


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 9}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        ({"top_p": 0.41}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.71}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 0.91}, [0.1, 0.4, 0.2, 0.3]),
        ({"min_p": 0.24}, [0.1, 0.4, 0.2, 0.3]),
        ({"min_p": 0.26}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"min_p": 0.76}, [0, 1, 0, 0]),
        ({"min_p": 1.0}, [0, 1, 0, 0]),
        # of the two that top-k leaves, the first has 4/7: more than top-p asks for (before top-k it had less)
        ({"top_k": 2, "top_p": 0.5}, [0, 1, 0, 0]),
        ({"top_k": 3, "min_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.95, "min_p": 0.26}, [0, 4 / 9, 2 / 9, 3 / 9]),
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_cut_distribution_is_the_one_worked_out_by_hand(
    cuts: dict[str, float], expected: list[float], temperature: float
) -> None:
    assert cut_probabilities([0.1, 0.4, 0.2, 0.3], temperature, **cuts) == pytest.approx(expected, abs=2e-4)


def test_equally_likely_tokens_at_the_edge() -> None:
    """Top-p keeps the lower ids, so that every machine keeps the same; top-k keeps them all."""
    even = [0.25] * 4
    assert cut_probabilities(even, top_p=0.5) == pytest.approx([0.5, 0.5, 0, 0])
    assert cut_probabilities(even, top_k=2) == pytest.approx(even)


@pytest.mark.parametrize("cuts", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.8}], ids=str)
def test_the_cuts_are_those_of_transformers(cuts: dict[str, float]) -> None:
    logits = torch.randn(64, 200, generator=torch.Generator().manual_seed(0)) * 2
    warpers = LogitsProcessorList()
    if "top_k" in cuts:
        warpers.append(TopKLogitsWarper(int(cuts["top_k"])))
    if "top_p" in cuts:
        warpers.append(TopPLogitsWarper(cuts["top_p"]))
    if "min_p" in cuts:
        warpers.append(MinPLogitsWarper(cuts["min_p"]))
    settings = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | cuts
    ours = distribution_cuts(**settings)(torch.LongTensor(), logits)  # type: ignore[arg-type]
    torch.testing.assert_close(ours, warpers(torch.LongTensor(), logits), rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("uniform", [0.0, JUST_BELOW_ONE])
def test_a_cut_draw_always_has_positive_probability(seed: int, uniform: float) -> None:
    logits = torch.randn(50, 1000, generator=torch.Generator().manual_seed(seed)) * 30
    cuts = distribution_cuts(20, 0.9, 0.01)
    tokens, logprobs, cut = draw_cut_tokens(logits, torch.full((50,), uniform, dtype=torch.float64), 1.0, cuts)
    kept = cuts(torch.LongTensor(), torch.log_softmax(logits, -1))
    assert torch.isfinite(kept.gather(-1, tokens[:, None])).all()
    assert torch.isfinite(cut).all()
    assert (cut >= logprobs).all()


def test_a_cut_rollout_is_the_inverse_of_the_cut_cumulative_distribution() -> None:
    """Every token again, by other code: a plain pass, a sort, its uniform number. Ends and taken-out rows included."""
    model = random_llama(spread=0.3)
    ends = (END, *range(2, 22))
    settings = {"temperature": 0.7, "top_p": 0.8, "max_new_tokens": 12}
    groups = sampler(model, ends, **settings).sample(PROMPTS, KEYS, 4)
    for rollout in (rollout for group in groups for rollout in group):
        assert rollout.sampling_logprobs is not None
        assert len(rollout.sampling_logprobs) == len(rollout.tokens)
        torch.testing.assert_close(
            torch.tensor(rollout.logprobs), full_logprobs(model, rollout, 0.7), atol=1e-5, rtol=1e-5
        )
        ids = torch.tensor([[*rollout.group.prompt_tokens, *rollout.tokens]])
        with torch.no_grad():
            rows = model(input_ids=ids).logits[0, len(rollout.group.prompt_tokens) - 1 : -1] / 0.7
        numbers = keyed_uniforms(rollout.key, len(rollout.tokens))
        for row, number, token, logprob in zip(rows, numbers, rollout.tokens, rollout.sampling_logprobs, strict=True):
            likely = torch.softmax(row.double(), -1).numpy()
            best = np.argsort(-likely)
            kept = best[: int(np.searchsorted(np.cumsum(likely[best]), 0.8)) + 1]
            cut = np.zeros_like(likely)
            cut[kept] = likely[kept] / likely[kept].sum()
            assert token == int(np.searchsorted(np.cumsum(cut), number, side="right"))
            assert logprob == pytest.approx(math.log(cut[token]), abs=1e-5)
    assert any(len(rollout.tokens) < 12 for group in groups for rollout in group)


def test_without_a_cut_there_is_one_log_probability() -> None:
    model = random_llama()
    plain = sampler(model, max_new_tokens=6).sample(PROMPTS, KEYS, 2)
    greedy = sampler(model, temperature=0.0, max_new_tokens=6).sample(PROMPTS, KEYS, 2)
    cut_greedy = sampler(model, temperature=0.0, max_new_tokens=6, top_p=0.1, top_k=3, min_p=0.5)
    assert drawn(cut_greedy.sample(PROMPTS, KEYS, 2)) == drawn(greedy)
    for rollout in (rollout for group in [*plain, *greedy, *cut_greedy.sample(PROMPTS, KEYS, 2)] for rollout in group):
        assert rollout.sampling_logprobs is None
        assert rollout.drawn is None
        assert rollout.tool_calls == ()


def test_every_rollout_says_what_drew_it() -> None:
    settings = SamplingSettings(max_new_tokens=2, top_k=3)
    [[rollout], *_] = Sampler(random_llama(), TOKENIZER, (END,), settings).sample(PROMPTS, KEYS, 1, weights_version=7)
    assert rollout.sampling_policy == settings.sampling_policy(7)
    assert rollout.sampling_policy.weights_version == 7
    assert rollout.sampling_policy.tools == "{}"
    assert rollout.sampling_policy.engine == "transformers"
    written = rollout.sampling_policy.settings
    assert json.loads(written) == {
        "temperature": 1.0,
        "max_new_tokens": 2,
        "max_rows": 128,
        "top_p": 1.0,
        "top_k": 3,
        "min_p": 0.0,
    }
    assert written == json.dumps(json.loads(written), sort_keys=True)
