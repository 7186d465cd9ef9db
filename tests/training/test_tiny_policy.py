from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_policy import key, problems, prompt

from grpo.policy import PolicySettings, make_policy
from grpo.problem_files import read_problems, write_problems
from grpo.records import Problem
from grpo.rewards.answer_format import answer_format
from grpo.rewards.exact_answer import exact_answer
from grpo.rollouts.policies import load_policy
from grpo.rollouts.prompts import PromptTemplate, prompt_group
from grpo.rollouts.sampling import Sampler, SamplingSettings
from grpo.training.tiny_policy import TinyPolicy, character_tokenizer, words_of
from grpo.training.warmstart_module import IGNORED, ExampleBatches

TEMPLATE = PromptTemplate("bare", "{question}")


def test_every_printable_character_comes_back() -> None:
    tokenizer = character_tokenizer()
    text = "Aa 0-9\n\t~{}<|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer(text).input_ids) == len(text)
    assert tokenizer("é").input_ids == [tokenizer.unk_token_id]


def test_known_words_are_one_token_and_others_are_spelt() -> None:
    question = "State the answer to 5 + 4 ="
    tokenizer = character_tokenizer(words_of(question))
    assert words_of(question) == ["State", " the", " answer", " to"]
    ids = tokenizer(question).input_ids
    assert len(ids) == 4 + len(" 5 + 4 =")
    assert tokenizer.decode(ids) == question
    other = "State 12 others"
    assert tokenizer.decode(tokenizer(other).input_ids) == other


def test_only_answers_and_their_ends_are_learnt() -> None:
    tokenizer = character_tokenizer()
    [batch] = ExampleBatches(tokenizer, [("1+1=", " 2")], steps=1, rows=2, seed=1)
    tokens, labels = batch
    assert tokens[0].tolist() == [*tokenizer("1+1= 2").input_ids, tokenizer.eos_token_id]
    assert labels[0].tolist() == [IGNORED] * 4 + [*tokenizer(" 2").input_ids, tokenizer.eos_token_id]


def test_batches_follow_the_seed_at_every_pass() -> None:
    examples = [(f"{i}=", f" {i}") for i in range(9)]

    def tokens(seed: int) -> list[list[list[int]]]:
        batches = ExampleBatches(character_tokenizer(), examples, steps=3, rows=4, seed=seed)
        assert [batch[0].tolist() for batch in batches] == [batch[0].tolist() for batch in batches]
        return [batch[0].tolist() for batch in batches]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_the_same_settings_make_the_same_weights_and_disturb_no_one(tmp_path: Path) -> None:
    examples = tmp_path / "examples.jsonl"
    write_problems(examples, problems(5))
    source = TinyPolicy(examples, layers=1, width=16, heads=2, steps=2, rows=2)
    before = torch.random.get_rng_state()
    one, _ = source.load(TEMPLATE)
    assert torch.equal(torch.random.get_rng_state(), before)
    other, _ = source.load(TEMPLATE)
    third, _ = TinyPolicy(examples, layers=1, width=16, heads=2, steps=2, rows=2, seed=2).load(TEMPLATE)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), third.parameters(), strict=True))
    assert source.provenance()["examples_sha256"]


def test_it_becomes_a_policy_folder(tmp_path: Path) -> None:
    examples = tmp_path / "examples.jsonl"
    write_problems(examples, problems(5))
    source = TinyPolicy(examples, layers=1, width=16, heads=2, steps=1, rows=2)
    make_policy(PolicySettings(source, TEMPLATE, output=tmp_path / "policy"))
    policy = load_policy(tmp_path / "policy")
    assert policy.end_token_ids == (policy.tokenizer.eos_token_id,)
    [[rollout]] = Sampler(policy.model, policy.tokenizer, policy.end_token_ids, SamplingSettings()).sample(
        [prompt("1+1=")], [key()], 1
    )
    assert len(rollout.tokens) >= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 0}, r"source\.layers is 0"),
        ({"width": 0}, r"source\.width is 0"),
        ({"heads": 0}, r"source\.heads is 0"),
        ({"rows": 0}, r"source\.rows is 0"),
        ({"steps": -1}, r"source\.steps is -1"),
        ({"width": 10, "heads": 3}, r"source\.width is 10, .* make it a multiple of 6"),
        ({"width": 12, "heads": 4}, r"source\.width is 12, .* make it a multiple of 8"),
        ({"learning_rate": 0.0}, r"source\.learning_rate is 0\.0"),
        ({"learning_rate": float("inf")}, r"source\.learning_rate is inf"),
        ({"learning_rate": float("nan")}, r"source\.learning_rate is nan"),
    ],
)
def test_what_makes_no_model_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TinyPolicy(**settings)


@pytest.mark.filterwarnings("ignore:Total length of")
def test_without_a_step_it_is_the_random_start(tmp_path: Path) -> None:
    write_problems(tmp_path / "examples.jsonl", problems(5))
    model, _ = TinyPolicy(tmp_path / "examples.jsonl", layers=1, width=16, heads=2, steps=0).load(TEMPLATE)
    assert all(weight.isfinite().all() for weight in model.parameters())


@pytest.mark.slow
def test_the_warm_start_gives_the_form_and_some_right_answers() -> None:
    examples = Path("data/worked_examples.jsonl")
    model, tokenizer = TinyPolicy(examples).load(TEMPLATE)
    asked: list[Problem] = read_problems(examples)[:60]
    groups = [prompt_group(TEMPLATE, tokenizer, problem) for problem in asked]
    sampler = Sampler(model, tokenizer, [tokenizer.eos_token_id], SamplingSettings(max_new_tokens=8))
    rollouts = [r for group in sampler.sample(groups, [key(p.id) for p in asked], 4) for r in group]

    def mean(reward: object) -> float:
        values = [reward(r.group.problem, r.text).value for r in rollouts]  # type: ignore[operator]
        return sum(values) / len(values)

    assert mean(answer_format) > 0.9
    assert 0.05 < mean(exact_answer) < 0.6
