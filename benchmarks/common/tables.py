"""Markdown tables, and results as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

# GRPO_BENCHMARK_RESULTS names another place.
RESULTS = Path(os.environ.get("GRPO_BENCHMARK_RESULTS") or Path(__file__).resolve().parent.parent / "results")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A GitHub table; all columns but the first are numbers."""
    lines = [header, ["---", *("--:" for _ in header[1:])], *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: object) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


def spread(values: Sequence[float]) -> str:
    """Median, and the quartiles in brackets (of fewer than four values: the least and the largest)."""
    low, high = (min(values), max(values)) if len(values) < 4 else quantiles(values, n=4)[::2]
    return f"{median(values):.3g} [{low:.3g}, {high:.3g}]"


def write_results(name: str, results: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **results}, indent=1) + "\n", encoding="utf-8")
    return path


def machine() -> dict[str, Any]:
    """In general terms: what bounds the numbers, and nothing that names a host."""
    flags = _flags()
    widest = next((name for name in ("avx512f", "avx2", "avx") if name in flags), platform.machine())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return {
        "cores": len(os.sched_getaffinity(0)),
        "vectors": widest,
        "memory_gib": round(memory),
        "load_at_start": os.getloadavg()[0],
    }


def _flags() -> set[str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return set(next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split())


def machine_line() -> str:
    found = machine()
    return (
        f"{found['cores']} cores with {found['vectors']}, {found['memory_gib']} GiB; "
        f"load {found['load_at_start']:.1f} at the start"
    )
