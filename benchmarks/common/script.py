"""What every benchmark begins and ends with: its options, what it ran on, an end by signal, its result file."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grpo.run_identity import code_revision
from grpo.whole_files import write_whole

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "trl", "grpo")
STOPS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(SystemExit):
    """A signal asked for the end; the code is the one that a shell gives for that signal."""


def run(main: Callable[[], None]) -> None:
    """Run it in the repository's root; Ctrl-C and SIGTERM unwind it, so that its workers and its folder go too."""
    os.chdir(ROOT)
    for number in STOPS:
        signal.signal(number, _interrupt)
    try:
        main()
    except Interrupted:
        say("interrupted; nothing was written")
        raise


def _interrupt(number: int, _: object) -> None:
    for stop in STOPS:  # the way out is short; a second signal would leave it half gone
        signal.signal(stop, signal.SIG_IGN)
    raise Interrupted(128 + number)


def say(step: str) -> None:
    """Where the program is, for whoever waits: beside its tables, which go to the standard output."""
    print(step, file=sys.stderr, flush=True)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for logs and whatever workers write; an ended worker's own helpers may still write while it goes."""
    with tempfile.TemporaryDirectory(prefix="grpo-benchmark-", ignore_cleanup_errors=True) as scratch:
        yield Path(scratch)


def option_parser(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def number(kind: Callable[[str], float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """The type of an option whose values have bounds."""

    def read(text: str) -> float:
        value = kind(text)
        if not least <= value <= most or math.isinf(value):
            bounds = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"it must be {bounds}, and is {text}")
        return value

    read.__name__ = "whole number" if kind is int else "number"  # argparse names it where the text is none
    return read


positive = number(int, 1)


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Folders, from the repository's root wherever the program is called."""
    for name, folder, help_text in (
        ("--policy", "build/policy", "SmolLM2's folder, from the repository's root; default %(default)s"),
        ("--folder", "build/benchmarks", "for policies made here, from the root; default %(default)s"),
    ):
        parser.add_argument(name, type=Path, default=Path(folder), help=help_text)


def begin(title: str, options: Namespace) -> dict[str, Any]:
    """Print what it runs on, warn of a busy machine, and give what the result file says about how it was made."""
    found = machine()
    cores, load = found["cores"], found["load_at_start"]
    made_on = f"{cores} cores with {found['vectors']}, {found['memory_gib']} GiB; load {load:.1f} at the start"
    print(f"{title}: {made_on}\n", flush=True)
    if load > cores / 2:
        say(f"load {load:.1f} on {cores} cores: something else runs; ratios will be noisy and times wrong")
    return {"options": vars(options), "versions": versions(), "commit": code_revision(), "machine": found}


def machine() -> dict[str, Any]:
    """In general terms: what bounds the numbers, and nothing that names a host."""
    flags = _flags()
    widest = next((name for name in ("avx512f", "avx2", "avx") if name in flags), platform.machine())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return {
        "cores": len(os.sched_getaffinity(0)),
        "vectors": widest,
        "memory_gib": round(memory),
        "load_at_start": os.getloadavg()[0],
    }


def _flags() -> set[str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return set(next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split())


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def result_name(base: str, options: Namespace, parse: Callable[[Sequence[str]], Namespace]) -> str:
    """The base for a full run; what was chosen otherwise is added, so that no other run takes its result's place."""
    size = ["--size", options.size] if "size" in options else []
    usual = vars(parse([*size, *["--quick"] * options.quick]))
    parts = [base, *["quick"] * options.quick]
    for name, value in vars(options).items():
        if value != usual[name] and name != "folder":
            values = value if isinstance(value, list) else [value]
            parts += [name, *(str(each) for each in values if each is not True)]
    return re.sub(r"[^\w.-]+", "-", "_".join(parts))


def write_results(name: str, how: Mapping[str, Any], results: Mapping[str, Any]) -> Path:
    """Whole or not at all; GRPO_BENCHMARK_RESULTS names another folder."""
    folder = Path(os.environ.get("GRPO_BENCHMARK_RESULTS") or "benchmarks/results").resolve()
    path = folder / f"{name}.json"
    text = json.dumps({**how, **results}, indent=1, default=str)
    write_whole(path, (text + "\n").encode())
    print(f"\nwritten: {path}")
    return path
