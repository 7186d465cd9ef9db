"""What a round moves and computes on one GPU, and how long that takes at assumed speeds.

Volumes are those of the ZeRO paper (arXiv:1910.02054, section 7): of P numbers on N processes, a ring's all-reduce
sends 2 P (N - 1) / N of each process, a reduce-scatter or an all-gather half of that. One way; as much comes in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo.planning.machines import Machine
from grpo.planning.shapes import Shape
from grpo.planning.workload import Workload


@dataclass(frozen=True)
class Assumptions:
    """How much of the data sheets' speeds is reached. None is measured; scale them by a run of your own.

    Args:
        compute: share of the peak in matrix products.
        memory: share of the memory's bandwidth when weights and cache are read token by token.
        links: share of the links' bandwidth.
        launch_seconds: of one layer's operations for one token, started one by one, as the sampler does: on a fast
            GPU this, and no bandwidth, bounds small models.
    """

    compute: float = 0.4
    memory: float = 0.6
    links: float = 0.7
    launch_seconds: float = 4e-4


@dataclass(frozen=True)
class Traffic:
    """Of one round, on one GPU.

    Args:
        gradients: bytes sent to sum gradients and to share out new weights.
        weights: bytes sent to gather weights for passes and for sampling (stage 3).
        host: bytes between GPU and host for what is offloaded, both ways together.
        sampling_flops: floating-point operations.
        update_flops: floating-point operations, the reference's and repeated passes among them.
        seconds: of each part, at the assumed speeds, were it alone.
    """

    gradients: int
    weights: int
    host: int
    sampling_flops: float
    update_flops: float
    seconds: dict[str, float]

    @property
    def bottleneck(self) -> str:
        return max(self.seconds, key=lambda name: self.seconds[name])


def plan_traffic(shape: Shape, workload: Workload, machine: Machine, assumed: Assumptions) -> Traffic:
    """The round's movements and arithmetic."""
    gradients, weights, host = _gradients(shape, workload), _gathers(shape, workload), _host(shape, workload)
    sampling, update = sampling_flops(shape, workload), update_flops(shape, workload)
    peak = assumed.compute * (machine.fp32 if workload.compute_bytes == 4 else machine.bf16)
    link = assumed.links * (machine.neighbours if workload.gpus <= workload.gpus_per_host else machine.network)
    reading, launching = _token_steps(shape, workload, machine, assumed)
    seconds = {
        "sampling: arithmetic": sampling / peak,
        "sampling: reading weights and cache": reading,
        "sampling: starting operations": launching,
        "update: arithmetic": update / peak,
        "communication: gradients": gradients / link,
        "communication: weights": weights / link,
        "host transfers": host / (assumed.links * machine.host),
    }
    return Traffic(gradients, weights, host, sampling, update, seconds)


def _updates(workload: Workload) -> int:
    return workload.epochs * workload.minibatches


def _share(workload: Workload) -> float:
    return (workload.gpus - 1) / workload.gpus


def _gradients(shape: Shape, workload: Workload) -> int:
    """Of each optimiser step once, and from stage 2 on, where no process keeps whole gradients, of every backward pass.

    All-reduce under DDP, reduce-scatter and all-gather of the new weights at stages 1 and 2, reduce-scatter alone at
    stage 3.
    """
    numbers = shape.trainable(workload.lora_rank)
    passes = workload.cut(shape.hidden).micro_batches
    reduced = {0: 2, 1: 2, 2: passes + 1, 3: passes}[workload.zero]
    return int(reduced * numbers * workload.weight_bytes * _share(workload) * _updates(workload))


def _weight_passes(shape: Shape, workload: Workload) -> int:
    """How often a round needs every weight in passes over micro-batches: twice in an update, once to score with."""
    micro_batches = workload.cut(shape.hidden).micro_batches
    of_update = micro_batches * _updates(workload) * (3 if workload.gradient_checkpointing else 2)
    scored = micro_batches * workload.minibatches
    of_reference = scored if workload.kl_beta else 0
    return of_update + of_reference + (scored if workload.minibatches > 1 else 0)


def _gathers(shape: Shape, workload: Workload) -> int:
    """Stage 3 gathers the weights for every pass over a micro-batch, and to sample."""
    if workload.zero != 3:
        return 0
    return int(
        (_weight_passes(shape, workload) + _gathered_to_sample(workload))
        * shape.parameters
        * workload.weight_bytes
        * _share(workload)
    )


def _gathered_to_sample(workload: Workload) -> int:
    """How often a round needs every weight to sample with: once for a whole copy, else for every token of a row."""
    if workload.gather_weights:
        return 1
    return math.ceil(workload.groups / workload.groups_side_by_side) * workload.max_new_tokens


def _host(shape: Shape, workload: Workload) -> int:
    """An update's gradients down and its weights up (arXiv:2101.06840, section 4); each gathering starts at the host
    where weights are there too (arXiv:2104.07857).
    """
    own = workload.weight_bytes / workload.gpus
    moved = 2 * shape.trainable(workload.lora_rank) * own * _updates(workload) if workload.offload_optimizer else 0.0
    if workload.offload_parameters:
        moved += (_weight_passes(shape, workload) + _gathered_to_sample(workload)) * shape.parameters * own
    return int(moved)


def token_flops(shape: Shape, context: float, outputs: bool = True) -> float:
    """Of one token's forward pass over this many positions.

    Two a weight that it meets, and the attention's two products (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).
    """
    weights = shape.matrix_parameters + (shape.output_parameters if outputs else 0)
    return 2.0 * weights + 4.0 * shape.layers * shape.attention_width * context


def sampling_flops(shape: Shape, workload: Workload) -> float:
    """A round's, on one process; the prompt of a group is run once."""
    prompt, new = workload.prompt_tokens, workload.max_new_tokens
    of_prompt = prompt * token_flops(shape, prompt / 2, outputs=False)
    of_completion = new * token_flops(shape, prompt + new / 2)
    return workload.groups * (of_prompt + workload.members * of_completion)


def update_flops(shape: Shape, workload: Workload) -> float:
    """A round's, on one process. A backward pass costs two forward ones, checkpointing one more, the reference and a
    scoring pass one each; the output layer is run once more in the backward pass, being made in chunks. Beside an
    adapter, whose own operations are not counted, a backward pass costs one: the frozen weights have no gradient.
    """
    forward, outputs = _pass_flops(shape, workload)
    backward = 2 if workload.lora_rank is None else 1
    passes = 1 + backward + workload.gradient_checkpointing
    trained = workload.epochs * (forward * passes + (2 + backward) * outputs)
    return trained + ((workload.kl_beta > 0) + (workload.minibatches > 1)) * (forward + outputs)


def _pass_flops(shape: Shape, workload: Workload) -> tuple[float, float]:
    """Forward, of the layers and of the output layer: completions that share a row have scores for all of it."""
    cut = workload.cut(shape.hidden)
    context = cut.tokens if cut.share > 1 else cut.tokens / 2
    pieces = workload.groups * workload.members / cut.share
    layers = pieces * cut.tokens * token_flops(shape, context, outputs=False)
    tokens = workload.groups * workload.members * workload.max_new_tokens
    return layers, 2.0 * shape.output_parameters * tokens


def _token_steps(shape: Shape, workload: Workload, machine: Machine, assumed: Assumptions) -> tuple[float, float]:
    """Seconds to read what every step of sampling reads, and to start its operations."""
    turns = -(-workload.groups // workload.groups_side_by_side)
    steps = turns * workload.max_new_tokens
    rows = workload.groups_side_by_side * workload.members
    positions = rows * workload.max_new_tokens / 2 + workload.groups_side_by_side * workload.prompt_tokens
    cache = positions * shape.cache_width * shape.layers * workload.compute_bytes
    weights = (shape.matrix_parameters + shape.output_parameters) * workload.weight_bytes
    reading = steps * (weights + cache) / (assumed.memory * machine.bandwidth)
    return reading, steps * shape.layers * assumed.launch_seconds
