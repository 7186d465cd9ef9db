"""Bytes on one GPU, part by part, and on the host.

State follows the ZeRO paper (Rajbhandari et al. 2020, arXiv:1910.02054, section 3 and figure 1): AdamW with mixed
precision holds 2 bytes a weight, 2 a gradient and K = 12 of optimiser state (a float32 master copy and two moments),
of which stage 1 divides the optimiser state by the number of processes, stage 2 the gradients too, stage 3 the
weights too. Where DeepSpeed or the training holds more than that, it is counted and said so.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo.planning.shapes import Shape
from grpo.planning.traced import sampling_bytes, update_bytes
from grpo.planning.workload import Workload
from grpo.rollouts.chosen_logprobs import CHUNK_BYTES

# Numbers in each of DeepSpeed's communication buckets, as Lightning's DeepSpeedStrategy sets them.
BUCKET = 200_000_000
# Weights that stage 3 keeps gathered at a time, DeepSpeed's stage3_max_live_parameters.
LIVE_PARAMETERS = 1_000_000_000


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU. What is held all the time adds up; of the three phases only the largest counts.

    Args:
        weights: of the policy, adapters included.
        gradients: from the first backward pass of an update to its step.
        optimizer: moments, and the float32 master copy under DeepSpeed.
        reference: weights of the KL anchor.
        buckets: what gradients are exchanged in.
        sampling_copy: whole weights beside the divided ones, which stage 3 samples with.
        activations: update phase: kept for the backward pass, and its own working memory, the output layer's left out.
        logits: update phase: of a chunk of tokens, and the gradient of the output layer.
        gathered: update phase: weights of other processes that are here for a pass (stage 3).
        gathered_to_sample: sampling phase: the same, where no whole copy samples.
        cache: sampling phase: keys and values.
        drawing: sampling phase: the last token's pass and draw.
        step: step phase: AdamW's working memory, and the float32 gradients that it reads under DeepSpeed.
        reserve: the CUDA context, libraries and fragmentation; an assumption.
        host: bytes on each host for what is offloaded.
    """

    weights: int
    gradients: int
    optimizer: int
    reference: int
    buckets: int
    sampling_copy: int
    activations: int
    logits: int
    gathered: int
    gathered_to_sample: int
    cache: int
    drawing: int
    step: int
    reserve: int
    host: int

    @property
    def state(self) -> int:
        """Held in every phase."""
        own = self.weights + self.gradients + self.optimizer + self.reference
        return own + self.buckets + self.sampling_copy + self.reserve

    @property
    def phases(self) -> dict[str, int]:
        """What each phase needs beside the state."""
        return {
            "update": self.activations + self.logits + self.gathered,
            "sampling": self.cache + self.drawing + self.gathered_to_sample,
            "step": self.step,
        }

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def total(self) -> int:
        """At the peak of a round."""
        return self.state + max(self.phases.values())


def plan_memory(shape: Shape, workload: Workload, reserve: int) -> Memory:
    """What one process of the workload needs."""
    whole_weights = shape.parameters * workload.weight_bytes
    divided, copied = workload.zero == 3, workload.gather_weights
    gathered = min(shape.parameters, LIVE_PARAMETERS) * workload.weight_bytes if divided else 0
    offloaded = workload.offload_parameters
    return Memory(
        weights=0 if offloaded else _weights(shape, workload),
        gradients=_gradients(shape, workload),
        optimizer=0 if workload.offload_optimizer else _optimizer(shape, workload),
        reference=0 if offloaded else _reference(shape, workload),
        buckets=_buckets(shape, workload),
        sampling_copy=whole_weights if divided and copied else 0,
        activations=update_bytes(shape, workload),
        logits=_logits(shape, workload),
        gathered=gathered,
        gathered_to_sample=0 if copied else gathered,
        cache=_cache(shape, workload),
        drawing=_drawing(shape, workload),
        step=_step(shape, workload),
        reserve=reserve,
        host=_host(shape, workload),
    )


def _weights(shape: Shape, workload: Workload) -> int:
    adapters = 0 if workload.lora_rank is None else shape.trainable(workload.lora_rank)
    return (shape.parameters + adapters) * workload.weight_bytes // (workload.gpus if workload.zero == 3 else 1)


def _reference(shape: Shape, workload: Workload) -> int:
    """With adapters it is the same weights, the adapters switched off."""
    if workload.kl_beta == 0 or workload.lora_rank is not None:
        return 0
    return _weights(shape, workload)


def _gradients(shape: Shape, workload: Workload) -> int:
    """Whole until an update's last backward pass, and at stage 1 a part of their sum; from stage 2 on a part alone.

    Stage 2 holds the part of a pass beside that of the passes before it.
    """
    whole = shape.trainable(workload.lora_rank) * workload.weight_bytes
    if workload.zero == 0:
        return whole
    part = whole // workload.gpus
    several = workload.cut(shape.hidden).micro_batches > 1
    return {1: whole + part, 2: 2 * part if several else part, 3: part}[workload.zero]


def _optimizer(shape: Shape, workload: Workload) -> int:
    """Two moments, and under DeepSpeed a master copy in float32, whatever the precision."""
    trainable = shape.trainable(workload.lora_rank)
    return 8 * trainable if workload.zero == 0 else 12 * trainable // workload.gpus


def _buckets(shape: Shape, workload: Workload) -> int:
    """DDP copies every gradient into its buckets; DeepSpeed has two to reduce by turns, and one to gather."""
    trainable = shape.trainable(workload.lora_rank)
    if workload.gpus == 1 and workload.zero == 0:
        return 0
    held = trainable if workload.zero == 0 else 3 * min(trainable, BUCKET)
    return held * workload.weight_bytes


def _step(shape: Shape, workload: Workload) -> int:
    """AdamW on a GPU takes one more float32 number a weight for all tensors at once, on a processor for one tensor."""
    trainable = shape.trainable(workload.lora_rank)
    if workload.offload_optimizer:
        return 0
    if workload.accelerator == "cpu":
        return 2 * 4 * min(trainable, shape.largest_parameter)
    return 4 * trainable if workload.zero == 0 else 2 * 4 * trainable // workload.gpus


def _cache(shape: Shape, workload: Workload) -> int:
    """Keys and values: of each row's own tokens, and of each prompt once."""
    rows = workload.groups_side_by_side * workload.members
    positions = rows * workload.own_columns + workload.prompts_kept * workload.prompt_tokens
    return positions * shape.cache_width * shape.layers * workload.compute_bytes


def _drawing(shape: Shape, workload: Workload) -> int:
    """The last token's pass and draw; or the prompts' pass with a cache of its own, keys as autocast leaves them."""
    last, prompts = sampling_bytes(shape, workload)
    tokens = workload.groups_side_by_side * workload.prompt_tokens
    key_and_value = workload.compute_bytes + workload.weight_bytes
    return max(last, prompts + tokens * shape.cache_width * shape.layers * key_and_value // 2)


def _logits(shape: Shape, workload: Workload) -> int:
    """The output layer of a micro-batch: logits in float32 for a chunk of tokens, three such tensors at once, and the
    gradient of its weights in float32 before it is added up, in the weights' own precision too where that is less.

    Under stage 3 the output layer is put together for the model's own pass alone, so that the logits are whole: of
    every position as the model gives them, and of the wanted ones in float32 with logarithms and probabilities.
    """
    if workload.zero == 3:
        cut = workload.cut(shape.hidden)
        wanted = cut.share * workload.max_new_tokens
        own = cut.tokens * workload.compute_bytes + wanted * 3 * 4
        return cut.rows * own * shape.vocabulary
    chunk = max(CHUNK_BYTES, 4 * shape.vocabulary)
    if workload.lora_rank is not None:
        return 3 * chunk
    rounded = 0 if workload.compute_bytes == 4 else workload.compute_bytes
    return 3 * chunk + shape.output_parameters * (4 + rounded)


def _host(shape: Shape, workload: Workload) -> int:
    """Optimiser state with float32 gradients (ZeRO-Offload, arXiv:2101.06840), and weights (arXiv:2104.07857)."""
    here = min(workload.gpus, workload.gpus_per_host)
    optimizer = 16 * shape.trainable(workload.lora_rank) * here // workload.gpus if workload.offload_optimizer else 0
    weights = _weights(shape, workload) + _reference(shape, workload)
    return optimizer + (weights * here if workload.offload_parameters else 0)
