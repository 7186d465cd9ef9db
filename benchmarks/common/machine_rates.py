"""What the machine can do, measured: matrix products in a model's shapes, and memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from common.counts import Shape

TRIALS = 7
LEAST_SECONDS = 0.05


def best_seconds(work: Callable[[], object]) -> float:
    """The shortest time of one call over some trials, each long enough for the clock."""
    work()
    start = time.perf_counter()
    work()
    calls = max(1, int(LEAST_SECONDS / (time.perf_counter() - start + 1e-9)))
    times = []
    for _ in range(TRIALS):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        times.append((time.perf_counter() - start) / calls)
    return min(times)


def product_rates(shape: Shape, rows: int) -> dict[str, float]:
    """Operations a second of products ``[rows, k] x [k, n]``: of one sampling step, and of an update's many rows."""
    sizes = {
        f"step, {rows} rows, inner": (rows, shape.width, shape.inner),
        f"step, {rows} rows, vocabulary": (rows, shape.width, shape.vocabulary),
        "1024 rows, inner": (1024, shape.width, shape.inner),
        "1024 rows, inner back": (1024, shape.inner, shape.width),
        "512 rows, vocabulary": (512, shape.width, shape.vocabulary),
        "1024 x 1024 x 1024": (1024, 1024, 1024),
    }
    return {name: product_rate(*size) for name, size in sizes.items()}


def product_rate(rows: int, inner: int, columns: int) -> float:
    left, right = torch.randn(rows, inner), torch.randn(columns, inner)
    return 2 * rows * inner * columns / best_seconds(lambda: torch.nn.functional.linear(left, right))


def bandwidth(mebibytes: int = 256) -> float:
    """Bytes a second of ``a = b + s * c``: two read, one written, each far larger than a cache."""
    a, b, c = (torch.ones(mebibytes * 2**18) for _ in range(3))
    return 3 * a.numel() * 4 / best_seconds(lambda: torch.add(b, c, alpha=2.0, out=a))
