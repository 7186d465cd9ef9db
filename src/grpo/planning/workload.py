"""What a run is to do and on what: the questions that the plan answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo.rollouts.collate import PassLimits
from grpo.rollouts.growing_rows import MOST_PROMPTS, SLACK

Precision = Literal["32-true", "bf16-mixed"]
Accelerator = Literal["gpu", "cpu"]


class PlanError(ValueError):
    """A run that could not be planned, or not be run, as it is asked for."""


@dataclass(frozen=True)
class Cut:
    """An update in micro-batches.

    Args:
        share: completions that share a pass over their prompt, side by side in one row of the model.
        tokens: of such a row.
        rows: of these in the largest micro-batch.
        micro_batches: of an update, on one process.
    """

    share: int
    tokens: int
    rows: int
    micro_batches: int


@dataclass(frozen=True)
class Workload:
    """A round of training and the machine it is spread over, named as ``configs/train.yaml`` does where it can.

    Args:
        gpus: processes in all, one a GPU.
        gpus_per_host: of them on one machine; they share its memory, and reach each other faster than others.
        accelerator: ``cpu`` plans a run on processors, whose optimiser step needs less room.
        zero: 0 is one device or DDP; 1, 2 and 3 are DeepSpeed's stages.
        offload_optimizer: optimiser state in the host's memory (stage 1 and above).
        offload_parameters: weights there too (stage 3).
        gather_weights: whether each process samples with a whole copy at stage 3; else it gathers them in every pass.
        precision: ``bf16-mixed`` is autocast over float32 weights at stage 0, and bfloat16 weights with a float32
            master copy under DeepSpeed.
        kl_beta: above 0 there is a reference.
        lora_rank: of adapters on every linear layer but the output's; None trains all weights.
        group_size: completions of a prompt.
        groups_per_round: prompts of a round, of all processes.
        split_groups: whether the processes share the completions of every prompt, else they share the prompts.
        prompt_tokens: of a prompt, the longest.
        max_new_tokens: of a completion, the longest.
        micro_batch_rows: completions run forward and backward at a time, at most; None for any number.
        micro_batch_tokens: tokens run forward and backward at a time, at most; None for any number.
        max_rows: completions sampled side by side.
        epochs: passes over a round's completions.
        minibatches: optimiser steps a pass.
        gradient_checkpointing: keep a layer's input alone and run the layer again in the backward pass.
    """

    gpus: int = 1
    gpus_per_host: int = 8
    accelerator: Accelerator = "gpu"
    zero: int = 0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    gather_weights: bool = True
    precision: Precision = "bf16-mixed"
    kl_beta: float = 0.04
    lora_rank: int | None = None
    group_size: int = 8
    groups_per_round: int = 16
    split_groups: bool = False
    prompt_tokens: int = 512
    max_new_tokens: int = 1024
    micro_batch_rows: int | None = 8
    micro_batch_tokens: int | None = None
    max_rows: int = 128
    epochs: int = 1
    minibatches: int = 1
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}: give at least 1")
        for name in ("lora_rank", "micro_batch_rows", "micro_batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} is {value}: give at least 1, or null for none")
        if self.zero not in (0, 1, 2, 3):
            raise PlanError(f"zero is {self.zero}: choose 0 (DDP), 1, 2 or 3 (DeepSpeed's stages)")
        if self.offload_optimizer and self.zero == 0:
            raise PlanError("offload_optimizer is true with zero 0: DDP keeps its optimiser; set zero to 1, 2 or 3")
        if self.offload_parameters and self.zero != 3:
            raise PlanError(
                f"offload_parameters is true with zero {self.zero}: only stage 3 moves weights; set zero to 3"
            )
        if not self.gather_weights and self.zero != 3:
            raise PlanError(
                f"gather_weights is false with zero {self.zero}: each process has all weights anyway; set zero to 3"
            )
        if self.groups_per_round % self.gpus and not self.split_groups:
            raise PlanError(
                f"groups_per_round is {self.groups_per_round}, no multiple of gpus = {self.gpus}: every process gets "
                f"whole groups; give {-(-self.groups_per_round // self.gpus) * self.gpus}, or set split_groups to true"
            )

    @property
    def groups(self) -> int:
        """Prompts of a round on one process."""
        return self.groups_per_round if self.split_groups else self.groups_per_round // self.gpus

    @property
    def members(self) -> int:
        """Completions of a prompt on one process, at most."""
        return -(-self.group_size // self.gpus) if self.split_groups else self.group_size

    @property
    def groups_in_update(self) -> int:
        """Prompts of one optimiser step on one process."""
        return max(1, -(-self.groups // self.minibatches))

    def cut(self, width: int) -> Cut:
        """How an update is cut into micro-batches, by the training's own limits, were all completions of full length.

        Args:
            width: of the model's hidden states.
        """
        limits = PassLimits(self.micro_batch_rows, self.micro_batch_tokens, width=width)
        read = self.max_new_tokens - 1  # the last token predicts nothing
        share = 1
        for rows in range(2, self.members + 1):
            fits = limits.fits(rows, self.prompt_tokens + rows * read)
            share = rows if fits and rows * read <= limits.siblings(self.prompt_tokens) else share
        tokens = self.prompt_tokens + share * read
        pieces = self.groups_in_update * -(-self.members // share)
        together = 1
        while together < pieces and limits.fits((together + 1) * share, (together + 1) * tokens):
            together += 1
        return Cut(share, tokens, together, -(-pieces // together))

    @property
    def groups_side_by_side(self) -> int:
        """Prompts whose completions are sampled at once."""
        return max(1, min(self.max_rows // self.members, self.groups))

    @property
    def prompts_wait(self) -> bool:
        """Whether some find no room at first."""
        return self.groups > self.groups_side_by_side

    @property
    def own_columns(self) -> int:
        """Tokens of its own that a row has room for: a quarter more where prompts wait for rows to end."""
        return self.max_new_tokens + (1 + int(SLACK * self.max_new_tokens) if self.prompts_wait else 0)

    @property
    def prompts_kept(self) -> int:
        """Prompts that there is room for: more than those side by side, as single completions outlast their groups."""
        return min(self.groups, MOST_PROMPTS * self.groups_side_by_side)

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in the passes."""
        return 4 if self.precision == "32-true" else 2

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight as the model holds it: autocast leaves it in float32."""
        return 2 if self.precision == "bf16-mixed" and self.zero else 4


_COUNTS = (
    "gpus",
    "gpus_per_host",
    "group_size",
    "groups_per_round",
    "prompt_tokens",
    "max_new_tokens",
    "max_rows",
    "epochs",
    "minibatches",
)
