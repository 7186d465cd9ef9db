"""The training's metrics by round."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo.reporting.files import read_text, refuse_damaged

# Times differ from run to run, and Lightning's own counters say nothing that `round` does not.
_TIMES = "seconds"
_LEFT_OUT = (_TIMES, "epoch", "step", "time")

Cells = dict[str, str]


@dataclass(frozen=True)
class Curves:
    """Metrics by round, as written by the training; a metric without a value in a round is absent there.

    ``seconds`` holds the times of each round by phase, apart: they are printed and never stand in the report, which
    must be the same for two equal runs.
    """

    columns: tuple[str, ...]
    rounds: tuple[Cells, ...]
    seconds: dict[int, dict[str, float]] = field(default_factory=dict)

    def line(self, column: str) -> tuple[list[int], list[float]]:
        """Rounds and values of one metric, only where it has one."""
        points = [(int(row["round"]), float(row[column])) for row in self.rounds if column in row]
        return [x for x, _ in points], [y for _, y in points]

    def present(self, columns: Sequence[str]) -> list[str]:
        """Those of ``columns`` that the training wrote."""
        return [column for column in columns if column in self.columns]

    def values(self) -> dict[int, dict[str, float]]:
        """Every metric by round, as numbers."""
        return {int(row["round"]): {n: float(v) for n, v in row.items() if n != "round"} for row in self.rounds}

    def csv(self) -> bytes:
        """As a CSV file, one row a round, without times."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rounds)
        return text.getvalue().encode()


def read_curves(path: Path) -> Curves:
    """Read a Lightning metrics file, where training and validation values of a round may stand in separate rows.

    Raises:
        ReportError: it has no column ``round``, no rows, or a cell that is no number.
    """
    reader = csv.DictReader(io.StringIO(read_text(path, "train"), newline=""))
    try:
        names, lines = list(reader.fieldnames or []), list(reader)
        merged = _merged(lines)
    except (csv.Error, ValueError, OverflowError) as error:
        refuse_damaged(path, "train", error)
    if "round" not in names:
        refuse_damaged(path, "train", "it has no column round")
    if not merged:
        refuse_damaged(path, "train", "it has no rounds")
    kept = sorted(name for name in names if name.split("/")[0] not in _LEFT_OUT and name != "round")
    rounds = tuple({"round": str(number)} | _chosen(merged[number], kept) for number in sorted(merged))
    times = [name for name in names if name.startswith(f"{_TIMES}/")]
    seconds = {
        number: {name.removeprefix(f"{_TIMES}/"): float(text) for name, text in _chosen(row, times).items()}
        for number, row in sorted(merged.items())
    }
    return Curves(("round", *kept), rounds, seconds)


def _merged(lines: Iterable[Cells]) -> dict[int, Cells]:
    """Cells by round. Every one is read as a number here, so that a damaged one is found here too."""
    merged: dict[int, Cells] = {}
    for line in lines:
        cells = {name: text for name, text in line.items() if text}
        for text in cells.values():
            if not isinstance(text, str):
                raise ValueError("a row is longer than the first")
            float(text)
        if "round" in cells:
            merged.setdefault(int(float(cells["round"])), {}).update(cells)
    return merged


def _chosen(cells: Cells, names: Sequence[str]) -> Cells:
    return {name: cells[name] for name in names if name in cells}
