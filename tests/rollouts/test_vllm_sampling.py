"""vLLM draws what the own sampler would, from the weights it was handed, in this process and behind an address."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_policy import TOKENIZER, key, prompt, train_config, write_config
from fixtures_rounds import Row, plain_logprobs, read_table
from fixtures_sampling import DIGITS, END, KEYS, PROMPTS, SOME_ENDS, drawn, flat, full_logprobs
from fixtures_vllm import CONTEXT, served, wide_llama, wide_policy_folder
from transformers import LlamaForCausalLM

from grpo.rollouts.engine_settings import EngineSettings
from grpo.rollouts.policies import load_policy
from grpo.rollouts.sampling import Sampler, SamplingSettings
from grpo.rollouts.vllm_engines import InProcess, Server
from grpo.rollouts.vllm_sampling import Engine, EngineFailed, StaleWeights, VLLMSampler

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: run by `make test-vllm`"),
    # vLLM, and what it imports, warns as it likes.
    pytest.mark.filterwarnings("default"),
]

TESTS = Path(__file__).parents[1]
CLOSE = 1e-4  # nats; both are in float32
SETTINGS = EngineSettings("vllm", cache_gb=0.1, context=CONTEXT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide_policy_folder(tmp_path_factory.mktemp("vllm") / "policy")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(folder, folder.parent / "server.log") as address:
        yield address


@pytest.fixture(scope="module")
def in_process(folder: Path) -> Iterator[Engine]:
    engine = InProcess(folder, SETTINGS, max_rows=32)
    yield engine
    engine.close()


@pytest.fixture(params=["vllm", "vllm_server"])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "vllm":
        made: Engine = request.getfixturevalue("in_process")
        return made
    return Server(request.getfixturevalue("address"), max_rows=32)


@pytest.fixture
def model(folder: Path) -> LlamaForCausalLM:
    """As it is in the folder."""
    return load_policy(folder).model  # type: ignore[return-value]


def sampler(
    engine: Engine, model: LlamaForCausalLM, run: Path, ends: tuple[int, ...] = (END,), **settings: Any
) -> VLLMSampler:
    """With the model's weights in the engine."""
    made = VLLMSampler(engine, model, TOKENIZER, ends, SamplingSettings(**settings), str(run))
    made.hand_over(0)
    return made


def test_greedy_completions_are_those_of_the_own_sampler(
    engine: Engine, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12}
    copied = SamplingSettings(**settings, shared_prompt=False)  # which the record says of vLLM too
    expected = Sampler(model, TOKENIZER, SOME_ENDS, copied).sample(PROMPTS, KEYS, 2)
    got = sampler(engine, model, tmp_path, SOME_ENDS, **settings).sample(PROMPTS, KEYS, 2)
    assert {rollout.finish_reason for rollout in flat(expected)} == {"end_token", "length"}
    for ours, theirs in zip(flat(expected), flat(got), strict=True):
        assert theirs.logprobs == pytest.approx(ours.logprobs, abs=CLOSE)
        assert replace(theirs, logprobs=(), sampling_policy=ours.sampling_policy) == replace(ours, logprobs=())
        assert theirs.sampling_policy == replace(ours.sampling_policy, engine=engine.name)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_those_of_a_whole_pass_at_the_temperature(
    engine: Engine, model: LlamaForCausalLM, tmp_path: Path, temperature: float
) -> None:
    groups = sampler(engine, model, tmp_path, temperature=temperature, max_new_tokens=10).sample(PROMPTS, KEYS, 4)
    for rollout in flat(groups):
        expected = full_logprobs(model, rollout, temperature)
        assert rollout.logprobs == pytest.approx(expected.tolist(), abs=CLOSE)
        assert rollout.sampling_logprobs is None


def test_tokens_are_drawn_from_the_distribution_at_the_temperature(
    engine: Engine, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    """The mean log-probability of many first tokens is minus the entropy, to four standard errors."""
    temperature, count = 0.7, 600
    [group] = sampler(engine, model, tmp_path, temperature=temperature, max_new_tokens=1).sample(
        PROMPTS[:1], KEYS[:1], count
    )
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPTS[0].prompt_tokens])).logits[0, -1] / temperature
    logprobs = torch.log_softmax(logits, -1)
    probabilities = logprobs.exp()
    mean = (probabilities * logprobs).sum()
    deviation = (probabilities * (logprobs - mean).square()).sum().sqrt()
    found = torch.tensor([rollout.logprobs[0] for rollout in group]).mean()
    assert abs(found - mean) < 4 * deviation / count**0.5
    assert deviation / count**0.5 < 0.1  # small enough to tell a temperature of 1 (below)
    hot = torch.log_softmax(logits * temperature, -1)
    assert abs((hot.exp() * logprobs).sum() - mean) > 8 * deviation / count**0.5


def kept(logprobs: torch.Tensor, cut: str) -> torch.Tensor:
    """Which tokens of a distribution ``[vocabulary]`` a cut leaves, from its definition."""
    ordered, order = logprobs.exp().sort(descending=True)
    keep = {
        "top_k": torch.arange(len(ordered)) < 5,
        "top_p": ordered.cumsum(0) - ordered < 0.7,
        "min_p": ordered >= 0.2 * ordered[0],
    }[cut]
    return order[keep]


@pytest.mark.parametrize(("cut", "value"), [("top_k", 5), ("top_p", 0.7), ("min_p", 0.2)])
def test_a_cut_distribution_is_the_declared_one(
    engine: Engine, model: LlamaForCausalLM, tmp_path: Path, cut: str, value: float
) -> None:
    made = sampler(engine, model, tmp_path, temperature=0.9, max_new_tokens=1, **{cut: value})
    [group] = made.sample(PROMPTS[1:2], KEYS[1:2], 200)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPTS[1].prompt_tokens])).logits[0, -1] / 0.9
    logprobs = torch.log_softmax(logits, -1)
    left = kept(logprobs, cut)
    renormalised = logprobs - logprobs[left].logsumexp(0)
    assert {rollout.tokens[0] for rollout in group} <= set(left.tolist())
    assert len({rollout.tokens[0] for rollout in group}) > len(left) / 2
    for rollout in group:
        assert rollout.sampling_logprobs == pytest.approx([float(renormalised[rollout.tokens[0]])], abs=CLOSE)
        assert all(one != one for one in rollout.logprobs)  # nothing tells the whole softmax


def test_a_draw_follows_from_its_key_whatever_is_drawn_beside_it(
    engine: Engine, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    made = sampler(engine, model, tmp_path, max_new_tokens=8)
    together = drawn(made.sample(PROMPTS, KEYS, 8))
    assert drawn(made.sample(PROMPTS, KEYS, 8)) == together
    assert [drawn(made.sample([p], [k], 8))[0] for p, k in zip(PROMPTS, KEYS, strict=True)] == together
    assert all(len(set(group)) > 6 for group in together)
    other_seed = drawn(made.sample(PROMPTS, [replace(key, seed=2) for key in KEYS], 8))
    assert not set(together[0]) & set(other_seed[0])


def test_an_end_token_belongs_to_the_tokens_and_not_to_the_text(
    engine: Engine, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    ends = (END, *DIGITS)
    rollouts = flat(sampler(engine, model, tmp_path, ends, max_new_tokens=8).sample(PROMPTS, KEYS, 16))
    assert {rollout.finish_reason for rollout in rollouts} == {"end_token", "length"}
    for rollout in rollouts:
        ended = rollout.finish_reason == "end_token"
        assert (rollout.tokens[-1] in ends) == ended
        assert not set(rollout.tokens[:-1]) & set(ends)
        assert rollout.text == TOKENIZER.decode(rollout.tokens[: len(rollout.tokens) - ended])
        assert ended or len(rollout.tokens) == 8
        assert len(rollout.logprobs) == len(rollout.tokens)


def test_a_stop_string_is_the_last_thing_in_the_text(engine: Engine, model: LlamaForCausalLM, tmp_path: Path) -> None:
    plain = flat(sampler(engine, model, tmp_path, max_new_tokens=12).sample(PROMPTS, KEYS, 8))
    stops = (plain[0].text[2:4], plain[9].text[1])
    rollouts = flat(sampler(engine, model, tmp_path, max_new_tokens=12, stop_strings=stops).sample(PROMPTS, KEYS, 8))
    assert {rollout.finish_reason for rollout in rollouts} >= {"stop_string", "length"}
    for whole, rollout in zip(plain, rollouts, strict=True):
        assert rollout.tokens == whole.tokens[: len(rollout.tokens)]  # the same draws, until one completes a stop
        found = [whole.text.find(stop) + len(stop) for stop in stops if stop in whole.text]
        assert rollout.text == (whole.text[: min(found)] if found else whole.text)
        assert (rollout.finish_reason == "stop_string") == bool(found)


def test_the_engine_draws_with_the_weights_it_was_handed_last(
    engine: Engine, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    made = sampler(engine, model, tmp_path, max_new_tokens=8)
    before = flat(made.sample(PROMPTS, KEYS, 4))
    model.load_state_dict(wide_llama(seed=1).state_dict())
    with pytest.raises(StaleWeights, match=r"update-0 where .*update-1 were asked for"):
        made.sample(PROMPTS, KEYS, 4, weights_version=1)
    made.hand_over(1)
    after = flat(made.sample(PROMPTS, KEYS, 4, weights_version=1))
    for rollout in after:
        assert rollout.logprobs == pytest.approx(full_logprobs(model, rollout).tolist(), abs=CLOSE)
        assert rollout.sampling_policy.weights_version == 1
    for rollout in before:  # which the new weights would not have drawn so
        assert rollout.logprobs != pytest.approx(full_logprobs(model, rollout).tolist(), abs=0.1)
    assert not list(tmp_path.iterdir())  # nothing is left of the weights on their way


def test_weights_of_another_training_are_not_taken_for_ones_own(
    engine: Engine, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    made = sampler(engine, model, tmp_path / "one", max_new_tokens=4)
    sampler(engine, wide_llama(seed=2), tmp_path / "other", max_new_tokens=4)
    with pytest.raises(StaleWeights, match=r"other/update-0 where .*one/update-0"):
        made.sample(PROMPTS, KEYS, 2)


def call_its_weights(engine: Engine, name: str) -> None:
    """What a training does last when it hands weights over."""
    if isinstance(engine, Server):
        engine._call("/update_weight_version", {"new_version": name})
    else:
        engine.llm.update_weight_version(name)  # type: ignore[attr-defined]


def test_weights_that_another_training_loaded_in_between_are_not_taken_for_ones_own(
    engine: Engine, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    """They go by the name of the ones before them, which this training sets last."""
    made = sampler(engine, model, tmp_path / "one", max_new_tokens=4)
    made.sample(PROMPTS, KEYS, 2)
    sampler(engine, wide_llama(seed=2), tmp_path / "other", max_new_tokens=4)
    call_its_weights(engine, f"{tmp_path}/one/update-0")
    with pytest.raises(StaleWeights, match=r"other/update-0 where .*one/update-0"):
        made.sample(PROMPTS, KEYS, 2)


def test_prompts_read_with_the_old_weights_are_forgotten(
    engine: Engine, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    """Of a prompt as long as a block of its cache vLLM keeps the keys and values, for whoever asks it again."""
    long = [prompt("7" * 135 + "+1=", "long")]
    made = sampler(engine, model, tmp_path, max_new_tokens=6)
    made.sample(long, [key("long")], 4)
    model.load_state_dict(wide_llama(seed=1).state_dict())
    made.hand_over(1)
    for rollout in flat(made.sample(long, [key("long")], 4, weights_version=1)):
        assert rollout.logprobs == pytest.approx(full_logprobs(model, rollout).tolist(), abs=CLOSE)


OTHER_ROTATION = {"rope_theta": 50.0, "rope_type": "default"}


@pytest.mark.parametrize(("name", "value"), [("rms_norm_eps", 0.1), ("rope_parameters", OTHER_ROTATION)])
def test_a_server_of_another_policy_is_not_handed_weights(
    address: str, model: LlamaForCausalLM, tmp_path: Path, name: str, value: Any
) -> None:
    """Of the same shapes, into which the weights would fit."""
    made = sampler(Server(address, 4), model, tmp_path, max_new_tokens=4)
    setattr(model.config, name, value)
    with pytest.raises(ValueError, match=f"started with another policy .* differ in {name}. Start it again"):
        made.hand_over(1)
    made.sample(PROMPTS, KEYS, 2)  # nothing was touched


def test_a_prompt_that_leaves_no_room_is_refused(engine: Engine, model: LlamaForCausalLM, tmp_path: Path) -> None:
    assert engine.context == CONTEXT
    longest = max(len(prompt.prompt_tokens) for prompt in PROMPTS)
    fits = sampler(engine, model, tmp_path, (), max_new_tokens=CONTEXT - longest)
    assert {len(rollout.tokens) for rollout in flat(fits.sample(PROMPTS, KEYS, 1))} == {CONTEXT - longest}
    with pytest.raises(ValueError, match=r"more than the 160 that vLLM makes room for: raise engine\.context"):
        sampler(engine, model, tmp_path, max_new_tokens=CONTEXT + 1 - longest).sample(PROMPTS, KEYS, 1)


def test_settings_reach_the_engine(in_process: InProcess) -> None:
    config = in_process.llm.llm_engine.vllm_config
    assert config.model_config.max_model_len == SETTINGS.context
    assert config.cache_config.kv_cache_memory_bytes == 100_000_000
    assert config.scheduler_config.max_num_seqs == 32
    assert str(config.model_config.dtype) == "torch.float32"
    assert in_process.name.endswith(" float32")


def test_what_a_server_refuses_is_an_error(address: str, model: LlamaForCausalLM, tmp_path: Path) -> None:
    made = sampler(Server(address, 4), model, tmp_path, max_new_tokens=4)
    with pytest.raises(EngineFailed, match="/inference/v1/generate with status 4"):
        made.sample([replace(PROMPTS[0], prompt_tokens=(-1,))], KEYS[:1], 1)


def rounds_with(
    engine: dict[str, Any], folder: Path, trainer: dict[str, Any]
) -> tuple[list[dict[str, str]], list[Row], list[Row]]:
    """Metrics, rollouts and decisions of a run of three rounds, trained as a user does; every update moves far."""
    config = train_config(folder, rounds=3, groups_per_round=4, policy=str(wide_policy_folder(folder / "wide")))
    config["model"] |= {"engine": engine, "optimizer": {"learning_rate": 1e-2}}
    config["trainer"] |= trainer
    command = [sys.executable, "-m", "grpo", "train", "--config", write_config(folder / "train.yaml", config)]
    paths = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    [metrics] = (folder / "runs").glob("*/metrics.csv")
    with metrics.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    record = folder / "output" / "record"
    return rows, read_table(record, "rollouts"), read_table(record, "updates")


STAGE_3 = {"class_path": "grpo.training.strategies.CPUDeepSpeedStrategy", "init_args": {"stage": 3}}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "in_process": ("vllm", {}),
    "server": ("vllm_server", {}),
    "server_of_two_processes": ("vllm_server", {"devices": 2, "strategy": "ddp"}),
    "server_of_cut_up_weights": ("vllm_server", {"devices": 2, "strategy": STAGE_3}),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_run_samples_with_the_engine_and_learns_from_what_it_drew(case: str, address: str, tmp_path: Path) -> None:
    name, trainer = RUNS[case]
    settings = {"vllm": {"cache_gb": 0.1, "context": CONTEXT}, "vllm_server": {"address": address}}[name]
    metrics, rollouts, updates = rounds_with({"name": name, **settings}, tmp_path, trainer)
    assert [0 < float(row["loss/mismatch_max"]) < 1e-3 for row in metrics] == [True] * 3
    assert {row["engine"].split()[0] for row in rollouts} == {"vllm"}
    assert {(row["round"], row["policy_version"]) for row in rollouts} == {(0, 0), (1, 1), (2, 2)}
    recomputed = {row["rollout_id"]: row["recomputed_old_logprobs"] for row in updates}
    first = load_policy(tmp_path / "wide").model
    gaps: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for row in rollouts:
        if recomputed[row["rollout_id"]] is not None:
            assert row["old_logprobs"] == pytest.approx(recomputed[row["rollout_id"]], abs=1e-3)
        with torch.no_grad():
            logprobs, _ = plain_logprobs(first, row)
        gaps[row["round"]].append(float((logprobs - torch.tensor(row["old_logprobs"])).abs().max()))
    # Drawn by the first weights in the first round, and by none as old in the others.
    assert max(gaps[0]) < CLOSE
    assert min(gaps[1] + gaps[2]) > 0.01
