"""How many short programs a second `CodeTests` judges, each in a fresh sandbox: `python benchmarks/sandbox_rate.py`."""

from __future__ import annotations

import argparse
import os
import resource
import time

from common.script import option_parser, positive, run

from grpo.records import Problem
from grpo.rewards.code_tests import CodeTests

PROBLEM = Problem(
    "add", "Write add.", "", "code", {"tests": [f"assert add({n}, {n + 1}) == {2 * n + 1}" for n in range(5)]}
)
RIGHT = "```python\ndef add(a, b):\n    return a + b\n```"


def processor_seconds() -> float:
    """Of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def make_parser() -> argparse.ArgumentParser:
    parser = option_parser(__doc__)
    parser.add_argument("--programs", type=positive, default=200, help="judged; default %(default)s")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=positive, default=cores, help="sandboxes side by side; default: the cores")
    return parser


def main() -> None:
    settings = make_parser().parse_args()
    check = CodeTests(workers=settings.workers)
    check.score_batch([(PROBLEM, RIGHT)] * settings.workers * 2)  # the judges start
    start, used = time.perf_counter(), processor_seconds()
    scores = check.score_batch([(PROBLEM, RIGHT)] * settings.programs)
    seconds, used = time.perf_counter() - start, processor_seconds() - used
    check.close()
    assert all(score.value == 1.0 for score in scores)
    print(
        f"{settings.programs / seconds:.0f} programs a second with {settings.workers} workers; "
        f"{1000 * used / settings.programs:.1f} ms of processor time a program (load {os.getloadavg()[0]:.1f})"
    )


if __name__ == "__main__":
    run(main)
