"""The plan: counted on the models themselves, held against DeepSpeed's estimators, torch's counters and real runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_policy import policy_folder, random_llama, train_config, write_config
from import_graph import REPOSITORY
from torch.utils.flop_counter import FlopCounterMode

from grpo import plan
from grpo.planning import traced
from grpo.planning.advice import advice
from grpo.planning.machines import MACHINES
from grpo.planning.memory import Memory, plan_memory
from grpo.planning.shapes import Shape, read_config, read_shape
from grpo.planning.traffic import Assumptions, plan_traffic, token_flops, update_flops
from grpo.planning.workload import PlanError, Workload
from grpo.problem_files import write_problems
from grpo.records import Problem

SMALL = Workload(groups_per_round=8, prompt_tokens=16, max_new_tokens=8)
PAGE = REPOSITORY / "docs" / "scaling.md"
# Of the models whose architectures these are, as their publishers count them.
PUBLISHED = {
    "0.5B": 494_032_768,
    "1.5B": 1_543_714_304,
    "3B": 3_085_938_688,
    "7B": 7_615_616_512,
    "14B": 14_770_033_664,
    "32B": 32_763_876_352,
    "70B": 70_553_706_496,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(policy_folder(tmp_path_factory.mktemp("small") / "policy"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_named_size_has_the_weights_that_were_published(name: str) -> None:
    assert read_shape(name).parameters == PUBLISHED[name]


def test_a_folder_and_its_config_are_counted_as_the_model_is(small: str) -> None:
    weights = sum(p.numel() for p in random_llama().parameters())
    assert read_shape(small).parameters == weights
    assert read_shape(f"{small}/config.json").parameters == weights
    assert read_shape(small).matrix_parameters + read_shape(small).output_parameters < weights  # norms are left out


def state(memory: Memory) -> int:
    """Bytes that follow from the number of weights alone, without AdamW's working memory of four bytes a weight."""
    return memory.weights + memory.gradients + memory.optimizer + memory.step


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("gpus", [1, 8, 64])
def test_deepspeed_estimates_the_same_state(gpus: int) -> None:
    """Its estimators know neither a reference, nor passes: here an update has one."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    shape = read_shape("0.5B")
    workload = replace(SMALL, gpus=gpus, groups_per_round=gpus, kl_beta=0.0)
    share = shape.parameters // gpus
    _, two = estimate_zero2_model_states_mem_needs(shape.parameters, gpus, cpu_offload=False)
    assert state(plan_memory(shape, replace(workload, zero=2), 0)) == pytest.approx(two + 4 * share, rel=1e-6)
    # Of stage 3 it leaves out either the weights' own share or the gradients', and adds its largest layer.
    _, three, layer = estimate_zero3_model_states_mem_needs(
        shape.parameters, 0, gpus, cpu_offload=False, cpu_offload_params=False
    )
    assert state(plan_memory(shape, replace(workload, zero=3), 0)) == pytest.approx(
        three - layer + (2 + 4) * share, rel=1e-6
    )


def test_the_stages_divide_what_the_paper_says() -> None:
    """Figure 1 of arXiv:1910.02054: 16 bytes a weight, then 4 + 12/N, 2 + 14/N and 16/N."""
    shape, gpus = read_shape("7B"), 8
    bytes_of = []
    for zero in (1, 2, 3):
        memory = plan_memory(shape, replace(SMALL, gpus=gpus, zero=zero), 0)
        bytes_of.append((memory.weights + memory.gradients + memory.optimizer) / shape.parameters)
    # Stage 1 holds its reduced part of the gradients beside the whole ones.
    assert bytes_of == pytest.approx([4 + 14 / gpus, 2 + 14 / gpus, 16 / gpus], rel=1e-6)


def test_passes_without_data_count_what_real_ones_do(small: str) -> None:
    passes = traced._passes(SMALL, 2, 72, masked=True)
    passes = replace(passes, precision="32-true", half_weights=False)
    model = random_llama().train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    with traced.PeakBytes(known) as counter:
        hidden = model.base_model(**traced._packed_inputs(passes, 32))[0]
        hidden.flatten(0, 1)[torch.zeros(2 * 72, dtype=torch.long)].sum().backward()
    assert traced._update_peak(small, passes, 2) == pytest.approx(counter.peak, rel=0.02)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_every_layer_adds_the_same(small: str, checkpointed: bool) -> None:
    """What the extrapolation from two layers rests on."""
    passes = replace(traced._passes(SMALL, 2, 72, masked=True), checkpointed=checkpointed)
    one, two, three, four = (traced._update_peak(small, passes, layers) for layers in (1, 2, 3, 4))
    assert two - one == pytest.approx(four - three, rel=0.02)
    assert two - one == pytest.approx(three - two, rel=0.02)


def test_operations_are_those_that_torch_counts(small: str) -> None:
    shape, length = read_shape(small), 32
    model = random_llama()
    model.set_attn_implementation("eager")  # the counter does not know the processor's fused attention
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long), attention_mask=torch.zeros(1, 1, length, length))
    expected = length * token_flops(shape, length)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)


def test_a_cut_is_the_training_s_own() -> None:
    from grpo.rollouts.collate import PassLimits

    cut = replace(SMALL, micro_batch_rows=16, groups_per_round=8).cut(32)
    assert (cut.share, cut.rows, cut.micro_batches) == (8, 2, 4)
    assert cut.tokens == 16 + 8 * 7
    short = replace(SMALL, micro_batch_rows=None, micro_batch_tokens=40).cut(32)
    assert short.share == 3
    assert PassLimits(None, 40).fits(3, short.tokens)
    assert not PassLimits(None, 40).fits(4, short.tokens + 7)


def test_communication_is_the_papers() -> None:
    """Section 7: 2 P a step up to stage 2; stage 3 gathers for each pass, and reduces once."""
    shape, half = read_shape("0.5B"), 2
    workload = replace(SMALL, gpus=8, groups_per_round=8, kl_beta=0.0, zero=2)
    assert workload.cut(shape.hidden).micro_batches == 1
    send = half * shape.parameters * 7 / 8
    two, three = (plan_traffic(shape, replace(workload, zero=zero), MACHINES["h100"], Assumptions()) for zero in (2, 3))
    assert (two.gradients, two.weights) == (pytest.approx(2 * send), 0)
    assert (three.gradients, three.weights) == (pytest.approx(send), pytest.approx(3 * send))  # once more to sample
    ddp = plan_traffic(shape, replace(workload, zero=0, micro_batch_rows=1), MACHINES["h100"], Assumptions())
    assert ddp.gradients == pytest.approx(2 * 2 * send)  # float32, once an update


def test_gradients_that_are_divided_are_sent_with_every_pass() -> None:
    """Eight passes: stages 1 to 3 send them once, eight times and eight times; 1 and 2 gather the new weights once."""
    shape, half = read_shape("0.5B"), 2
    workload = replace(SMALL, gpus=8, groups_per_round=8, micro_batch_rows=1)
    send = half * shape.parameters * 7 / 8
    plans = [replace(workload, zero=zero) for zero in (1, 2, 3)]
    sent = [plan_traffic(shape, plan, MACHINES["h100"], Assumptions()).gradients for plan in plans]
    assert sent == pytest.approx([2 * send, 9 * send, 8 * send])
    held = [plan_memory(shape, plan, 0).gradients / shape.parameters for plan in plans]
    assert held == pytest.approx([half + half / 8, 2 * half / 8, half / 8], rel=1e-6)


def test_stage_3_samples_with_a_whole_copy_and_makes_whole_logits() -> None:
    """One prompt of 8 tokens with two completions of 5 beside one another: 16 positions, 10 of them wanted."""
    shape = read_shape("0.5B")
    changes = {"gpus": 8, "groups_per_round": 8, "group_size": 2, "prompt_tokens": 8, "max_new_tokens": 5}
    workload = replace(SMALL, **changes, micro_batch_rows=2, precision="bf16-mixed")  # type: ignore[arg-type]
    two, three = (plan_memory(shape, replace(workload, zero=zero), 0) for zero in (2, 3))
    assert (two.sampling_copy, three.sampling_copy) == (0, 2 * shape.parameters)
    assert three.logits == (16 * 2 + 10 * 3 * 4) * shape.vocabulary
    gained = two.weights + two.reference - three.weights - three.reference
    assert two.state - three.state == gained - three.sampling_copy


def test_without_a_whole_copy_stage_3_gathers_for_every_token() -> None:
    """16 completions in two lots of 8, of 5 tokens each: ten gatherings where a copy takes one."""
    shape = read_shape("0.5B")
    changes = {"gpus": 8, "groups_per_round": 64, "group_size": 2, "max_new_tokens": 5, "max_rows": 8, "zero": 3}
    copied = replace(SMALL, **changes, micro_batch_rows=2)  # type: ignore[arg-type]
    in_step = replace(copied, gather_weights=False)
    memory, other = (plan_memory(shape, plan, 0) for plan in (copied, in_step))
    assert (memory.gathered_to_sample, other.sampling_copy) == (0, 0)
    assert other.gathered_to_sample == other.gathered > 0
    assert memory.state - other.state == memory.sampling_copy
    sent, more = (plan_traffic(shape, plan, MACHINES["h100"], Assumptions()).weights for plan in (copied, in_step))
    assert more - sent == pytest.approx(9 * shape.parameters * copied.weight_bytes * 7 / 8)


def test_frozen_weights_have_no_gradient_to_compute() -> None:
    """Three passes of all weights are one forward and two backward; beside an adapter they are one and one."""
    shape = read_shape("0.5B")
    plain = replace(SMALL, kl_beta=0.0, minibatches=1, epochs=1)
    whole, adapted = (update_flops(shape, replace(plain, lora_rank=rank)) for rank in (None, 16))
    layers = whole - 4 * (whole - adapted - _layers(shape, plain))
    assert layers == pytest.approx(3 * _layers(shape, plain))


def _layers(shape: Shape, workload: Workload) -> float:
    """A forward pass of the layers alone, from the tokens of the plan's own passes."""
    cut = workload.cut(shape.hidden)
    pieces = workload.groups * workload.members / cut.share
    context = cut.tokens if cut.share > 1 else cut.tokens / 2
    return pieces * cut.tokens * token_flops(shape, context, outputs=False)


def test_adapters_need_no_reference_and_little_state() -> None:
    shape = read_shape("7B")
    whole, adapted = (plan_memory(shape, replace(SMALL, lora_rank=rank), 0) for rank in (None, 16))
    assert adapted.reference == 0 < whole.reference
    assert adapted.gradients + adapted.optimizer < 0.02 * (whole.gradients + whole.optimizer)


def test_what_is_advised_fits() -> None:
    shape = read_shape("1.5B")
    workload = replace(SMALL, gpus=8, groups_per_round=8)
    room = 24e9
    assert plan_memory(shape, workload, 0).total > room
    said = advice(shape, workload, 0, room)
    assert "zero = 1" in said
    assert plan_memory(shape, replace(workload, zero=1), 0).total <= room
    assert advice(read_shape("70B"), workload, 0, 1e9) == []


def test_split_groups_leave_each_process_a_part_of_every_prompts_completions() -> None:
    """Here a fourth of eight, of one prompt; of six and over four, at most two."""
    one = Workload(gpus=4, zero=2, groups_per_round=1, group_size=8, split_groups=True)
    assert (one.groups, one.members, one.groups_side_by_side) == (1, 2, 1)
    assert replace(one, group_size=6).members == 2
    assert replace(one, split_groups=False, groups_per_round=4).members == 8
    shape, machine = read_shape("7B"), MACHINES["h100"]
    alone = replace(one, gpus=1, group_size=2, zero=2)  # what one process has of it
    parts = [plan_traffic(shape, w, machine, Assumptions()) for w in (one, alone)]
    assert parts[0].sampling_flops == parts[1].sampling_flops
    assert parts[0].update_flops == parts[1].update_flops


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"gather_weights": False, "zero": 2}, "gather_weights is false with zero 2"),
        ({"gpus": 3}, "groups_per_round is 8, no multiple of gpus = 3"),
        ({"gpus": 3}, "give 9, or set split_groups to true"),
        ({"zero": 4}, "zero is 4: choose"),
        ({"offload_optimizer": True}, "offload_optimizer is true with zero 0"),
        ({"offload_parameters": True, "zero": 2}, "offload_parameters is true with zero 2"),
        ({"max_rows": 0}, "max_rows is 0: give at least 1"),
        ({"lora_rank": 0}, "lora_rank is 0"),
    ],
)
def test_what_cannot_be_planned_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(PlanError, match=re.escape(complaint)):
        replace(SMALL, **change)


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="policy is 9B, neither"):
        read_config("9B")
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(PlanError, match="describes no model"):
        read_config(str(tmp_path))
    with pytest.raises(PlanError, match="gpu is abacus: choose one of"):
        plan.main(["--policy", "0.5B", "--gpu", "abacus"])
    with pytest.raises(PlanError, match="policy is not given"):
        plan.main([])


def test_the_command_gives_a_page_and_numbers(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--policy", small, "--prompt_tokens", "16", "--max_new_tokens", "8", "--gpu", "l4"]
    plan.main(arguments)
    page = capsys.readouterr().out
    assert "fits:" in page
    assert "sampling copy" in page
    plan.main([*arguments, "--json", "--gpu_memory", "0.5"])
    numbers = json.loads(capsys.readouterr().out)
    assert not numbers["fits"]  # the reserve alone is more
    memory = numbers["memory"]
    assert memory["total"] == memory["state"] + max(memory["phases"].values())


@pytest.mark.slow
def test_the_tables_of_the_page_are_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(["--tables"])
    written = re.search(
        r"<!-- grpo plan --tables -->\n\n(.*?)<!-- end -->", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert written is not None
    assert written[1] == capsys.readouterr().out, "write what `grpo plan --tables` prints between the page's two marks"


# ---- Real runs on the processor. ----

PROMPT = "Say something about the number {} and the number 7, then about their sum, in a few words:"
RUN = """
import re, sys
from pathlib import Path
from grpo import train
train.main(sys.argv[1:])
status = Path("/proc/self/status").read_text()
print("PEAK", int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024)
"""


def never_ending(source: Path, folder: Path) -> Path:
    """The policy with an end token that it does not draw, so that every completion has its full length."""
    shutil.copytree(source, folder, copy_function=os.link)
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [5]}))
    return folder


def peak_bytes(folder: Path, policy: Path, rows: int, kl_beta: float) -> int:
    """The most memory that a run of one round with two updates had: float32, 32 completions of 32 tokens."""
    folder.mkdir()
    (folder / "problems").mkdir()
    for name, count in (("train", 4), ("validation", 1)):
        problems = [Problem(f"{name}{i}", PROMPT.format(i), str(i), "sums") for i in range(count)]
        write_problems(folder / "problems" / f"{name}.jsonl", problems)
    (folder / "policy").symlink_to(policy)
    config = train_config(folder, rounds=1, groups_per_round=4, validation_problems=0)
    config["model"] |= {
        "sampling": {"max_new_tokens": 32, "max_rows": 32},
        "round": {"group_size": 8, "flat_groups": "keep", "epochs": 2},
        "loss": {"kl_beta": kl_beta},
        "optimizer": {"learning_rate": 1e-6, "micro_batch_rows": rows},
    }
    paths = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", RUN, "--config", write_config(folder / "train.yaml", config)],
        env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return int(re.findall(r"PEAK (\d+)", done.stdout)[-1])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("rows", "kl_beta"), [(8, 0.04), (32, 0.04), (8, 0.0), (32, 0.0)])
def test_a_real_run_needs_the_memory_that_was_planned(tmp_path: Path, rows: int, kl_beta: float) -> None:
    """SmolLM2-135M in float32, less what the same run needs of a policy that weighs nothing."""
    source = REPOSITORY / "build" / "policy"
    if not source.is_dir() or read_shape(str(source)).parameters != 134_515_008:
        pytest.skip("build/policy is not SmolLM2-135M: `dvc repro policy` makes it")
    policy = never_ending(source, tmp_path / "policy")
    measured = peak_bytes(tmp_path / "run", policy, rows, kl_beta)
    measured -= peak_bytes(tmp_path / "without", policy_folder(tmp_path / "small"), rows, kl_beta)
    workload = Workload(
        accelerator="cpu", precision="32-true", kl_beta=kl_beta, micro_batch_rows=rows, groups_per_round=4,
        prompt_tokens=23, max_new_tokens=32, max_rows=32, epochs=2,
    )  # fmt: skip
    planned = plan_memory(read_shape(str(policy)), workload, 0).total
    print(f"rows {rows}, kl_beta {kl_beta}: measured {measured / 1e9:.2f} GB, planned {planned / 1e9:.2f} GB")
    assert planned == pytest.approx(measured, rel=0.2)
