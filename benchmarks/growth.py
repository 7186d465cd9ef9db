"""How the cost of sampling and of an update grows: ``python benchmarks/growth.py``.

One quantity at a time takes four values or more while the others stay; the exponent is the slope of log seconds against
log value. Random weights, no end token: every completion has the length that was asked for.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from common.race import alternate, middle, start
from common.random_policy import make_random_policy, write_prompts
from common.tables import machine_line, table, write_results
from common.work import Tuning, Work
from scipy import stats


@dataclass(frozen=True)
class Shape:
    """What a round costs by."""

    group_size: int = 8
    groups: int = 4
    prompt: int = 32
    completion: int = 32
    vocabulary: int = 512


GROWN: dict[str, Sequence[int]] = {
    "group_size": (4, 8, 16, 32),
    "groups": (2, 4, 8, 16),
    "prompt": (64, 128, 256, 512),
    "completion": (16, 32, 64, 128),
    "vocabulary": (2048, 8192, 32768, 65536),
}
# The prompt is by far the largest part of this: a cost that grows with the group would be its prompt's.
LONG_PROMPT = Shape(prompt=1024, completion=1, groups=4)
PHASES = ("rollout", "update")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured at each value, after one that is not")
    parser.add_argument("--only", choices=tuple(GROWN), nargs="*", default=tuple(GROWN))
    parser.add_argument("--width", type=int, default=128, help="of the model, which has 4 layers")
    parser.add_argument("--quick", action="store_true", help="two rounds, small values")
    return parser.parse_args()


def main() -> None:
    options = parse()
    rounds = 2 if options.quick else options.rounds
    print(f"growth: {machine_line()}\n")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in options.only:
            values = [value // 4 or 1 for value in GROWN[name]] if options.quick else GROWN[name]
            results[name] = measured(name, values, Shape(), rounds, options.width, folder)
        if not options.quick:
            results["prompt_of_a_group"] = measured(
                "group_size", GROWN["group_size"], LONG_PROMPT, rounds, options.width, folder
            )
    print(table(["cost of", "against", "values", "seconds", "exponent", "standard error"], lines(results)))
    print("\nprompt_of_a_group: 1024 prompt tokens, one completion token; near 0, a prompt is run once a group.")
    print(f"\nwritten: {write_results('growth', results).name}")


def measured(name: str, values: Sequence[int], base: Shape, rounds: int, width: int, folder: Path) -> dict[str, Any]:
    """Seconds of each phase at each value, all workers in turn, so that a busy moment meets every value."""
    workers = {}
    try:
        for value in values:
            shape = replace(base, **{name: value if name != "group_size" else max(2, value)})
            workers[str(value)] = start_shape(shape, rounds, width, folder)
        replies = alternate(workers, rounds)
    finally:
        for worker in workers.values():
            worker.__exit__()
    seconds = {phase: [middle(replies[str(value)], phase) for value in values] for phase in PHASES}
    return {"values": list(values), "base": asdict(base), "seconds": seconds}


def start_shape(shape: Shape, rounds: int, width: int, folder: Path) -> Any:
    """A worker for this shape, on a random policy of its own."""
    place = folder / "-".join(map(str, asdict(shape).values()))
    if not place.exists():  # the same shape can stand in two rows
        make_random_policy(place / "policy", width, shape.vocabulary, shape.prompt + shape.completion)
        write_prompts(place / "problems", shape.prompt)
    work = Work(
        "growth", "count_up", str(place / "policy"), str(place / "problems"), shape.groups, shape.group_size,
        shape.completion, 1e-6, rounds=rounds + 1,
    )  # fmt: skip
    return start("ours", work, Tuning(2, work.rows, work.rows), folder, {"reward": False})


def lines(results: Mapping[str, Any]) -> list[list[object]]:
    rows: list[list[object]] = []
    for name, found in results.items():
        for phase in PHASES:
            slope, error = exponent(found["values"], found["seconds"][phase])
            seconds = ", ".join(f"{value:.3g}" for value in found["seconds"][phase])
            values = ", ".join(map(str, found["values"]))
            rows.append([phase, name, values, seconds, f"{slope:.2f}", f"{error:.2f}"])
    return rows


def exponent(values: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Slope of log seconds against log value, with its standard error."""
    fit = stats.linregress(np.log(values), np.log(seconds))
    return float(fit.slope), float(fit.stderr)


if __name__ == "__main__":
    main()
