"""How many completions a second `MathAnswer` judges in one batch, by kind: `python benchmarks/maths_rate.py`."""

from __future__ import annotations

import argparse
import os
import time

from common.script import option_parser, positive, run

from grpo.records import Problem
from grpo.rewards.math_answer import MathAnswer

# gold, and the same value written otherwise, by a number that makes every pair a new one
KINDS = {
    "numbers": ("{n}", "{n}.0"),
    "fractions": ("\\frac{{{n}}}{{7}}", "\\frac{{{twice}}}{{14}}"),
    "surds": ("{n}\\sqrt{{{next}}}", "\\sqrt{{{inside}}}"),
    "expressions": ("x^2+{n}x", "x(x+{n})"),
}


def pairs(kind: str, rows: int) -> list[tuple[Problem, str]]:
    gold, answer = KINDS[kind]
    made = []
    for n in range(2, rows + 2):
        values = {"n": n, "twice": 2 * n, "next": n + 1, "inside": n * n * (n + 1)}
        problem = Problem(f"{kind}-{n}", "What is it?", gold.format(**values), "maths", {})
        made.append((problem, f"It is \\boxed{{{answer.format(**values)}}}."))
    return made


def make_parser() -> argparse.ArgumentParser:
    parser = option_parser(__doc__)
    parser.add_argument("--rows", type=positive, default=500, help="completions of each kind; default %(default)s")
    return parser


def main() -> None:
    settings = make_parser().parse_args()
    check = MathAnswer()
    for kind in KINDS:
        check.score_batch(pairs(kind, 1) * check.workers)  # the helper processes start
        rows = pairs(kind, settings.rows)
        start = time.perf_counter()
        scores = check.score_batch(rows)
        seconds = time.perf_counter() - start
        assert all(score.value == 1.0 for score in scores), kind
        print(f"{kind}: {settings.rows / seconds:.0f} a second on {os.cpu_count()} cores")


if __name__ == "__main__":
    run(main)
