"""How near sampling and update come to the machine's bound: ``python benchmarks/against_limit.py --size smollm2``.

In one run: the rate of float32 matrix products in the model's shapes, the bandwidth of memory, and rounds whose
floating-point operations and bytes are counted from the model's configuration and the recorded lengths. The bound is
the roofline's: each pass takes at least its operations over the one and its bytes over the other.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common.counts import Shape, bound_seconds, sampling_passes, update_passes
from common.machine_rates import bandwidth, product_rates
from common.race import Reply, alternate, start
from common.tables import machine_line, spread, table, write_results
from common.work import Tuning, make_work
from transformers import AutoConfig


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "smollm2"), default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=None, help="rows; by default half of the round's")
    parser.add_argument("--policy", type=Path, default=Path("build/policy"), help="SmolLM2's folder")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks"), help="for policies made here")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    print(f"against the limit, {options.size}: {machine_line()}\n")
    work = make_work(options.size, options.folder, options.policy)
    shape = Shape.of(AutoConfig.from_pretrained(work.policy))
    rates, memory = product_rates(shape, work.rows), bandwidth()
    print(table(["product", "GFLOP/s"], [[name, rate / 1e9] for name, rate in rates.items()]))
    print(f"\nmemory: {memory / 1e9:.1f} GB/s (triad)\n")
    tuning = Tuning(options.threads, options.micro_batch or work.rows // 2, work.rows)
    with tempfile.TemporaryDirectory() as scratch, start("ours", work, tuning, Path(scratch), {"lengths": True}) as one:
        replies = alternate({"ours": one}, 2 if options.quick else options.rounds)["ours"]
    after = product_rates(shape, work.rows)
    peak = max(*rates.values(), *after.values())
    print(report(replies, shape, peak, memory))
    results = {"rates": rates, "bandwidth": memory, "tuning": asdict(tuning), "replies": replies}
    print(f"\nwritten: {write_results(f'against_limit_{options.size}', results).name}")


def report(replies: list[Reply], shape: Shape, peak: float, memory: float) -> str:
    """Counts, bounds and shares of the phases, over the rounds."""
    rows: list[list[Any]] = []
    for phase, count in (("rollout", sampling_passes), ("update", update_passes)):
        passes = [count(shape, reply["groups"], reply["prompts"], reply["completions"]) for reply in replies]
        bounds = [bound_seconds(of_round, peak, memory) for of_round in passes]
        shares = [bound / reply[phase] for bound, reply in zip(bounds, replies, strict=True)]
        rows.append(
            [
                phase,
                spread([sum(one.flops for one in of_round) / 1e9 for of_round in passes]),
                spread([sum(one.bytes for one in of_round) / 1e9 for of_round in passes]),
                spread(bounds),
                spread([reply[phase] for reply in replies]),
                spread(shares),
            ]
        )
    return table(["", "GFLOP", "GB", "bound, s", "took, s", "share of the bound"], rows)


if __name__ == "__main__":
    main()
