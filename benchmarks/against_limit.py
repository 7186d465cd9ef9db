"""How near sampling and update come to the machine's bound: ``python benchmarks/against_limit.py --size smollm2``.

In one run: the rate of float32 matrix products in the model's shapes, the bandwidth of memory, and rounds whose
floating-point operations and bytes are counted from the model's configuration and the recorded lengths. The bound is
the roofline's: each pass takes at least its operations over the one and its bytes over the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from common.counts import Shape, bound_seconds, sampling_passes, update_passes
from common.machine_rates import bandwidth, product_rates
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
from transformers import AutoConfig

PHASES = {"rollouts": ("rollout", sampling_passes), "update": ("update", update_passes)}


def make_parser() -> argparse.ArgumentParser:
    parser = option_parser(__doc__)
    parser.add_argument(
        "--size", choices=("tiny", "smollm2"), default="smollm2", help="the workload; default %(default)s"
    )
    parser.add_argument("--rounds", type=positive, help="counted; default 5, and 2 where --quick is given")
    parser.add_argument("--threads", type=positive, default=2, help="of torch; default %(default)s")
    parser.add_argument("--micro-batch", type=positive, help="rows; default half of the round's")
    add_policy_options(parser)
    parser.add_argument("--quick", action="store_true", help="few rounds; default: enough for quartiles")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    options = make_parser().parse_args(arguments)
    options.rounds = options.rounds or (2 if options.quick else 5)
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    how = begin(f"against the limit, {options.size}", options)
    work = make_work(options.size, options.folder, options.policy)
    shape = Shape.of(AutoConfig.from_pretrained(work.policy))
    say("measuring products and memory")
    rates, memory = product_rates(shape, work.rows), bandwidth()
    print(table(["product", "GFLOP/s"], [[name, rate / 1e9] for name, rate in rates.items()]))
    print(f"\nmemory: {memory / 1e9:.1f} GB/s (triad)\n")
    tuning = Tuning(options.threads, options.micro_batch or work.rows // 2, work.rows)
    with scratch_folder() as folder, start("ours", work, tuning, folder, {"lengths": True}) as worker:
        replies = alternate({"ours": worker}, options.rounds)["ours"]
    say("measuring products again")
    after = product_rates(shape, work.rows)
    peak = max(*rates.values(), *after.values())
    print(report(replies, shape, peak, memory))
    results = {"rates": rates, "bandwidth": memory, "tuning": asdict(tuning), "replies": replies}
    write_results(result_name(f"against_limit_{options.size}", options, parse), how, results)


def report(replies: list[Reply], shape: Shape, peak: float, memory: float) -> str:
    """Counts, bounds and shares of the phases, over the rounds."""
    rows: list[list[Any]] = []
    for label, (phase, count) in PHASES.items():
        passes = [count(shape, reply["groups"], reply["prompts"], reply["completions"]) for reply in replies]
        bounds = [bound_seconds(of_round, peak, memory) for of_round in passes]
        shares = [bound / reply[phase] for bound, reply in zip(bounds, replies, strict=True)]
        rows.append(
            [
                label,
                median(sum(one.flops for one in of_round) / 1e9 for of_round in passes),
                median(sum(one.bytes for one in of_round) / 1e9 for of_round in passes),
                spread(bounds),
                spread([reply[phase] for reply in replies]),
                spread(shares, digits=2),
            ]
        )
    header = ["", "GFLOP", "GB", "bound, s", "took, s", "share of the bound"]
    return table(header, rows) + "\n\n" + brackets(len(replies))


if __name__ == "__main__":
    run(main)
