"""docs/performance.md has the words that the benchmarks print, the values that they try and the commands that are run.

The figures are measured and not repeated here.
"""

from __future__ import annotations

import re
import shlex
import sys
from typing import Any

import pytest
from import_graph import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import against_limit
import against_trl
import growth
import overhead
from common.counts import Shape
from common.learning import learnt
from common.work import Tuning, Work, sweep_of

PAGE = (REPOSITORY / "docs" / "performance.md").read_text(encoding="utf-8")
MAKEFILE = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
Rows = list[list[str]]


def tables(text: str) -> list[Rows]:
    """Every table of a text, without the line below its header."""
    found = re.findall(r"(?:^\|.*\|\n?)+", text, re.MULTILINE)
    lines = [[line for line in table.splitlines() if not re.fullmatch(r"[|: -]+", line)] for table in found]
    return [[[cell.strip() for cell in line[1:-1].split("|")] for line in table] for table in lines]


def names(rows: Rows, columns: int = 1) -> Rows:
    """The header, and the first columns."""
    return [rows[0], *(row[:columns] for row in rows[1:])]


def printed(text: str, columns: int = 1) -> Rows:
    (only,) = tables(text)
    return names(only, columns)


def reply(**more: Any) -> dict[str, Any]:
    phases = ("round", "rollout", "update", "reward", "record", "mixed", "peak_mib", "tokens")
    return dict.fromkeys(phases, 1.0) | more


def against_trl_table() -> str:
    tuning, replies = Tuning(1, 1, 1), [reply()] * 4
    return against_trl.compared(dict.fromkeys(against_trl.SIDES, tuning), dict.fromkeys(against_trl.SIDES, replies))


def learning_table() -> str:
    curve = [{"round": 0, "seconds": 0.0, "accuracy": 0.4}, {"round": 40, "seconds": 9.0, "accuracy": 0.7}]
    return learnt({seed: {"ours": curve, "trl": curve} for seed in ("1", "2", "3")}, 40, 0.6)


def limit_table() -> str:
    rounds = [reply(groups=[0], prompts=[3], completions=[2])] * 4
    return against_limit.report(rounds, Shape(1, 8, 8, 2, 2, 4, 16, tied=True), 1e9, 1e9)


def growth_table() -> str:
    return growth.report(
        {
            name: {"values": values, "seconds": {"rollout": [1.0] * len(values), "update": [1.0] * len(values)}}
            for name, (_, values, _) in growth.GROWN.items()
        }
    )


PRINTED = {
    "against_trl": (against_trl_table, 1, 2),
    "learning": (learning_table, 1, 1),
    "against_limit": (limit_table, 1, 1),
    "growth": (growth_table, 3, 1),
    "overhead": (lambda: overhead.report({side: [reply()] * 4 for side in ("on", "off")}), 1, 1),
}


@pytest.mark.parametrize("program", PRINTED)
def test_a_table_of_the_page_is_the_one_that_is_printed(program: str) -> None:
    """Header, names of the rows and, where quantities grow, their values."""
    make, columns, times = PRINTED[program]
    shown = printed(make(), columns)
    assert [names(rows, columns) for rows in tables(PAGE)].count(shown) == times, shown


def test_learning_prints_what_a_hand_counts() -> None:
    last = tables(learning_table())[0][-1]
    assert last == ["mean", "40.0%", "70.0%", "70.0%", "70.0%", "70.0%", "", "", ""]


def test_the_page_lists_the_values_that_are_tried() -> None:
    (listed,) = (rows for rows in tables(PAGE) if rows[0][0] == "tried")
    for column, (groups, name) in enumerate(((32, "tiny"), (4, "smollm2")), 1):
        work = Work(name, "", "", "", groups, 8, 48, 1e-4)
        grids = {side: dict(sweep_of(work, side, (2, 1))) for side in against_trl.SIDES}
        micro, sampled = (", ".join(map(str, grids["ours"][key])) for key in ("micro_batch", "sampled_rows"))
        assert [row[column] for row in listed] == [f"`{name}`", micro, sampled, "all cores, 1"]
        assert grids["trl"] == {"micro_batch": grids["ours"]["micro_batch"], "threads": (2, 1)}


def test_the_page_and_make_give_the_same_commands() -> None:
    recipe = re.search(r"^bench-full:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe
    run = {line.replace("$(BENCH_ARGS)", "").strip() for line in recipe[1].splitlines()}
    told = set(re.findall(r"`(python benchmarks/\w+\.py --[^`]*)`", PAGE.replace("\n", " ")))
    assert run == told


def test_every_command_of_make_is_one_that_the_programs_take() -> None:
    modules = {module.__name__: module for module in (against_limit, against_trl, growth, overhead)}
    commands = re.findall(r"^\tpython benchmarks/(\w+)\.py (.*)$", MAKEFILE.replace("$(BENCH_ARGS)", ""), re.MULTILINE)
    assert len(commands) >= 8
    for name, arguments in commands:
        assert modules[name].parse(shlex.split(arguments)).rounds  # type: ignore[attr-defined]
