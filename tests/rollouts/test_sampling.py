import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fixtures_policy import TOKENIZER, random_llama
from fixtures_sampling import DIGITS, END, KEYS, PROMPTS, SOME_ENDS, drawn, full_logprobs, sampler

from grpo.records import PromptGroup
from grpo.rollouts.draws import keyed_uniforms
from grpo.rollouts.sampling import Sampler, SamplingSettings
from grpo.rollouts.sharing_trial import can_share_prompts


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
    assert can_share_prompts(model)  # tried out, and no part of the passes that are counted
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


def test_a_cut_rollout_is_the_inverse_of_the_cut_cumulative_distribution() -> None:
    """Every token again, by other code: a plain pass, a sort, its uniform number. Ends and taken-out rows included."""
    model = random_llama(spread=0.3)
    settings = {"temperature": 0.7, "top_p": 0.8, "max_new_tokens": 12}
    groups = sampler(model, SOME_ENDS, **settings).sample(PROMPTS, KEYS, 4)
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
        "stop_strings": [],
        "shared_prompt": True,
    }
    assert written == json.dumps(json.loads(written), sort_keys=True)
