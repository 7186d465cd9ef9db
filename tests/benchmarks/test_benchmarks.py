"""The benchmarks' own arithmetic, and that each of them runs. No time is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from import_graph import REPOSITORY
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

from common.count_up import answer_of, counts_right, problems_of
from common.counts import Pass, Shape, bound_seconds, sampling_passes, update_passes
from common.held_out import is_right
from common.learning import seconds_to
from common.tables import brackets, spread, table
from growth import exponent

CONFIG = LlamaConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    tie_word_embeddings=True,
)


def test_weights_are_those_of_the_model() -> None:
    model = LlamaForCausalLM(CONFIG)
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert Shape.of(CONFIG).weights == sum(p.numel() for p in model.parameters()) - norms


def test_products_are_those_that_torch_counts() -> None:
    """A prompt of 5 tokens, a completion of 3: 7 positions are fed, the head is needed at 3."""
    shape, model = Shape.of(CONFIG), LlamaForCausalLM(CONFIG)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(1, 7, dtype=torch.long), logits_to_keep=3)
    products = counter.get_flop_counts()["Global"]
    linear = sum(flops for name, flops in products.items() if str(name) in ("aten.mm", "aten.addmm"))
    forward = update_passes(shape, [0], [5], [3])[0].flops / 3
    assert forward - shape.attention_flops(7 * 8 // 2) == linear


def test_a_groups_prompt_is_counted_once() -> None:
    shape = Shape.of(CONFIG)
    one, four = (update_passes(shape, [0] * n, [50] * n, [1] * n)[0].flops for n in (1, 4))
    assert one == four
    first = [sampling_passes(shape, [0] * n, [50] * n, [2] * n)[0] for n in (1, 4)]
    assert first[0] == first[1]


def test_a_step_reads_a_groups_prompt_once_and_each_rows_own_tokens() -> None:
    shape = Shape.of(CONFIG)
    one, four = (sampling_passes(shape, [0] * n, [50] * n, [2] * n)[1] for n in (1, 4))
    assert four.bytes - one.bytes == shape.cache_bytes(3)
    assert four.flops == 4 * one.flops


def test_sampling_has_a_pass_for_each_step_of_the_longest_row() -> None:
    passes = sampling_passes(Shape.of(CONFIG), [0, 0], [5, 5], [2, 4])
    assert len(passes) == 4
    assert passes[1].flops > passes[2].flops
    assert passes[2].flops < passes[3].flops  # one row less after the second token, then a longer context


def test_bound_is_the_slower_of_both_in_each_pass() -> None:
    assert bound_seconds([Pass(100, 10), Pass(10, 100)], 10, 10) == 20


def test_exponent_of_a_power() -> None:
    slope, error = exponent([1, 2, 4, 8], [3 * n**1.5 for n in (1, 2, 4, 8)])
    assert slope == pytest.approx(1.5)
    assert error == pytest.approx(0, abs=1e-6)


def test_seconds_to_a_target() -> None:
    curve = [{"seconds": s, "accuracy": a} for s, a in ((0.0, 0.2), (10.0, 0.4), (20.0, 0.8))]
    assert seconds_to(curve, 0.6) == pytest.approx(15.0)
    assert seconds_to(curve, 0.9) is None


def test_reward_and_held_out_reading_agree_on_right_answers() -> None:
    problem = problems_of("held out")[0]
    start, steps = map(int, problem.id.split("+"))
    right = answer_of(start, steps)
    assert counts_right(problem, right).value == 1.0
    assert is_right(right, problem.answer)
    wrong = answer_of(start, steps + 1)
    assert counts_right(problem, wrong).value == 0.0
    assert not is_right(wrong, problem.answer)


def test_held_out_problems_are_not_trained_on() -> None:
    train, held_out = ({problem.id for problem in problems_of(part)} for part in ("train", "held out"))
    assert not train & held_out


def test_tables() -> None:
    assert table(["a", "b"], [["x", 1.23456], ["y", 2]]).splitlines()[2:] == ["| x | 1.23 |", "| y | 2 |"]
    assert spread([1.0, 2.0, 30.0]) == "2 [1, 30]"
    assert spread([17104.0] * 4) == "17100 [17100, 17100]"
    assert spread([0.12345] * 4, digits=2) == "0.12 [0.12, 0.12]"
    assert "least and the largest" in brackets(3)
    assert "quartiles of 4" in brackets(4)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["growth.py", "--quick", "--only", "group_size", "--width", "16"]])
def test_it_runs(tmp_path: Path, arguments: list[str]) -> None:
    script = REPOSITORY / "benchmarks" / arguments[0]
    environment = os.environ | {"GRPO_BENCHMARK_RESULTS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, script, *arguments[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "| rollouts | group size | 4, 8, 16 |" in done.stdout
    path = tmp_path / "growth_quick_only_group_size_width_16.json"
    assert f"written: {path}" in done.stdout
    made = json.loads(path.read_text())
    assert made["options"]["rounds"] == 2
    assert {"versions", "commit", "machine", "group_size"} < set(made)
    assert "round 2 of 2" in done.stderr
