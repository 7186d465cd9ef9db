"""The training's metrics by round."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Times differ from run to run, and Lightning's own counters say nothing that `round` does not.
_LEFT_OUT = ("seconds", "epoch", "step", "time")


@dataclass(frozen=True)
class Curves:
    """Metrics by round, as written by the training; a metric without a value in a round is absent there."""

    columns: tuple[str, ...]
    rounds: tuple[dict[str, str], ...]

    def line(self, column: str) -> tuple[list[int], list[float]]:
        """Rounds and values of one metric, only where it has one."""
        points = [(int(row["round"]), float(row[column])) for row in self.rounds if column in row]
        return [x for x, _ in points], [y for _, y in points]

    def present(self, columns: Sequence[str]) -> list[str]:
        """Those of ``columns`` that the training wrote."""
        return [column for column in columns if column in self.columns]

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
        ValueError: it has no column ``round``, or no rows.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        names = list(reader.fieldnames or [])
        if "round" not in names:
            raise ValueError(f"{path} has no column round: run the stage train again")
        kept = [name for name in names if name.split("/")[0] not in _LEFT_OUT and name != "round"]
        merged: dict[int, dict[str, str]] = {}
        for row in reader:
            if row["round"]:
                number = int(float(row["round"]))
                merged.setdefault(number, {}).update({name: row[name] for name in kept if row[name]})
    if not merged:
        raise ValueError(f"{path} has no rounds: run the stage train again")
    rounds = tuple({"round": str(number), **merged[number]} for number in sorted(merged))
    return Curves(("round", *sorted(kept)), rounds)
