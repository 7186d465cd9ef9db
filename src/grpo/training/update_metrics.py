"""What an update was made of: the loss's own numbers, and where the advantages came from."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from grpo.maths.loss_metrics import LossOutput, mean_metrics
from grpo.training.round_metrics import Groups, by_slice

# A value a row of each metric of the loss, with the slices of the rows' problems.
RowMetrics = tuple[Sequence[str], Mapping[str, Tensor]]


def loss_metrics(rows: Sequence[RowMetrics]) -> dict[str, float]:
    """What :func:`mean_metrics` reads from an update, over all rows and, where there are several, by slice.

    Args:
        rows: of each micro-batch of all processes.
    """
    outputs = [LossOutput(torch.zeros(()), dict(metrics)) for _, metrics in rows]
    metrics = {f"loss/{name}": value for name, value in mean_metrics(outputs).items()}
    names = sorted({name for slices, _ in rows for name in slices})
    for name in names if len(names) > 1 else ():
        places = [[i for i, own in enumerate(slices) if own == name] for slices, _ in rows]
        own = mean_metrics([output.of_rows(part) for output, part in zip(outputs, places, strict=True)])
        metrics |= {f"slice/{name}/loss/{metric}": value for metric, value in own.items()}
    return metrics


def advantage_metrics(
    groups: Groups, advantages: Tensor | Sequence[Sequence[float]], in_update: Sequence[bool]
) -> dict[str, float]:
    """Where the signal of an update came from.

    Args:
        groups: ``P`` groups of ``G`` members, of all processes.
        advantages: ``[P, G]``, in the same order.
        in_update: ``[P]``: whether the group is in the update.

    Raises:
        ValueError: the three do not have the same shape.
    """
    rows = advantages.tolist() if isinstance(advantages, Tensor) else advantages
    of_problem: defaultdict[str, float] = defaultdict(float)
    of_slice = dict.fromkeys(by_slice(groups), 0.0)
    for group, row, inside in zip(groups, rows, in_update, strict=True):
        for member, advantage in zip(group, row, strict=True):
            if inside:
                problem = member.rollout.group.problem
                of_problem[problem.id] += abs(advantage)
                of_slice[problem.slice] += abs(advantage)
    total = math.fsum(of_problem.values())
    if not 0 < total < math.inf:
        return {}
    shares = [value / total for value in of_problem.values()]
    metrics = {
        "advantage/largest_problem": max(shares),
        "advantage/effective_problems": 1 / math.fsum(share**2 for share in shares),
    }
    if len(of_slice) > 1:
        metrics |= {f"slice/{name}/advantage/share": value / total for name, value in of_slice.items()}
    return metrics
