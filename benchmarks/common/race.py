"""Both trainers in turn: one round here, one round there, until each has made enough of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from common.script import say
from common.tables import NAMES
from common.turns import Worker
from common.work import Side, Tuning, Work, sweep_of

Reply = dict[str, Any]
MODULES: dict[Side, str] = {"ours": "our_worker", "trl": "trl_worker"}


def start(
    side: Side, work: Work, tuning: Tuning, logs: Path, parts: Mapping[str, bool] | None = None, **environment: str
) -> Worker:
    """A worker that has loaded everything and waits; ``logs`` is where its output goes."""
    settings = [work.dumps(), json.dumps(asdict(tuning)), json.dumps(dict(parts or {}))]
    name = f"{side}-{work.name}-{len(list(logs.glob('*.log')))}.log"
    worker = Worker(MODULES[side], logs / name, tuning.threads, *settings, environment=environment)
    try:
        json.loads(worker.process.stdout.readline() or _fail(worker))  # type: ignore[union-attr]
    except BaseException as failure:  # nobody else knows of it yet
        worker.__exit__(type(failure))
        raise
    return worker


def _fail(worker: Worker) -> str:
    raise RuntimeError(f"a worker did not start; the end of its log:\n{worker.log.read_text()[-3000:]}")


def alternate(
    workers: Mapping[str, Worker], rounds: int, warmup: int = 1, step: str | None = ""
) -> dict[str, list[Reply]]:
    """The replies of each worker's rounds; who goes first changes from round to round.

    Args:
        workers: by name.
        rounds: counted.
        warmup: rounds before them that are not.
        step: said before each round, in front of its number; None says nothing.
    """
    replies: dict[str, list[Reply]] = {name: [] for name in workers}
    for index in range(warmup + rounds):
        if step is not None:
            number = index - warmup + 1
            say(step + (f"round {number} of {rounds}" if number > 0 else "warm-up round"))
        for name in sorted(workers, reverse=bool(index % 2)):
            reply = workers[name].ask(do="round")
            if index >= warmup:
                replies[name].append(reply)
    return replies


def race(
    work: Work, tunings: Mapping[Side, Tuning], rounds: int, logs: Path, warmup: int = 1
) -> dict[str, list[Reply]]:
    """Rounds of both sides in turn, each in a fresh process."""
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for side, tuning in tunings.items():
            say(f"loading: {NAMES[side]}")
            workers[side] = stack.enter_context(start(side, work, tuning, logs))
        return alternate(workers, rounds, warmup)


def tune(work: Work, side: Side, logs: Path, rounds: int, quick: bool) -> tuple[Tuning, list[dict[str, Any]]]:
    """The fastest settings by whole rounds, one setting after the other, and all that was tried."""
    cores = sorted({1, len(os.sched_getaffinity(0))}, reverse=True)
    sweep = sweep_of(work, side, cores)
    best = replace(Tuning(cores[0], work.rows, work.rows), **{name: values[0] for name, values in sweep})
    tried: dict[Tuning, float] = {}
    if quick:
        return best, []
    total = 1 + sum(len(values) - 1 for _, values in sweep)  # each goes on from the best of the ones before
    for name, values in sweep:
        for value in values:
            tuning = replace(best, **{name: value})
            if tuning not in tried:
                say(f"sweep of {NAMES[side]}, {len(tried) + 1} of {total}: {tuning}")
                tried[tuning] = _seconds_of_round(work, side, tuning, logs, rounds)
        best = min(tried, key=lambda tuning: tried[tuning])
    return best, [{"side": NAMES[side], **asdict(tuning), "seconds": seconds} for tuning, seconds in tried.items()]


def _seconds_of_round(work: Work, side: Side, tuning: Tuning, logs: Path, rounds: int) -> float:
    with start(side, work, tuning, logs) as worker:
        # A round of the larger model takes long enough for its first one to tell settings apart.
        warmup = 1 if work.name == "tiny" else 0
        return middle(alternate({side: worker}, rounds, warmup, step=None)[side], "round")


def middle(replies: Sequence[Reply], key: str) -> float:
    return float(median(reply[key] for reply in replies))
