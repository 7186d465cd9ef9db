"""What to change where a run does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from grpo.planning.memory import plan_memory
from grpo.planning.shapes import Shape
from grpo.planning.workload import Workload


def changes(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """What needs less memory, from what costs least to what changes the method, each said as it would be set."""
    if workload.max_rows > workload.group_size:
        yield f"max_rows = {workload.group_size}", replace(workload, max_rows=workload.group_size)
    if workload.micro_batch_rows != 1:
        yield "micro_batch_rows = 1", replace(workload, micro_batch_rows=1, micro_batch_tokens=None)
    if not workload.gradient_checkpointing:
        yield "gradient_checkpointing = true", replace(workload, gradient_checkpointing=True)
    yield from ((f"zero = {zero}", _at_stage(workload, zero)) for zero in (1, 2, 3) if zero > workload.zero)
    if not workload.offload_optimizer:
        at = max(workload.zero, 2)
        yield f"zero = {at}, offload_optimizer = true", replace(workload, zero=at, offload_optimizer=True)
    if not workload.offload_parameters:
        whole = replace(workload, zero=3, offload_optimizer=True, offload_parameters=True)
        yield "zero = 3, offload_optimizer = true, offload_parameters = true", whole
    if workload.kl_beta:
        yield "kl_beta = 0", replace(workload, kl_beta=0.0)
    if workload.lora_rank is None:
        yield "lora_rank = 16", replace(workload, lora_rank=16)


def _at_stage(workload: Workload, zero: int) -> Workload:
    return replace(workload, zero=zero)


def advice(shape: Shape, workload: Workload, reserve: int, room: float) -> list[str]:
    """Single changes that make it fit; where none does, the changes that do together; empty where nothing here does.

    Args:
        room: bytes of a GPU.
    """
    single = [said for said, changed in changes(workload) if plan_memory(shape, changed, reserve).total <= room]
    if single:
        return single
    together: list[str] = []
    while (smaller := _largest_saving(shape, workload, reserve)) is not None:
        said, workload = smaller
        together.append(said)
        if plan_memory(shape, workload, reserve).total <= room:
            return [" and ".join(together)]
    return []


def _largest_saving(shape: Shape, workload: Workload, reserve: int) -> tuple[str, Workload] | None:
    """The change that leaves the least, or None where none saves a hundredth."""
    before = plan_memory(shape, workload, reserve).total
    options = [(plan_memory(shape, changed, reserve).total, said, changed) for said, changed in changes(workload)]
    if not options:
        return None
    after, said, changed = min(options, key=lambda option: option[0])
    return (said, changed) if after < 0.99 * before else None
