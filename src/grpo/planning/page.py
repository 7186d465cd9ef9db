"""The plan as a page for people, and the tables of docs/scaling.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from grpo.planning.machines import MACHINES, Machine
from grpo.planning.memory import Memory, plan_memory
from grpo.planning.shapes import NAMED, Shape, read_shape
from grpo.planning.traffic import Assumptions, Traffic, plan_traffic
from grpo.planning.workload import Workload

PARTS = {
    "all the time": ("weights", "gradients", "optimizer", "reference", "buckets", "sampling_copy", "reserve"),
    "update": ("activations", "logits", "gathered"),
    "sampling": ("cache", "drawing", "gathered_to_sample"),
    "step": ("step",),
}
# The round of the documentation's tables.
SHOWN = Workload(gpus=8, groups_per_round=64, prompt_tokens=256, max_new_tokens=512, zero=2)
STAGES = {
    "DDP": {"zero": 0},
    "stage 1": {"zero": 1},
    "stage 2": {"zero": 2},
    "stage 3": {"zero": 3},
    "stage 3, all offloaded": {"zero": 3, "offload_optimizer": True, "offload_parameters": True},
}
SHOWN_SIZES = ("0.5B", "1.5B", "7B", "14B", "32B", "70B")
RESERVE = 2_000_000_000


def gigabytes(count: float) -> str:
    """Bytes as gigabytes of 10^9, to three figures."""
    value = count / 1e9
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def as_json(shape: Shape, workload: Workload, machine: Machine, memory: Memory, traffic: Traffic) -> dict[str, Any]:
    """The plan's numbers: bytes, operations, seconds."""
    return {
        "policy": asdict(shape),
        "workload": asdict(workload),
        "gpu": asdict(machine),
        "memory": asdict(memory)
        | {"state": memory.state, "phases": memory.phases, "peak_phase": memory.peak_phase, "total": memory.total},
        "traffic": asdict(traffic) | {"bottleneck": traffic.bottleneck},
        "fits": memory.total <= machine.memory,
    }


def show(
    shape: Shape, workload: Workload, machine: Machine, memory: Memory, traffic: Traffic, advised: Sequence[str]
) -> None:
    """Print the plan."""
    said = _verdict(machine, memory, advised)
    Console().print(Group(_memory_table(shape, workload, memory), _traffic_table(workload, machine, traffic), said))


def _memory_table(shape: Shape, workload: Workload, memory: Memory) -> RenderableType:
    table = Table(title=f"{shape.name}: {shape.parameters:,} weights, {_how(shape, workload)}")
    for name in ("when", "what", "GB on each GPU"):
        table.add_column(name, justify="right" if "GB" in name else "left")
    for phase, parts in PARTS.items():
        for part in parts:
            table.add_row(phase, part.replace("_", " "), gigabytes(getattr(memory, part)))
        table.add_section()
    table.add_row("peak", f"all the time + {memory.peak_phase}", gigabytes(memory.total))
    if memory.host:
        table.add_row("", "on each host", gigabytes(memory.host))
    return table


def _how(shape: Shape, workload: Workload) -> str:
    strategy = f"ZeRO stage {workload.zero}" if workload.zero else "one device" if workload.gpus == 1 else "DDP"
    rank = workload.lora_rank
    trained = "" if rank is None else f", LoRA of rank {rank} ({shape.trainable(rank):,} weights trained)"
    return f"{workload.precision}, {workload.gpus} GPU, {strategy}{trained}"


def _traffic_table(workload: Workload, machine: Machine, traffic: Traffic) -> RenderableType:
    table = Table(title=f"a round of {workload.groups_per_round} prompts on {machine.name}, at assumed speeds")
    for name in ("what", "on each GPU", "seconds, were it alone"):
        table.add_column(name, justify="left" if name == "what" else "right")
    amounts = {
        "sampling: arithmetic": f"{traffic.sampling_flops / 1e12:,.1f} TFLOP",
        "update: arithmetic": f"{traffic.update_flops / 1e12:,.1f} TFLOP",
        "communication: gradients": f"{gigabytes(traffic.gradients)} GB sent",
        "communication: weights": f"{gigabytes(traffic.weights)} GB sent",
        "host transfers": f"{gigabytes(traffic.host)} GB",
    }
    for name, seconds in traffic.seconds.items():
        table.add_row(name, amounts.get(name, ""), f"{seconds:,.2f}")
    return table


def _verdict(machine: Machine, memory: Memory, advised: Sequence[str]) -> str:
    room = f"{gigabytes(memory.total)} GB of {gigabytes(machine.memory)} GB"
    if memory.total <= machine.memory:
        return f"fits: {room}"
    remedy = "; or ".join(advised) or "more GPUs, shorter completions, or a smaller policy"
    return f"does not fit: {room}. What would: {remedy}"


def markdown_tables() -> str:
    """The tables of docs/scaling.md, for the round of :data:`SHOWN`."""
    shapes = [read_shape(name) for name in SHOWN_SIZES]
    tables = (_state_table(shapes), _phase_table(shapes), _fit_table(shapes), _round_table(shapes))
    return "\n\n".join(tables) + "\n"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _at(stage: str) -> Workload:
    return replace(SHOWN, **STAGES[stage])  # type: ignore[arg-type]


def _state_table(shapes: Sequence[Shape]) -> str:
    head = ["GB held all the time, on each of 8 GPUs", *STAGES]
    rows = [[s.name, *(gigabytes(plan_memory(s, _at(stage), RESERVE).state) for stage in STAGES)] for s in shapes]
    return _markdown(head, rows)


def _phase_table(shapes: Sequence[Shape]) -> str:
    head = ["GB beside it, stage 2", "activations", "logits", "activations, checkpointed", "cache", "drawing"]
    rows = []
    for shape in shapes:
        plain = plan_memory(shape, SHOWN, RESERVE)
        kept = plan_memory(shape, replace(SHOWN, gradient_checkpointing=True), RESERVE)
        parts = (plain.activations, plain.logits, kept.activations, plain.cache, plain.drawing)
        rows.append([shape.name, *map(gigabytes, parts)])
    return _markdown(head, rows)


def _fit_table(shapes: Sequence[Shape]) -> str:
    head = ["the peak in GB, and the least of the GPUs below that holds it", *STAGES]
    return _markdown(head, [[shape.name, *(_fit(shape, _at(stage)) for stage in STAGES)] for shape in shapes])


def _fit(shape: Shape, workload: Workload) -> str:
    """With checkpointing, marked so, where it fits in no other way."""
    peaks = [
        plan_memory(shape, replace(workload, gradient_checkpointing=kept), RESERVE).total for kept in (False, True)
    ]
    for peak, mark in zip(peaks, ("", " (checkpointed)"), strict=True):
        holding = [machine for machine in MACHINES.values() if machine.memory >= peak]
        if holding:
            return f"{gigabytes(peak)}: {min(holding, key=lambda m: m.memory).name}{mark}"
    return f"{gigabytes(min(peaks))}: none"


def _round_table(shapes: Sequence[Shape]) -> str:
    head = [
        "a round on 8 x h100", "GB sent, DDP", "stage 1", "stage 2", "stage 3", "stage 3, to and from the host",
        "sampling, TFLOP", "update, TFLOP", "the longest part at stage 2, seconds were it alone",
    ]  # fmt: skip
    return _markdown(head, [_round_row(shape) for shape in shapes])


def _round_row(shape: Shape) -> list[str]:
    plans = {stage: plan_traffic(shape, _at(stage), MACHINES["h100"], Assumptions()) for stage in STAGES}
    stages = ("DDP", "stage 1", "stage 2", "stage 3")
    sent = [gigabytes(plans[stage].gradients + plans[stage].weights) for stage in stages]
    two = plans["stage 2"]
    longest = f"{two.bottleneck}, {two.seconds[two.bottleneck]:,.0f}"
    work = [f"{flops / 1e12:,.0f}" for flops in (two.sampling_flops, two.update_flops)]
    return [shape.name, *sent, gigabytes(plans["stage 3, all offloaded"].host), *work, longest]


def named_sizes() -> str:
    return ", ".join(NAMED)
