"""What records, rewards and logging cost of a round: ``python benchmarks/overhead.py``.

SmolLM2 with everything on (the record, the CSV file, an offline W&B run, the reward) and with everything off, in turn,
on the same prompts; and the seconds that a round itself books under each.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import fmean

from common.race import Reply, alternate, start
from common.script import (
    add_policy_options,
    begin,
    option_parser,
    positive,
    result_name,
    run,
    say,
    scratch_folder,
    write_results,
)
from common.tables import brackets, spread, table
from common.work import Tuning, make_work

OFF = {"record": False, "loggers": False, "reward": False}


def make_parser() -> argparse.ArgumentParser:
    parser = option_parser(__doc__)
    parser.add_argument(
        "--size", choices=("tiny", "smollm2"), default="smollm2", help="the workload; default %(default)s"
    )
    parser.add_argument("--rounds", type=positive, help="of each; default 5, and 2 where --quick is given")
    parser.add_argument("--threads", type=positive, default=2, help="of torch; default %(default)s")
    add_policy_options(parser)
    parser.add_argument("--quick", action="store_true", help="few rounds; default: enough for quartiles")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    options = make_parser().parse_args(arguments)
    options.rounds = options.rounds or (2 if options.quick else 5)
    return options


def main() -> None:
    options = parse()
    how = begin(f"overhead, {options.size}", options)
    work = make_work(options.size, options.folder, options.policy, fixed_length=True)
    tuning = Tuning(options.threads, work.rows // 2, work.rows)
    with scratch_folder() as folder, ExitStack() as stack:
        say("loading both")
        workers = {
            "on": stack.enter_context(start("ours", work, tuning, folder, WANDB_MODE="offline")),
            "off": stack.enter_context(start("ours", work, tuning, folder, OFF)),
        }
        replies = alternate(workers, options.rounds)
    print(report(replies))
    write_results(result_name(f"overhead_{options.size}", options, parse), how, {"replies": replies})


def report(replies: dict[str, list[Reply]]) -> str:
    """Seconds with and without, and the share of a round that each part books."""
    on, off = replies["on"], replies["off"]
    shares = [(a["round"] - b["round"]) / a["round"] for a, b in zip(on, off, strict=True)]
    rows = [
        ["whole round, all on, s", spread([reply["round"] for reply in on])],
        ["whole round, all off, s", spread([reply["round"] for reply in off])],
        ["difference, share of a round", spread(shares, digits=3)],
        ["rewards, share of a round, by its own clock", f"{fmean(r['reward'] / r['round'] for r in on):.2%}"],
        ["record", f"{fmean(r['record'] / r['round'] for r in on):.2%}"],
        ["logging and the loop", f"{fmean(outside(r) for r in on):.2%}"],
    ]
    return table(["", "measured"], rows) + "\n\n" + brackets(len(on))


def outside(reply: Reply) -> float:
    """The share of a round that is neither sampling, nor updating, nor rewards, nor record."""
    return float(1.0 - sum(reply[name] for name in ("rollout", "update", "reward", "record")) / reply["round"])


if __name__ == "__main__":
    run(main)
