"""What an engine cannot do as declared is refused by name; what it gives is cut as the own sampler cuts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fixtures_policy import TOKENIZER, random_llama
from fixtures_sampling import END, KEYS, PROMPTS, flat
from transformers import PreTrainedModel

from grpo.records import Rollout
from grpo.rollouts import engine_settings
from grpo.rollouts.engine_settings import EngineSettings
from grpo.rollouts.sampling_settings import SamplingSettings
from grpo.rollouts.tools import Calculator, ToolSettings
from grpo.rollouts.vllm_engines import untied
from grpo.rollouts.vllm_sampling import Completion, EngineFailed, Request, StaleWeights, VLLMSampler, seed_of


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"address": "localhost:8000"}, r"engine\.address is localhost:8000: give it with http://"),
        ({"name": "vllm", "cache_gb": 0.0}, r"engine\.cache_gb is 0\.0: it must be positive"),
        ({"name": "vllm", "context": 1}, r"engine\.context is 1: a prompt and its completion are at least 2"),
        ({"context": 64}, r"engine\.context is 64, which has an effect only where engine\.name is vllm, and it is own"),
        ({"name": "vllm_server", "precision": "bfloat16"}, r"engine\.precision is bfloat16, which has an effect only"),
        ({"name": "vllm", "gather_weights": False}, r"engine\.gather_weights is False, .* engine\.name is own, and it"),
        ({"name": "vllm", "address": "http://a:1"}, r"engine\.address is http://a:1, .* engine\.name is vllm_server"),
    ],
)
def test_settings_that_say_nothing_sound_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineSettings(**settings)


@pytest.mark.parametrize("name", ["vllm", "vllm_server"])
@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"tools": ToolSettings({"c": Calculator()})}, r"sampling\.tools is given with engine\.name "),
        ({"shared_prompt": False}, r"sampling\.shared_prompt is false with engine\.name .* no effect"),
        ({"temperature": 0.005}, r"sampling\.temperature is 0\.005 with engine\.name .* at 0\.01 instead"),
        ({"min_p": 0.1, "top_p": 0.9}, r"sampling\.min_p is 0\.1 and sampling\.top_p is 0\.9 with engine\.name"),
    ],
)
def test_what_vllm_would_draw_otherwise_is_refused(name: Any, sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineSettings(name).require_able(SamplingSettings(**sampling))
    EngineSettings().require_able(SamplingSettings(**sampling))


def test_a_missing_package_is_named_with_the_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_settings, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"engine\.name is vllm, and the package vllm is not .*`make setup-vllm`"):
        EngineSettings("vllm").require_able(SamplingSettings())
    EngineSettings("vllm_server").require_able(SamplingSettings())  # the package is the server's to have


def test_a_tied_weight_is_handed_over_once() -> None:
    state = random_llama().state_dict()
    assert state.keys() - untied(state).keys() == {"lm_head.weight"}
    apart = state | {"lm_head.weight": state["lm_head.weight"].clone()}
    assert untied(apart).keys() == apart.keys()


def test_seeds_differ_by_key_and_are_what_vllm_takes() -> None:
    keys = [key.of_member(member) for key in KEYS for member in range(50)]
    seeds = [seed_of(key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**61
    assert seeds == [seed_of(key) for key in keys]


class Recites:
    """Gives these tokens to every request, and keeps what it was asked."""

    name, context = "recites", 64

    def __init__(
        self, tokens: Sequence[int], weights: str = "run/update-0", holds: str | None = "run/update-0"
    ) -> None:
        logprobs = tuple(-0.1 * (i + 1) for i in range(len(tokens)))
        self.completion = Completion(tuple(tokens), logprobs, frozenset({weights}))
        self.asked: list[Request] = []
        self.taken: list[str] = []
        self.holds = holds

    def take_over(self, model: PreTrainedModel, weights: str) -> None:
        self.taken.append(weights)

    def held(self) -> set[str | None]:
        return {self.holds}

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        self.asked = list(requests)
        return [self.completion] * len(requests)

    def close(self) -> None:
        pass


def sampler(engine: Recites, ends: Sequence[int] = (END,), **settings: Any) -> VLLMSampler:
    return VLLMSampler(engine, random_llama(), TOKENIZER, ends, SamplingSettings(**settings), "run")


def recited(tokens: Sequence[int], ends: Sequence[int] = (END,), **settings: Any) -> Rollout:
    return sampler(Recites(tokens), ends, max_new_tokens=len(tokens), **settings).sample(PROMPTS[:1], KEYS[:1], 1)[0][0]


def test_what_stands_behind_an_end_is_cut_off() -> None:
    text = TOKENIZER("abcd").input_ids
    rollout = recited([*text[:2], END, *text[2:]])
    assert (rollout.tokens, rollout.text) == ((*text[:2], END), "ab")
    assert rollout.finish_reason == "end_token"
    assert rollout.logprobs == pytest.approx([-0.1, -0.2, -0.3])
    rollout = recited(text, stop_strings=("c",))
    assert (rollout.tokens, rollout.text, rollout.finish_reason) == (tuple(text[:3]), "abc", "stop_string")
    rollout = recited(text)
    assert (rollout.tokens, rollout.text, rollout.finish_reason) == (tuple(text), "abcd", "length")


def test_an_end_token_ends_before_its_text_completes_a_stop_string() -> None:
    text = TOKENIZER("xy").input_ids
    assert "n" in TOKENIZER.decode([END])
    rollout = recited([*text, END], stop_strings=("n",))
    assert (rollout.text, rollout.finish_reason) == ("xy", "end_token")


def test_under_a_cut_the_whole_softmax_is_not_made_up() -> None:
    text = TOKENIZER("abc").input_ids
    rollout = recited(text, top_k=5)
    assert rollout.sampling_logprobs == pytest.approx([-0.1, -0.2, -0.3])
    assert [math.isnan(one) for one in rollout.logprobs] == [True] * 3


def test_a_completion_that_ends_for_no_reason_is_refused() -> None:
    engine = Recites(TOKENIZER("ab").input_ids)
    with pytest.raises(EngineFailed, match="ended the completion of a after 2 tokens"):
        sampler(engine, max_new_tokens=3).sample(PROMPTS, KEYS, 1)


@pytest.mark.parametrize("weights", ["run/update-1", "other/update-0", "half taken over"])
def test_other_weights_are_refused(weights: str) -> None:
    engine = Recites(TOKENIZER("ab").input_ids, weights)
    with pytest.raises(StaleWeights, match=f"the weights {weights} where run/update-0 were asked for"):
        sampler(engine, max_new_tokens=2).sample(PROMPTS, KEYS, 1)


@pytest.mark.parametrize(("holds", "named"), [("other/update-0", "other/update-0"), (None, "of no name")])
def test_weights_that_only_go_by_the_name_are_refused(holds: str | None, named: str) -> None:
    """Another training loaded its own before this one named what it had loaded."""
    engine = Recites(TOKENIZER("ab").input_ids, holds=holds)
    with pytest.raises(StaleWeights, match=f"the weights {named} where run/update-0 were asked for"):
        sampler(engine, max_new_tokens=2).sample(PROMPTS, KEYS, 1)


def test_weights_are_handed_over_once_a_version() -> None:
    engine = Recites([END])
    made = sampler(engine)
    for version in (0, 0, 3, 3, 4):
        made.hand_over(version)
    assert engine.taken == ["run/update-0", "run/update-3", "run/update-4"]


def test_every_setting_of_the_sampling_is_asked_for() -> None:
    engine = Recites([END])
    settings = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_new_tokens": 9, "stop_strings": ("~",)}
    made = sampler(engine, (END, 5), **settings)
    groups = made.sample(PROMPTS, KEYS, 2)
    assert [request.prompt for request in engine.asked] == [p.prompt_tokens for p in PROMPTS for _ in range(2)]
    assert [request.sampling["seed"] for request in engine.asked] == [seed_of(r.key) for r in flat(groups)]
    asked = engine.asked[0].sampling
    expected = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.0, "max_tokens": 9, "stop": ["~"]}
    assert asked | expected == asked
    assert (asked["stop_token_ids"], asked["ignore_eos"]) == (sorted({END, 5}), True)
    recorded = replace(made.settings, shared_prompt=False)  # as where each completion has a copy
    policy = replace(recorded.sampling_policy(0), engine="recites")
    assert {rollout.sampling_policy for rollout in flat(groups)} == {policy}


def test_some_members_of_a_group_are_drawn_under_their_own_keys() -> None:
    engine = Recites([END])
    groups = sampler(engine).sample(PROMPTS[:2], KEYS[:2], 4, members=[[1, 3], [2]])
    assert [[rollout.key.member for rollout in group] for group in groups] == [[1, 3], [2]]
    assert [request.sampling["seed"] for request in engine.asked] == [seed_of(r.key) for r in flat(groups)]
