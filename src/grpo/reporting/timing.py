"""Where a training's time went: for the terminal, since times differ between runs whose report is the same."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

# The phases in the order of a round; ``other`` is the round less its phases.
PHASES = ("rollout", "reward", "record", "update", "other")


def time_breakdown(seconds: Mapping[int, Mapping[str, float]]) -> str:
    """Each phase's seconds a round: the median, its share of all rounds, and the longest; empty without times.

    The first round is often the longest: checks and their processes are started in it.
    """
    whole = sum(row.get("round", 0.0) for row in seconds.values())
    if whole <= 0:
        return ""
    lines = [f"seconds of a round, over {len(seconds)} rounds and {whole:.1f} s (without what lies between rounds):"]
    for phase in (*PHASES, "round"):
        spent = {number: row[phase] for number, row in seconds.items() if phase in row}
        if spent:
            longest = max(spent, key=lambda number: spent[number])
            lines.append(
                f"  {phase:8}{median(spent.values()):10.3f} in the median{sum(spent.values()) / whole:8.1%} of all"
                f"{spent[longest]:10.3f} at most (round {longest})"
            )
    return "\n".join(lines)
