"""Where a training's time went: for the terminal, since times differ between runs whose report is the same."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

# The phases in the order of a round; ``other`` is the round less its phases.
PHASES = ("rollout", "reward", "record", "update", "other")


def time_breakdown(seconds: Mapping[int, Mapping[str, float]]) -> str:
    """Each phase's seconds a round, on average and in the round where it took longest; empty without times."""
    whole = sum(row.get("round", 0.0) for row in seconds.values())
    if whole <= 0:
        return ""
    lines = [f"seconds of a round, over {len(seconds)} rounds and {whole:.1f} s:"]
    for phase in (*PHASES, "round"):
        spent = {number: row[phase] for number, row in seconds.items() if phase in row}
        if spent:
            longest = max(spent, key=lambda number: spent[number])
            lines.append(
                f"  {phase:8}{fmean(spent.values()):10.3f} on average{sum(spent.values()) / whole:7.1%}"
                f"{spent[longest]:10.3f} in round {longest}"
            )
    return "\n".join(lines)
