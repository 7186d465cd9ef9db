"""Which rollouts and answers the page shows: chosen by rule, never by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo.held_out_answers import HeldOutAnswer

Row = Mapping[str, Any]
Changed = tuple[HeldOutAnswer, HeldOutAnswer]


def best_and_worst(rollouts: Sequence[Row], count: int) -> tuple[list[Row], list[Row]]:
    """The highest and the lowest rewards of the last round, one rollout a problem, slices in turn."""
    last = max((row["round"] for row in rollouts), default=0)
    scored = [row for row in rollouts if row["round"] == last and row["reward"] is not None]
    ascending = sorted(scored, key=lambda row: (row["reward"], row["problem_id"], row["member"]))
    descending = sorted(scored, key=lambda row: (-row["reward"], row["problem_id"], row["member"]))
    return _spread(descending, count), _spread(ascending, count)


def changed_answers(
    base: Sequence[HeldOutAnswer], trained: Sequence[HeldOutAnswer]
) -> tuple[list[Changed], list[Changed]]:
    """Greedy answers that were wrong before and right after, and those the other way round, slices in turn.

    An answer without a verdict is neither.
    """
    before = {answer.problem_id: answer for answer in base if answer.mode == "greedy"}
    after = {answer.problem_id: answer for answer in trained if answer.mode == "greedy"}
    pairs = [(before[name], after[name]) for name in sorted(before.keys() & after.keys())]
    gained = [(old, new) for old, new in pairs if new.correct and old.correct is False]
    lost = [(old, new) for old, new in pairs if old.correct and new.correct is False]
    return in_turn(gained), in_turn(lost)


def in_turn(pairs: Sequence[Changed]) -> list[Changed]:
    """The first of each slice, then the second of each, and so on."""
    seen: dict[str, int] = {}
    places = []
    for pair in pairs:
        place = seen.get(pair[0].slice, 0)
        seen[pair[0].slice] = place + 1
        places.append((place, pair[0].slice, pair[0].problem_id, pair))
    return [pair for *_, pair in sorted(places, key=lambda entry: entry[:3])]


def _spread(rows: Sequence[Row], count: int) -> list[Row]:
    """The first ``count`` of distinct problems, from as many slices as have some as good."""
    chosen: list[Row] = []
    while len(chosen) < count:
        problems = {row["problem_id"] for row in chosen}
        left = [row for row in rows if row["problem_id"] not in problems]
        if not left:
            break
        as_good = [row for row in left if row["reward"] == left[0]["reward"]]
        used = [row["slice"] for row in chosen]
        chosen.append(min(as_good, key=lambda row: used.count(row["slice"])))
    return chosen
