"""How well both have learnt after equally many rollouts, and how long each took to a given held-out accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from common.race import start
from common.script import say
from common.tables import NAMES, table
from common.turns import Worker
from common.work import Side, Tuning, Work

SEEDS = (1, 2, 3)
# Rounds between two looks at the held-out problems.
EVERY = 4
Curve = list[dict[str, float]]


def compare_learning(
    work: Work, tunings: Mapping[Side, Tuning], rounds: int, target: float, folder: Path
) -> dict[str, Any]:
    """Train both on each seed, print the table, give the curves."""
    curves: dict[str, dict[str, Curve]] = {}
    with Worker("held_out", folder / "held_out.log", 2, str(Path(work.problems).parent)) as judge:
        for number, seed in enumerate(SEEDS, 1):
            say(f"learning, seed {number} of {len(SEEDS)}: {rounds} rounds of both")
            seeded = replace(work, name=f"{work.name}-{seed}", seed=seed, rounds=rounds + 1)
            curves[str(seed)] = _both(seeded, tunings, rounds, judge, folder)
    print("\n" + learnt(curves, rounds, target))
    return curves


def learnt(curves: Mapping[str, Mapping[str, Curve]], rounds: int, target: float) -> str:
    """A row a seed, and their mean."""
    here, trl = NAMES["ours"], NAMES["trl"]
    header = [
        *("seed", "start", f"{here} after {rounds} rounds", trl, f"{here}, all looks", trl),
        *(f"{here}, s to {target:.0%}", f"{trl}, s", "times better"),
    ]
    accuracies = {seed: _accuracies(both) for seed, both in curves.items()}
    rows = [[seed, *map(_percent, accuracies[seed]), *_times(both, target)] for seed, both in curves.items()]
    means = [fmean(column) for column in zip(*accuracies.values(), strict=True)]
    return table(header, [*rows, ["mean", *map(_percent, means), "", "", ""]])


def _both(work: Work, tunings: Mapping[Side, Tuning], rounds: int, judge: Worker, folder: Path) -> dict[str, Curve]:
    """A point of each curve: rounds done, seconds spent in them, held-out accuracy. Looking costs no seconds."""
    with ExitStack() as stack:
        workers = {side: stack.enter_context(start(side, work, tuning, folder)) for side, tuning in tunings.items()}
        curves: dict[str, Curve] = {side: [_point(0, 0.0, workers[side], judge, folder)] for side in workers}
        spent = dict.fromkeys(workers, 0.0)
        for index in range(1, rounds + 1):
            for side, worker in workers.items():
                spent[side] += worker.ask(do="round")["round"]
                if index % EVERY == 0 or index == rounds:
                    curves[side].append(_point(index, spent[side], worker, judge, folder))
    return curves


def _point(index: int, seconds: float, worker: Worker, judge: Worker, folder: Path) -> dict[str, float]:
    say(f"judging after {index} rounds")
    worker.ask(do="save", folder=str(folder / "looked_at"))
    accuracy = judge.ask(do="judge", folder=str(folder / "looked_at"))["accuracy"]
    return {"round": index, "seconds": seconds, "accuracy": accuracy}


def seconds_to(curve: Curve, target: float) -> float | None:
    """When the curve first reaches the target, by a straight line between the looks; None if it never does."""
    for before, after in pairwise(curve):
        if after["accuracy"] >= target:
            rise = after["accuracy"] - before["accuracy"]
            share = (target - before["accuracy"]) / rise if rise > 0 else 1.0
            return before["seconds"] + max(0.0, share) * (after["seconds"] - before["seconds"])
    return None


def _accuracies(both: Mapping[str, Curve]) -> list[float]:
    """At the start, at the end of both, and over all looks of both."""
    start, *_ = both["ours"]
    ends = [both[side][-1]["accuracy"] for side in NAMES]
    looks = [fmean(point["accuracy"] for point in both[side][1:]) for side in NAMES]
    return [start["accuracy"], *ends, *looks]


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _times(both: Mapping[str, Curve], target: float) -> list[str]:
    """Seconds to the target of both, and how many times as long the peer took."""
    own, theirs = (seconds_to(both[side], target) for side in NAMES)
    ratio = "" if own is None or theirs is None else f"{theirs / own:.3g}"
    return [*("never" if seconds is None else f"{seconds:.1f}" for seconds in (own, theirs)), ratio]
