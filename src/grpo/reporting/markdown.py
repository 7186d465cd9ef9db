"""Pieces of Markdown, and numbers as they are read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from grpo.answer_metrics import Estimate

NOTHING = "-"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table whose first ``left`` columns are text, the rest numbers."""
    marks = [":--" if column < left else "--:" for column in range(len(header))]
    lines = [header, marks, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(text: str, longest: int = 120, keep_end: bool = False) -> str:
    """Text of a model or a problem on one line, shown as it is and never read as markup."""
    flat = text.replace("\r", "").replace("\n", "⏎").replace("\t", " ")
    flat = "".join(character for character in flat if character.isprintable())
    if len(flat) > longest:
        flat = "…" + flat[-longest:] if keep_end else flat[:longest] + "…"
    if not flat.strip():
        return "(white space)" if flat else "(empty)"
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", flat)), default=0))
    gap = " " if flat.startswith("`") or flat.endswith("`") else ""
    return f"{fence}{gap}{flat}{gap}{fence}"


def share(value: float | None) -> str:
    """0.4567 as 45.7%."""
    return NOTHING if value is None else f"{100 * value:.1f}%"


def number(value: float | None, places: int = 2) -> str:
    """A plain number with ``places`` decimals."""
    return NOTHING if value is None else f"{value:.{places}f}"


def estimate(one: Estimate, is_share: bool = True) -> str:
    """``45.7% [40.1, 51.2]``, or without the interval where none is claimed."""
    shown = share(one.value) if is_share else number(one.value)
    return shown + _interval(one, is_share, sign="")


def difference(one: Estimate, is_share: bool = True, unit: str = "") -> str:
    """``+12.3 [+8.0, +16.5]`` in percentage points, or in the metric's own unit."""
    if one.value is None:
        return NOTHING
    return _signed(one.value, is_share) + unit + _interval(one, is_share, sign="+")


def _interval(one: Estimate, is_share: bool, sign: str) -> str:
    if one.low is None or one.high is None:
        return ""
    low, high = (_signed(part, is_share, sign) for part in (one.low, one.high))
    return f" [{low}, {high}]"


def _signed(value: float, is_share: bool, sign: str = "+") -> str:
    places = 1 if is_share else 2
    rounded = round(100 * value if is_share else value, places) + 0.0
    return f"{rounded:{sign}.{places}f}"
