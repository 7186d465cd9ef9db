"""What a configuration of the train stage may not say, refused by name before anything is made.

Lightning's trainer has options for every kind of training. Some would change the method behind the record's
back here (rounds left out, gradients summed or clipped twice), others would never let a run finish.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jsonargparse import Namespace

LARGEST_SEED = 2**32 - 1  # numpy's


@dataclass(frozen=True)
class Fixed:
    """An option of the trainer that has to stay as it is.

    Args:
        values: that it may have.
        why: and what to set instead.
    """

    values: tuple[object, ...]
    why: str


_BY_ROUNDS = "every round is run; set data.rounds"
_BY_MODULE = "the module optimises by itself"
FIXED = {
    "max_epochs": Fixed((1,), "a run is one pass over its rounds; leave it at 1 and set data.rounds"),
    "max_steps": Fixed((-1,), "a run ends with its last round; set data.rounds"),
    "max_time": Fixed((None,), "a run that was stopped by it would stop at once each time it is resumed; take it out"),
    "limit_train_batches": Fixed((None, 1.0), _BY_ROUNDS),
    "limit_val_batches": Fixed((None, 1.0), "a validation is one batch; set data.validation_problems"),
    "overfit_batches": Fixed((0, 0.0), _BY_ROUNDS),
    "fast_dev_run": Fixed((False, 0), "it keeps neither record nor state; set data.rounds to 1 for a short run"),
    "num_sanity_val_steps": Fixed(
        (0,), "a validation before the first round would stand in the record as that round's"
    ),
    "check_val_every_n_epoch": Fixed((1,), "a run is one epoch; set trainer.val_check_interval"),
    "accumulate_grad_batches": Fixed((None, 1), f"{_BY_MODULE}; set model.optimizer.micro_batch_rows"),
    "gradient_clip_val": Fixed((None,), f"{_BY_MODULE}; set model.optimizer.max_gradient_norm"),
    "gradient_clip_algorithm": Fixed((None,), f"{_BY_MODULE}; set model.optimizer.max_gradient_norm"),
    "enable_checkpointing": Fixed(
        (None, True), "an interrupted run goes on from its state; set checkpoint_every_n_updates"
    ),
    "barebones": Fixed((False,), "it switches off the loggers and states that a run is made of"),
    "logger": Fixed((None, True), "metrics go to metrics.csv always; set wandb.mode for W&B"),
    "default_root_dir": Fixed((None,), "a run's state stands in a folder of its own; set runs"),
}
# Weights of 16 bits keep 8 or 11 bits of a number: an update of usual size is less than half of the last one.
_LOSES_UPDATES = "weights of 16 bits round most updates away; set 32-true, or bf16-mixed, which keeps them in float32"
# The scale that float16 puts on gradients would be on them still where they are clipped.
_SCALES_GRADIENTS = "its loss scaling would reach the gradient's clip and the record; set bf16-mixed"
PRECISIONS = {
    "16-true": _LOSES_UPDATES,
    "bf16-true": _LOSES_UPDATES,
    "transformer-engine": _LOSES_UPDATES,
    "transformer-engine-float16": _LOSES_UPDATES,
    "16-mixed": _SCALES_GRADIENTS,
    "16": _SCALES_GRADIENTS,
}


def refuse_options(config: Namespace, defaults: Namespace) -> None:
    """Refuse a configuration that breaks the method, contradicts itself, or can never finish.

    Args:
        config: as it was parsed.
        defaults: of the same parser; what is null there may be null.

    Raises:
        ValueError: naming the key, its value and what to do.
    """
    _check_sections(config, defaults)
    _check_seed(config.seed_everything)
    _check_loss(config.model.loss)
    _check_trainer(config.trainer)
    _check_devices(config.trainer.devices)
    _check_validation(config.trainer.val_check_interval, config.data.rounds)


def _check_sections(config: Namespace, defaults: Namespace) -> None:
    """The parser lets null, and plain values in the place of sections, through."""
    for key, default in defaults.items(branches=True):
        value = config.get(key)
        if isinstance(default, Namespace) and not isinstance(value, Namespace):
            raise ValueError(f"{key} is {_shown(value)}: give its settings, or leave the key out for the defaults")
        if value is None and default is not None and not key.startswith("trainer."):
            raise ValueError(f"{key} is null: give a value, or leave the key out for the default, {default}")


def _shown(value: object) -> str:
    return "null" if value is None else str(value)


def _check_seed(seed: object) -> None:
    if type(seed) is not int or not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed_everything is {seed}: give a whole number from 0 to {LARGEST_SEED}")


def _check_loss(loss: Namespace) -> None:
    if loss.constant_length is not None and loss.reduction != "constant":
        raise ValueError(
            f"model.loss.constant_length is {loss.constant_length}, which only the reduction constant divides by, and "
            f"model.loss.reduction is {loss.reduction}: set one of them otherwise"
        )
    if loss.clip_high is not None and loss.clip_high < loss.clip_low < 1:  # from 1 on, the lower side is off
        raise ValueError(
            f"model.loss.clip_high is {loss.clip_high}, below model.loss.clip_low = {loss.clip_low}: swap them, or set "
            "clip_low to inf to switch the lower side off"
        )


def _check_trainer(trainer: Namespace) -> None:
    for name, fixed in FIXED.items():
        value = trainer[name]
        # By type too: as a number of batches 1 is one, and 1.0 is all of them.
        if not any(type(value) is type(allowed) and value == allowed for allowed in fixed.values):
            raise ValueError(f"trainer.{name} is {value}: {fixed.why}")
    precision = str(trainer.precision)
    if precision in PRECISIONS:
        raise ValueError(f"trainer.precision is {precision}: {PRECISIONS[precision]}")


def _check_devices(devices: Any) -> None:
    number = int(devices) if isinstance(devices, str) and devices.lstrip("-").isdigit() else devices
    if number in ([], "") or (isinstance(number, int) and (number == 0 or number < -1)):
        raise ValueError(f"trainer.devices is {devices}: give at least 1, or auto")


def _check_validation(interval: Any, rounds: int) -> None:
    if interval is None:
        return
    whole = type(interval) is int and 1 <= interval <= rounds
    share = type(interval) is float and 0 < interval <= 1
    if not (whole or share):
        raise ValueError(
            f"trainer.val_check_interval is {interval}: give a number of rounds, 1 to data.rounds = {rounds}, or a "
            "share of them, above 0 and at most 1.0"
        )
