"""The metrics of the loss: counts and sums that add up over micro-batches, and the means read from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossOutput:
    """The loss of one call, and its metrics in a form that adds up.

    Args:
        loss: scalar with a gradient; already weighted, so micro-batches *sum*.
        metrics: ``[N]`` each, detached, a value a row: counts and float64 sums, except that names in ``_min``
            and ``_max`` hold extremes (of no meaning where nothing was counted). Which names there are depends
            on the options alone, so that processes can put theirs side by side; ``mean_metrics`` reads them.
    """

    loss: Tensor
    metrics: dict[str, Tensor]

    def of_rows(self, rows: Sequence[int]) -> LossOutput:
        """The metrics of these rows alone, such as those of one slice."""
        chosen = torch.tensor(rows, dtype=torch.long)
        return LossOutput(self.loss, {name: values.cpu()[chosen] for name, values in self.metrics.items()})


# reported name -> what was summed, and what it was counted over
_MEANS = {
    "ratio_mean": ("ratio_sum", "ratios"),
    "clip_fraction_low": ("clipped_low", "ratios"),
    "clip_fraction_high": ("clipped_high", "ratios"),
    "dual_clip_fraction": ("dual_clipped", "ratios"),
    "ratio_bounded_fraction": ("ratio_bounded", "ratios"),
    "kl": ("kl_sum", "kl_tokens"),
    "kl_bounded_fraction": ("kl_bounded", "kl_tokens"),
    "entropy": ("entropy_sum", "tokens"),
    "mismatch": ("mismatch_sum", "tokens"),
    "mismatch_capped_fraction": ("mismatch_capped", "tokens"),
}
_EXTREMES = {"ratio_min": "ratios", "ratio_max": "ratios", "mismatch_max": "tokens"}


def mean_metrics(outputs: Sequence[LossOutput]) -> dict[str, float]:
    """The metrics of the micro-batches together, exactly as one batch of all their rows would give them.

    A metric is absent, never NaN, where its input was not given or nothing was counted.

    - ``tokens``, ``rows``: counted tokens, and rows with any.
    - ``ratio_mean``, ``ratio_min``, ``ratio_max``: over tokens, or over rows for ``ratio="sequence"``.
    - ``clip_fraction_low``, ``clip_fraction_high``: share of the ratios where the minimum took the
      clipped side, so the gradient is cut: a ratio below the range with ``A < 0``, above it with ``A > 0``.
    - ``dual_clip_fraction``: share held at ``c * |A|``.
    - ``ratio_bounded_fraction``, ``kl_bounded_fraction``: share past ``LOG_RATIO_BOUND``; anything but 0
      means that log-probabilities disagree badly.
    - ``kl``: mean of the chosen estimator over the tokens of ``kl_mask``.
    - ``entropy``: mean over tokens.
    - ``mismatch``, ``mismatch_max``: ``abs(old - sampling)`` in nats; ``mismatch_capped_fraction``: share
      of the correction's weights that met the cap.
    """
    collected: dict[str, list[float]] = {}
    for output in outputs:
        for name, values in output.metrics.items():
            collected.setdefault(name, []).extend(values.tolist())
    merged = {name: _how_to_merge(name)(values) for name, values in collected.items() if values}
    means = {name: merged[name] for name in merged if name in ("tokens", "rows")}
    for name, (value, count) in _MEANS.items():
        if value in merged and merged[count] > 0:
            means[name] = merged[value] / merged[count]
    for name, count in _EXTREMES.items():
        if name in merged and merged[count] > 0:
            means[name] = merged[name]
    return means


def _how_to_merge(name: str) -> Callable[[list[float]], float]:
    return min if name.endswith("_min") else max if name.endswith("_max") else math.fsum


@torch.no_grad()
def ratio_metrics(
    ratio: Tensor, clipped: Tensor, advantage: Tensor, units: Tensor, dual_clip: float | None
) -> dict[str, Tensor]:
    """What the clipping did, over the ``units`` (tokens, or rows) that count; their advantage is 0 elsewhere."""
    metrics = {
        "ratios": units.sum(dim=1),
        "ratio_sum": row_sums(ratio.where(units, 0.0)),
        "ratio_min": ratio.where(units, math.inf).amin(dim=1),
        "ratio_max": ratio.where(units, -math.inf).amax(dim=1),
        "clipped_low": ((clipped > ratio) & (advantage < 0)).sum(dim=1),
        "clipped_high": ((clipped < ratio) & (advantage > 0)).sum(dim=1),
    }
    if dual_clip is not None:
        metrics["dual_clipped"] = ((ratio > dual_clip) & (advantage < 0)).sum(dim=1)
    return {name: values.detach() for name, values in metrics.items()}


def row_sums(values: Tensor) -> Tensor:
    """``[N]`` of ``[N, T]``, in float64 so that those of micro-batches add up to that of the whole batch."""
    return values.detach().sum(dim=1, dtype=torch.float64)
