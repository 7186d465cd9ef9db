"""Markdown tables, as docs/performance.md has them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

NAMES = {"ours": "here", "trl": "TRL"}
# The quartiles of fewer values would lie outside of them.
LEAST_FOR_QUARTILES = 4


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A GitHub table; all columns but the first are numbers."""
    lines = [header, ["---", *("--:" for _ in header[1:])], *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: object) -> str:
    return three(value) if isinstance(value, float) else str(value)


def three(value: float) -> str:
    """Three digits that count, and no exponent where zeros do."""
    return f"{float(f'{value:.3g}'):g}"


def spread(values: Sequence[float], digits: int | None = None) -> str:
    """Median, and what ``brackets`` says in brackets; three digits that count, or so many after the point."""
    low, high = (min(values), max(values)) if len(values) < LEAST_FOR_QUARTILES else quantiles(values, n=4)[::2]
    shown = [three(value) if digits is None else f"{value:.{digits}f}" for value in (median(values), low, high)]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]"


def brackets(rounds: int) -> str:
    """What stands in the brackets of so many rounds."""
    if rounds < LEAST_FOR_QUARTILES:
        return "In brackets: the least and the largest; quartiles from four rounds on."
    return f"In brackets: the quartiles of {rounds} rounds."
