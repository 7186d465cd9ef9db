"""What differs between one process and many, and nothing of the method."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

T = TypeVar("T")


class NonFiniteGradient(RuntimeError):
    """The gradient is not finite; the weights are still those of the last good update."""


class CPUDeepSpeedStrategy(DeepSpeedStrategy):
    """DeepSpeed on CPU processes over gloo, for tests of sharding without a GPU.

    Lightning's own refuses every accelerator but CUDA, and wants devices with an index.

    Args:
        stage: of ZeRO, 1 to 3.
        offload_optimizer: the optimiser's state and step in DeepSpeed's host memory.
        offload_parameters: the weights there too, at stage 3.
    """

    def __init__(self, stage: int = 2, offload_optimizer: bool = False, offload_parameters: bool = False) -> None:
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            process_group_backend="gloo",
        )

    def setup_environment(self) -> None:
        import deepspeed

        self.parallel_devices = [torch.device("cpu", i) for i in range(len(self.parallel_devices or []))]
        # The shared-memory operator serves inference alone, and building it takes minutes of compiling.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        super(DeepSpeedStrategy, self).setup_environment()


class FullyShardedStrategy(ModelParallelStrategy):
    """PyTorch's FSDP2: each process has a part of every weight, of its gradient and of the optimiser's state.

    States are saved whole, in one file, so that a run can go on in any number of processes.

    Args:
        process_group_backend: None for the device's own.
    """

    def __init__(self, process_group_backend: str | None = None) -> None:
        super().__init__(
            tensor_parallel_size=1, save_distributed_checkpoint=False, process_group_backend=process_group_backend
        )

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_processes * self.num_nodes
        super().setup_environment()


def all_processes(value: T) -> list[T]:
    """``value`` as every process has it, in the order of their ranks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [value]
    gathered: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered  # type: ignore[return-value]


def prepare_strategy(module: L.LightningModule) -> None:
    """See that the strategy is one under which the method holds, and set what it leaves open.

    Raises:
        ValueError: anything but one device, DDP, FSDP2, and DeepSpeed at stage 1, 2 or 3.
    """
    strategy = module.trainer.strategy
    # Stage 0 cannot tell an update's backward passes from updates of their own.
    handled = (SingleDeviceStrategy, DDPStrategy, FullyShardedStrategy)
    if zero_stage(module) not in (1, 2, 3) and type(strategy) not in handled:
        raise ValueError(
            f"trainer.strategy is {type(strategy).__name__}, whose gradients and weights are not handled here: use "
            "one device, ddp, DeepSpeed at stage 1, 2 or 3, or grpo.training.strategies.FullyShardedStrategy (FSDP2)"
        )
    if isinstance(strategy, DeepSpeedStrategy):
        assert strategy.config is not None
        # The same AdamW wherever its state lies: DeepSpeed's own for the host would be compiled first.
        strategy.config.setdefault("zero_force_ds_cpu_optimizer", False)
    if isinstance(strategy, (DeepSpeedStrategy, FullyShardedStrategy)):
        # The frozen reference is not in the states that are kept: it is read from its policy folder again.
        module.strict_loading = False


def cuts_up_weights(module: L.LightningModule) -> bool:
    """Whether each process has a part of every weight alone."""
    return zero_stage(module) == 3 or isinstance(module.trainer.strategy, FullyShardedStrategy)


def cut_up(module: L.LightningModule, models: Sequence[PreTrainedModel | None]) -> None:
    """Cut models up where that is left to the module: under FSDP2, each layer by itself, then the rest."""
    strategy = module.trainer.strategy
    if not isinstance(strategy, FullyShardedStrategy):
        return
    mesh = strategy.device_mesh["data_parallel"]
    for model in models:
        if model is None or isinstance(next(model.parameters()), DTensor):
            continue
        # Only a backward pass cuts the root up again by itself. A frozen model has none: its root would stay whole, and
        # what is copied into it would be lost when a state is saved.
        frozen = not any(weight.requires_grad for weight in model.parameters())
        for layer in [part for part in model.modules() if type(part).__name__ in (model._no_split_modules or ())]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=True if frozen else None)


def begin_pass(module: L.LightningModule) -> None:
    """Before a pass of a cut-up model without a gradient, in every process at once."""
    engine = deepspeed_engine(module)
    if engine is not None:
        # What DeepSpeed does at the start of a forward pass, which to it a whole round is. It notes which layers follow
        # each other, and would take a round's passes for one long pass in which most weights are soon needed again.
        engine.optimizer.parameter_offload.get_param_coordinator().reset_step()


def cut_up_again(model: PreTrainedModel) -> None:
    """After passes without a backward pass, which under FSDP2 leave what is in no layer whole."""
    if isinstance(model, FSDPModule):
        model.reshard()


def zero_stage(module: L.LightningModule) -> int | None:
    """DeepSpeed's stage, None under another strategy."""
    strategy = module.trainer.strategy
    if not isinstance(strategy, DeepSpeedStrategy):
        return None
    return int((strategy.config or {}).get("zero_optimization", {}).get("stage", 0))


def keep_frozen_weights(module: L.LightningModule, keep: bool) -> None:
    """Whether the next state that is saved holds weights that nothing trains. Without DeepSpeed the module decides."""
    strategy = module.trainer.strategy
    if isinstance(strategy, DeepSpeedStrategy):
        strategy.exclude_frozen_parameters = not keep


def summed_gradients(module: L.LightningModule) -> AbstractContextManager[None]:
    """Within it, the gradients of several backward passes add up to one update's.

    PyTorch does so by itself. DeepSpeed takes each pass for an update of its own, and keeps the last one's
    gradient or a mixture, unless it is told that they belong together. At stage 1, which divides no gradients, they
    are kept whole and reduced once, at the end; from stage 2 on see :func:`exchanged`.
    """
    engine = deepspeed_engine(module)
    return nullcontext() if engine is None or zero_stage(module) != 1 else engine.coalesce_grad_reduction()


def exchanged(module: L.LightningModule, now: bool) -> AbstractContextManager[None]:
    """Around one backward pass of an update, with the forward pass before it; ``now`` says that it is the last one.

    Under DDP a pass's gradient stays with its process, and the last pass exchanges the sum, where DDP by itself would
    after every pass. From DeepSpeed's stage 2 on every pass is reduced, so that no process keeps more of the sum than
    its part: a message a pass is what that memory costs.
    """
    strategy = module.trainer.strategy
    if isinstance(strategy, DeepSpeedStrategy) and zero_stage(module) != 1:
        engine = strategy.deepspeed_engine
        engine.set_gradient_accumulation_boundary(now)
        # What the engine's own forward pass does first: to the engine a whole round is one forward pass, and stage 3
        # would put each gradient in the place of the one before.
        engine.optimizer.clear_backward_seen_flag()
        return nullcontext()
    model = strategy.model
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not now else nullcontext()


def step_optimizer(module: L.LightningModule, max_norm: float) -> float:
    """Clip the accumulated gradient, step, clear it, and give its norm before clipping.

    Raises:
        NonFiniteGradient: before anything is changed (under DeepSpeed, which clips inside its step: after it).
    """
    optimizer = module.optimizers()
    assert isinstance(optimizer, LightningOptimizer)
    update = module.trainer.global_step + 1
    engine = deepspeed_engine(module)
    if engine is None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        total = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        _require_finite(norm, update)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm
    engine.optimizer.clip_grad = max_norm
    optimizer.step()
    norm = float(engine.get_global_grad_norm())
    _require_finite(norm, update)
    return norm


def deepspeed_engine(module: L.LightningModule) -> DeepSpeedEngine | None:
    """The engine that holds the module's weights, under a DeepSpeed strategy."""
    strategy = module.trainer.strategy
    return strategy.deepspeed_engine if isinstance(strategy, DeepSpeedStrategy) else None


def _require_finite(norm: float, update: int) -> None:
    if not 0 <= norm < float("inf"):  # DeepSpeed gives -1 for what is not finite where it does not look for it
        raise NonFiniteGradient(
            f"the gradient's norm is {norm} at update {update}: training stops here. "
            "Lower model.optimizer.learning_rate, or look at the round's completions and rewards in the record"
        )
