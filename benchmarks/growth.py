"""How the cost of sampling and of an update grows: ``python benchmarks/growth.py``.

One quantity at a time takes four values while the others stay; the exponent is the slope of log seconds against log
value. Random weights, no end token: every completion has the length that was asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from common.race import alternate, middle, start
from common.random_policy import HEADS, make_random_policy, write_prompts
from common.script import begin, option_parser, positive, result_name, run, say, scratch_folder, write_results
from common.tables import table
from common.turns import Worker
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


# The prompt is by far the largest part of this: a cost that grows with the group would be its prompt's.
LONG_PROMPT = Shape(prompt=1024, completion=1, groups=4)
# What grows, through which values, and what stands around it.
GROWN: dict[str, tuple[str, Sequence[int], Shape]] = {
    "group_size": ("group_size", (4, 8, 16, 32), Shape()),
    "groups": ("groups", (2, 4, 8, 16), Shape()),
    "prompt": ("prompt", (64, 128, 256, 512), Shape()),
    "completion": ("completion", (16, 32, 64, 128), Shape()),
    "vocabulary": ("vocabulary", (2048, 8192, 32768, 65536), Shape()),
    "prompt_of_a_group": ("group_size", (4, 8, 16, 32), LONG_PROMPT),
}
# The fewest that an exponent has an error with.
QUICK_VALUES = 3
PHASES = {"rollouts": "rollout", "update": "update"}
HEADER = ["cost of", "against", "values", "seconds", "exponent", "standard error"]


def make_parser() -> argparse.ArgumentParser:
    parser = option_parser(__doc__)
    parser.add_argument(
        "--rounds", type=positive, help="at each value, after one that does not count; default 3, and 2 with --quick"
    )
    parser.add_argument(
        "--only", choices=tuple(GROWN), nargs="+", default=list(GROWN), help="what is to grow; default all of them"
    )
    parser.add_argument(
        "--width", type=positive, default=128, help="of the model, which has 4 layers; default %(default)s"
    )
    parser.add_argument(
        "--copied-prompts",
        action="store_true",
        help="run a group's prompt for every member (sampling.shared_prompt: false), to compare; default: once a group",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few rounds, the three smallest values; default: all four values"
    )
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.width % (2 * HEADS):
        parser.error(f"--width must be a multiple of {2 * HEADS}: {HEADS} heads, each of an even width")
    options.only = list(dict.fromkeys(options.only))
    options.rounds = options.rounds or (2 if options.quick else 3)
    return options


def main() -> None:
    options = parse()
    how = begin("growth", options)
    results: dict[str, Any] = {}
    with scratch_folder() as folder:
        for number, name in enumerate(options.only, 1):
            say(f"{shown(name)}, {number} of {len(options.only)}")
            results[name] = measured(name, options, folder)
    print(report(results))
    write_results(result_name("growth", options, parse), how, results)


def shown(name: str) -> str:
    return name.replace("_", " ")


def measured(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds of each phase at each value, all workers in turn, so that a busy moment meets every value."""
    field, values, base = GROWN[name]
    values = values[:QUICK_VALUES] if options.quick else values
    with ExitStack() as stack:
        workers = {}
        for value in values:
            say(f"loading {shown(name)} {value}")
            worker = start_shape(replace(base, **{field: value}), options, folder)
            workers[str(value)] = stack.enter_context(worker)
        replies = alternate(workers, options.rounds, step=f"{shown(name)}, ")
    seconds = {phase: [middle(replies[str(value)], phase) for value in values] for phase in PHASES.values()}
    return {"values": list(values), "base": asdict(base), "seconds": seconds}


def start_shape(shape: Shape, options: argparse.Namespace, folder: Path) -> Worker:
    """A worker for this shape, on a random policy of its own."""
    place = folder / "-".join(map(str, asdict(shape).values()))
    if not place.exists():  # the same shape can stand in two rows
        make_random_policy(place / "policy", options.width, shape.vocabulary, shape.prompt + shape.completion)
        write_prompts(place / "problems", shape.prompt)
    work = Work(
        "growth", "count_up", str(place / "policy"), str(place / "problems"), shape.groups, shape.group_size,
        shape.completion, 1e-6, rounds=options.rounds + 1,
    )  # fmt: skip
    parts = {"reward": False, "shared_prompt": not options.copied_prompts}
    return start("ours", work, Tuning(2, work.rows, work.rows), folder, parts)


def report(results: Mapping[str, Any]) -> str:
    text = table(HEADER, lines(results)) + "\n\nSeconds are medians over the rounds."
    if "prompt_of_a_group" in results:
        text += (
            f"\nprompt of a group: {LONG_PROMPT.prompt} prompt tokens, one completion token; against the group size."
            "\nIts exponent is near 0 where a prompt is run once a group."
        )
    return text


def lines(results: Mapping[str, Any]) -> list[list[object]]:
    rows: list[list[object]] = []
    for name, found in results.items():
        values = ", ".join(map(str, found["values"]))
        for label, phase in PHASES.items():
            slope, error = exponent(found["values"], found["seconds"][phase])
            seconds = ", ".join(f"{value:.3g}" for value in found["seconds"][phase])
            rows.append([label, shown(name), values, seconds, f"{slope:.2f}", f"{error:.2f}"])
    return rows


def exponent(values: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Slope of log seconds against log value, with its standard error."""
    fit = stats.linregress(np.log(values), np.log(seconds))
    return float(fit.slope), float(fit.stderr)


if __name__ == "__main__":
    run(main)
