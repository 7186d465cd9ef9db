"""What differs between one process and many, and nothing of the method."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from torch.nn.parallel import DistributedDataParallel

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
        ValueError: anything but one device, DDP, and DeepSpeed at stage 1, 2 or 3.
    """
    strategy = module.trainer.strategy
    # Stage 0 cannot tell an update's backward passes from updates of their own.
    if zero_stage(module) not in (1, 2, 3) and type(strategy) not in (SingleDeviceStrategy, DDPStrategy):
        raise ValueError(
            f"trainer.strategy is {type(strategy).__name__}, whose gradients and weights are not handled here: use "
            "one device, ddp, or DeepSpeed at stage 1, 2 or 3"
        )
    if isinstance(strategy, DeepSpeedStrategy):
        assert strategy.config is not None
        # The same AdamW wherever its state lies: DeepSpeed's own for the host would be compiled first.
        strategy.config.setdefault("zero_force_ds_cpu_optimizer", False)
        # The frozen reference is not in the states that are kept: it is read from its policy folder again.
        module.strict_loading = False


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
    gradient or a mixture, unless it is told that they belong together.
    """
    engine = deepspeed_engine(module)
    return nullcontext() if engine is None else engine.coalesce_grad_reduction()


def exchanged(module: L.LightningModule, now: bool) -> AbstractContextManager[None]:
    """Within it a backward pass's gradient is kept by its process under DDP, unless ``now``.

    The last pass of an update then exchanges the sum once, where DDP by itself would after every pass.
    """
    model = module.trainer.strategy.model
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not now else nullcontext()


def step_optimizer(module: L.LightningModule, max_norm: float) -> float:
    """Clip the accumulated gradient, step, clear it, and give its norm before clipping.

    Raises:
        NonFiniteGradient: before anything is changed (under DeepSpeed, which clips inside its step: after it).
    """
    optimizer = module.optimizers()
    assert isinstance(optimizer, LightningOptimizer)
    engine = deepspeed_engine(module)
    if engine is None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
        _require_finite(norm, module)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm
    engine.optimizer.clip_grad = max_norm
    optimizer.step()
    norm = float(engine.get_global_grad_norm())
    _require_finite(norm, module)
    return norm


def deepspeed_engine(module: L.LightningModule) -> DeepSpeedEngine | None:
    """The engine that holds the module's weights, under a DeepSpeed strategy."""
    strategy = module.trainer.strategy
    return strategy.deepspeed_engine if isinstance(strategy, DeepSpeedStrategy) else None


def _require_finite(norm: float, module: L.LightningModule) -> None:
    if norm != norm or norm == float("inf"):
        raise NonFiniteGradient(
            f"the gradient's norm is {norm} at update {module.trainer.global_step + 1}: training stops here. "
            "Lower model.optimizer.learning_rate, or look at the round's completions and rewards in the record"
        )
