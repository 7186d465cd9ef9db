"""The same work in TRL's GRPOTrainer and here, in turn: ``python benchmarks/against_trl.py --size tiny``.

Same weights, prompts, group size, reward, objective (TRL's ``loss_type="grpo"``), optimiser and number of rollouts.
Both are tuned first (rows of a micro-batch, threads); the fastest settings of each are compared.
``docs/performance.md`` says what each number means.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

from common.learning import compare_learning
from common.race import Reply, race, tune
from common.tables import machine_line, spread, table, write_results
from common.work import Side, Tuning, Work, make_work

PHASES = {"rollouts": "rollout", "update": "update", "whole round": "round"}
SIDES: tuple[Side, Side] = ("ours", "trl")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--rounds", type=int, default=7, help="compared")
    parser.add_argument("--groups", type=int, default=None, help="a round, 8 completions each; 32 (tiny) or 4")
    parser.add_argument("--warmup", type=int, default=1, help="rounds that are not counted")
    parser.add_argument("--kl-beta", type=float, default=0.0, help="weight of the KL term (TRL's beta)")
    parser.add_argument("--fixed-length", action="store_true", help="no end token: both draw equally many tokens")
    parser.add_argument("--learn", type=int, default=0, help="tiny: rounds to learn for, over three seeds; 0: none")
    parser.add_argument("--target", type=float, default=0.8, help="held-out accuracy to reach")
    parser.add_argument("--policy", type=Path, default=Path("build/policy"), help="SmolLM2's folder")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks"), help="for policies made here")
    parser.add_argument("--quick", action="store_true", help="no sweep, few rounds")
    return parser.parse_args()


def main() -> None:
    options = parse()
    rounds = 2 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        print(f"{options.size}: {machine_line()}\n")
        changes = {"kl_beta": options.kl_beta} | ({"groups": options.groups} if options.groups else {})
        work = make_work(options.size, options.folder, options.policy, fixed_length=options.fixed_length, **changes)
        tunings, tried = tuned(work, folder, options.quick)
        replies = race(work, tunings, rounds, folder, options.warmup)
        check_same_work(work, replies)
        print(compared(tunings, replies))
        learning = compare_learning(work, tunings, options.learn, options.target, folder) if options.learn else {}
    name = f"against_trl_{options.size}" + "_fixed" * options.fixed_length + "_kl" * (options.kl_beta > 0)
    results = {"work": asdict(work), "tunings": {s: asdict(t) for s, t in tunings.items()}, "tried": tried}
    print(f"\nwritten: {write_results(name, results | {'replies': replies, 'learning': learning}).name}")


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
    """The table of this project's times, TRL's, and their ratios, turn by turn."""
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
    rows.append(["tokens drawn a round", *(f"{tokens:.0f}" for tokens in drawn), ""])
    rows.append(["groups with rewards that differ", f"{fmean(reply['mixed'] for reply in ours):.0%}", "", ""])
    settings = "\n".join(f"{side}: {tunings[side]}" for side in SIDES)
    return table(["", "ours", "TRL", "times better"], rows) + f"\n\n{settings}"


if __name__ == "__main__":
    main()
