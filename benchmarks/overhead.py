"""What records, rewards and logging cost of a round: ``python benchmarks/overhead.py``.

SmolLM2 with everything on (the record, the CSV file, an offline W&B run, the reward) and with everything off, in turn,
on the same prompts; and the seconds that a round itself books under each.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

from common.race import Reply, alternate, start
from common.tables import machine_line, spread, table, write_results
from common.work import Tuning, make_work

OFF = {"record": False, "loggers": False, "reward": False}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "smollm2"), default="smollm2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--policy", type=Path, default=Path("build/policy"), help="SmolLM2's folder")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks"), help="for policies made here")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    return parser.parse_args()


def main() -> None:
    options = parse()
    rounds = 2 if options.quick else options.rounds
    print(f"overhead, {options.size}: {machine_line()}\n")
    work = make_work(options.size, options.folder, options.policy, fixed_length=True)
    tuning = Tuning(options.threads, work.rows // 2, work.rows)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        workers = {
            "on": stack.enter_context(start("ours", work, tuning, Path(scratch), WANDB_MODE="offline")),
            "off": stack.enter_context(start("ours", work, tuning, Path(scratch), OFF)),
        }
        replies = alternate(workers, rounds)
    print(report(replies))
    print(f"\nwritten: {write_results(f'overhead_{options.size}', {'replies': replies}).name}")


def report(replies: dict[str, list[Reply]]) -> str:
    """Seconds with and without, and the share of a round that each part books."""
    on, off = replies["on"], replies["off"]
    shares = [(a["round"] - b["round"]) / a["round"] for a, b in zip(on, off, strict=True)]
    rows = [
        ["whole round, all on, s", spread([reply["round"] for reply in on])],
        ["whole round, all off, s", spread([reply["round"] for reply in off])],
        ["difference, share of a round", spread(shares)],
        ["rewards, share of a round", f"{fmean(r['reward'] / r['round'] for r in on):.2%}"],
        ["record, share of a round", f"{fmean(r['record'] / r['round'] for r in on):.2%}"],
        ["logging and the loop, share of a round", f"{fmean(outside(r) for r in on):.2%}"],
    ]
    return table(["", "measured"], rows)


def outside(reply: Reply) -> float:
    """The share of a round that is neither sampling, nor updating, nor rewards, nor record."""
    return float(1.0 - sum(reply[name] for name in ("rollout", "update", "reward", "record")) / reply["round"])


if __name__ == "__main__":
    main()
