"""Bytes that a process of a training holds, counted on its tensors: weights, gradients at their most, AdamW's state.

Each process runs this script, which trains under one strategy after the other; what was counted goes to
``FOLDER/STRATEGY.RANK.json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from situations import RANK, Run
from torch import Tensor

from grpo.training.settings import OptimizerSettings
from grpo.training.strategies import deepspeed_engine

# Numbers in each of DeepSpeed's buckets: as many as a tenth of the weights, so that gradients pass through them.
BUCKET = 2_500


class Held(L.Callback):
    """Counts after every gradient of every weight, when most is held, and again when an update is made."""

    def __init__(self) -> None:
        self.counted = {"weights": 0, "gradients": 0, "optimizer": 0, "buckets": 0, "passes": 0}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        config = getattr(trainer.strategy, "config", None)
        if config is not None:
            config["zero_optimization"]["reduce_bucket_size"] = BUCKET

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        for parameter in pl_module.policy.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self._count_gradients(pl_module))

    def _count_gradients(self, module: Any) -> None:
        engine = deepspeed_engine(module)
        held = [p.grad for p in module.policy.parameters()]
        buckets: list[Tensor] = []
        if engine is not None:
            own = vars(engine.optimizer)
            names = ("all_grad_tensors", "averaged_gradients", "grads_in_partition")
            parts = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
            held += [tensor for name in (*names, parts) for tensor in tensors(own.get(name))]
            buckets = [tensor for bucket in own["ipg_buckets"].values() for tensor in tensors(bucket.buffer)]
        for name, most in (("gradients", size(held, but=buckets)), ("buckets", size(buckets))):
            self.counted[name] = max(self.counted[name], most)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._count_gradients(pl_module)
        self.counted["passes"] += 1

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        weights = [getattr(p, "ds_tensor", p) for p in pl_module.policy.parameters()]
        optimizer = trainer.optimizers[0]
        state = [t for values in optimizer.state.values() for t in tensors(values) if t.numel() > 1]
        engine = deepspeed_engine(pl_module)
        own = {} if engine is None else vars(engine.optimizer)
        names = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")  # float32 copies of the weights
        masters = [tensor for name in names for tensor in tensors(own.get(name))]
        sizes = [getattr(p, "ds_numel", p.numel()) for p in pl_module.policy.parameters()]
        self.counted |= {"all_weights": sum(sizes), "largest_weight": max(sizes)}
        self.counted["weights"] = size(weights)
        self.counted["optimizer"] = size([*state, *masters], but=weights)


def tensors(value: Any) -> list[Tensor]:
    """Those in nested dicts and lists."""
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in inner for tensor in tensors(part)]


def size(held: Iterable[Tensor | None], but: Iterable[Tensor] = ()) -> int:
    """Bytes of what lies under the tensors, each storage once."""
    left_out = {t.untyped_storage().data_ptr() for t in but}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held if t is not None}
    return sum(count for place, count in storages.items() if place not in left_out)


def main(folder: Path, *strategies: str) -> None:
    torch.set_num_threads(1)
    for strategy in strategies:
        held = Held()
        run = Run(folder / strategy, strategy)
        run.folder.mkdir(exist_ok=True)
        run.fit(callbacks=[held], optimizer=OptimizerSettings(learning_rate=1e-3, micro_batch_rows=2))
        (folder / f"{strategy}.{RANK}.json").write_text(json.dumps(held.counted))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
