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
from common.tables import table
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
        for seed in SEEDS:
            seeded = replace(work, name=f"{work.name}-{seed}", seed=seed, rounds=rounds + 1)
            curves[str(seed)] = _both(seeded, tunings, rounds, judge, folder)
    rows = [_row(seed, both, target) for seed, both in curves.items()]
    header = ["seed", "start", "ours at the end", "TRL at the end", f"ours, s to {target:.0%}", "TRL, s", "ratio"]
    print("\n" + table(header, rows))
    ends = {side: fmean(both[side][-1]["accuracy"] for both in curves.values()) for side in ("ours", "trl")}
    print(f"\nmean over seeds after {rounds} rounds: ours {ends['ours']:.1%}, TRL {ends['trl']:.1%}")
    looks = {side: fmean(point["accuracy"] for both in curves.values() for point in both[side][1:]) for side in ends}
    print(f"mean over seeds and all looks, less uncertain: ours {looks['ours']:.1%}, TRL {looks['trl']:.1%}")
    return curves


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


def _row(seed: str, both: Mapping[str, Curve], target: float) -> list[object]:
    own, theirs = (seconds_to(both[side], target) for side in ("ours", "trl"))
    ratio = "" if own is None or theirs is None else f"{theirs / own:.3g}"
    times = ["never" if seconds is None else f"{seconds:.1f}" for seconds in (own, theirs)]
    accuracies = [both["ours"][0], both["ours"][-1], both["trl"][-1]]
    return [seed, *(f"{point['accuracy']:.1%}" for point in accuracies), *times, ratio]
