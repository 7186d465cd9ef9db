"""Random updates for the tests of the loss, and how one is handed to it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import asdict

import torch
from maths.plain_loss import Options, Rows, Update
from torch import Tensor

from grpo.maths.grpo_loss import LossOutput, grpo_loss


def random_update(seed: int, rows: int = 4, width: int = 3, *, far: bool = False) -> Update:
    """Log-probabilities some tenths of a nat apart, or now and then tens of nats where ``far``.

    A row may be empty, and a mask have holes, as one with tool output has. Whatever does not count is NaN.
    """
    chance = random.Random(seed)
    lengths = [chance.randint(0, width) for _ in range(rows)]
    mask = [[t < length and chance.random() < 0.8 for t in range(width)] for length in lengths]
    if not any(any(row) for row in mask):
        mask[0][0] = True

    def table(draw: Callable[[], float]) -> Rows:
        return [[draw() if counts else math.nan for counts in row] for row in mask]

    def near(centre: Rows) -> Rows:
        return [[value + _distance(chance, far) for value in row] for row in centre]

    policy = table(lambda: -chance.expovariate(1.0))
    old = near(policy)
    return Update(
        policy=policy,
        old=old,
        reference=near(policy),
        sampling=near(old),
        entropy=table(lambda: chance.uniform(0, 2)),
        weights=table(lambda: chance.uniform(0, 0.5)),
        mask=mask,
        kl_mask=[[chance.random() < 0.6 for _ in range(width)] for _ in range(rows)],
        advantages=[chance.choice([0.0, *[chance.gauss(0, 1)] * 5]) if any(row) else math.nan for row in mask],
        groups=[chance.choice([7, 3, 11]) for _ in range(rows)],
    )


def _distance(chance: random.Random, far: bool) -> float:
    return chance.choice([-25.0, 19.0, 25.0, 60.0]) if far and chance.random() < 0.2 else chance.gauss(0, 0.4)


def tensors_of(update: Update) -> dict[str, Tensor]:
    return {
        name: torch.tensor(value, dtype=None if name in ("mask", "kl_mask", "groups") else torch.float64)
        for name, value in vars(update).items()
    }


def loss_of(tensors: dict[str, Tensor], options: Options) -> LossOutput:
    """The package's loss of the same update under the same options."""
    declared = asdict(options)
    given = declared.pop("given")
    return grpo_loss(
        tensors["policy"],
        tensors["old"],
        tensors["advantages"],
        tensors["mask"],
        reference_logprobs=tensors["reference"] if "reference" in given else None,
        sampling_logprobs=tensors["sampling"] if "sampling" in given else None,
        entropy=tensors["entropy"] if "entropy" in given else None,
        kl_mask=tensors["kl_mask"] if "kl_mask" in given else None,
        token_weights=tensors["weights"] if "weights" in given else None,
        group_ids=tensors["groups"],
        **declared,
    )
