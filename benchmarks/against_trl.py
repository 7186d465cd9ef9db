"""The same work in TRL's GRPOTrainer and here, in turn: ``python benchmarks/against_trl.py --size tiny``.

Same weights, prompts, group size, reward, objective (TRL's ``loss_type="grpo"``), optimiser and number of rollouts.
Both are tuned first (rows of a micro-batch, threads); the fastest settings of each are compared.
``docs/performance.md`` says what each number means. TRL must be installed: ``make peers``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

from common.learning import compare_learning
from common.race import Reply, race, tune
from common.script import (
    add_policy_options,
    begin,
    number,
    option_parser,
    positive,
    result_name,
    run,
    scratch_folder,
    write_results,
)
from common.tables import NAMES, brackets, spread, table
from common.work import Side, Tuning, Work, make_work

PHASES = {"rollouts": "rollout", "update": "update", "whole round": "round"}
SIDES: tuple[Side, Side] = ("ours", "trl")
ROUNDS = {"tiny": 7, "smollm2": 5}
QUICK_ROUNDS = 2
TARGET = 0.6


def make_parser() -> argparse.ArgumentParser:
    parser = option_parser(__doc__)
    parser.add_argument("--size", choices=tuple(ROUNDS), default="tiny", help="the workload; default %(default)s")
    parser.add_argument(
        "--rounds", type=positive, help="compared; default 7 (tiny) or 5 (smollm2), and 2 where --quick is given"
    )
    parser.add_argument("--groups", type=positive, help="a round, 8 completions each; default 32 (tiny) or 4 (smollm2)")
    parser.add_argument(
        "--warmup", type=number(int, 0), default=1, help="rounds that are not counted; default %(default)s"
    )
    parser.add_argument(
        "--kl-beta", type=number(float, 0), default=0.0, help="weight of the KL term (TRL's beta); default %(default)s"
    )
    parser.add_argument(
        "--fixed-length", action="store_true", help="no end token: both draw equally many tokens; default: it is drawn"
    )
    parser.add_argument("--learn", type=positive, help="tiny: rounds to learn for, on three seeds; default none")
    parser.add_argument(
        "--target", type=number(float, 0, 1), help=f"held-out accuracy to reach with --learn; default {TARGET}"
    )
    add_policy_options(parser)
    parser.add_argument("--quick", action="store_true", help="no sweep, and few rounds; default: a sweep of each side")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.learn and options.size != "tiny":
        parser.error(f"--learn is for --size tiny: no held-out problems belong to {options.size}")
    if options.learn and options.fixed_length:
        parser.error("--learn asks for answers that end: not with --fixed-length")
    if options.target is not None and not options.learn:
        parser.error("--target says where to with --learn, which is not given")
    options.target = TARGET if options.target is None else options.target
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS[options.size])
    return options


def main() -> None:
    options = parse()
    if find_spec("trl") is None:
        raise SystemExit("TRL is not installed: `make peers`")
    how = begin(options.size, options)
    with scratch_folder() as folder:
        changes = {"kl_beta": options.kl_beta} | ({"groups": options.groups} if options.groups else {})
        work = make_work(options.size, options.folder, options.policy, fixed_length=options.fixed_length, **changes)
        tunings, tried = tuned(work, folder, options.quick)
        replies = race(work, tunings, options.rounds, folder, options.warmup)
        check_same_work(work, replies)
        print(compared(tunings, replies))
        learning = compare_learning(work, tunings, options.learn, options.target, folder) if options.learn else {}
    results = {"work": asdict(work), "tunings": {s: asdict(t) for s, t in tunings.items()}, "tried": tried}
    results |= {"replies": replies, "learning": learning}
    write_results(result_name(f"against_trl_{options.size}", options, parse), how, results)


def tuned(work: Work, folder: Path, quick: bool) -> tuple[dict[Side, Tuning], list[dict[str, Any]]]:
    """The fastest settings of each side, printed with all that was tried."""
    rounds = 2 if work.name == "tiny" else 1
    tunings: dict[Side, Tuning] = {}
    tried: list[dict[str, Any]] = []
    for side in SIDES:
        tunings[side], found = tune(work, side, folder, rounds, quick)
        tried += found
    if tried:
        print(table(list(tried[0]), [list(row.values()) for row in tried]) + "\n")
    return tunings, tried


def check_same_work(work: Work, replies: dict[str, list[Reply]]) -> None:
    """Without an end token both must have drawn every token there is; and they must know the same lengths."""
    most = work.rows * work.max_new_tokens
    counted = [reply["tokens"] for side in SIDES for reply in replies[side]]
    right = set(counted) == {most} if work.problems.endswith("_fixed/problems") else max(counted) <= most
    if not right:
        raise RuntimeError(f"the two did not do the same work: {counted} tokens of {most}")


def compared(tunings: dict[Side, Tuning], replies: dict[str, list[Reply]]) -> str:
    """The table of this project's times, TRL's, and their ratios, turn by turn; what stands behind it below."""
    ours, trl = replies["ours"], replies["trl"]
    rows = []
    for label, key in PHASES.items():
        ratios = [theirs[key] / own[key] for own, theirs in zip(ours, trl, strict=True)]
        rows.append(
            [f"{label}, seconds", spread([r[key] for r in ours]), spread([r[key] for r in trl]), spread(ratios)]
        )
    for label, key in PHASES.items():
        rate = {side: [reply["tokens"] / reply[key] for reply in replies[side]] for side in SIDES}
        ratios = [own / theirs for own, theirs in zip(rate["ours"], rate["trl"], strict=True)]
        rows.append([f"{label}, tokens a second", spread(rate["ours"]), spread(rate["trl"]), spread(ratios)])
    peaks = [max(reply["peak_mib"] for reply in replies[side]) for side in SIDES]
    rows.append(["peak memory, MiB", *(f"{peak:.0f}" for peak in peaks), f"{peaks[1] / peaks[0]:.3g}"])
    drawn = [median(reply["tokens"] for reply in replies[side]) for side in SIDES]
    below = [
        brackets(len(ours)),
        f"{fmean(reply['mixed'] for reply in ours):.0%} of the groups had rewards that differ.",
        f"Tokens drawn a round: {drawn[0]:.0f} here, {drawn[1]:.0f} by TRL.",
        *(f"{NAMES[side]}: {tunings[side]}" for side in SIDES),
    ]
    return table(["", *NAMES.values(), "times better"], rows) + "\n\n" + "\n".join(below)


if __name__ == "__main__":
    run(main)
