"""Stage: both evaluations and the training's record, as one page.

``grpo report --config configs/report.yaml`` writes ``report.md`` with its pictures, ``comparison.json``
(metrics) and ``curves.csv`` (plots). It holds no times and no paths: equal runs give equal bytes. Where the
training's time went is printed instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jsonargparse

from grpo.reporting.comparison import compare_evaluations, comparison_json, headline_json
from grpo.reporting.files import ReportError
from grpo.reporting.group_statistics import group_statistics, signal_by_problem
from grpo.reporting.inputs import read_inputs
from grpo.reporting.page import PageParts, headline, write_page
from grpo.reporting.pictures import draw_pictures
from grpo.reporting.provenance import refuse_unreconciled
from grpo.reporting.timing import time_breakdown
from grpo.whole_files import write_whole


@dataclass(frozen=True)
class ReportSettings:
    """Where the report's parts are.

    Args:
        train: the train stage's output folder.
        evaluation_numbers: folder of the evaluations' JSON files.
        completions: folder of the evaluations' completions.
        base: name of the evaluation before training.
        trained: name of the evaluation after training.
        output: folder of the report.
        samples: how many rollouts and answers each table of samples shows.
    """

    train: Path = Path("build/train")
    evaluation_numbers: Path = Path("report/evaluation")
    completions: Path = Path("build/evaluation")
    base: str = "base"
    trained: str = "trained"
    output: Path = Path("report")
    samples: int = 5

    def __post_init__(self) -> None:
        if self.base == self.trained:
            raise ReportError(f"base and trained are both {self.base!r}: name two evaluations to compare")
        if self.samples < 1:
            raise ReportError(f"samples is {self.samples}: it must be at least 1")


def main(argv: list[str]) -> None:
    """Run the stage from the command line's arguments."""
    settings = jsonargparse.auto_cli(ReportSettings, args=argv, as_positional=False, prog="grpo report")
    files = make_report(settings)
    for path, data in files.items():
        write_whole(path, data)


def make_report(settings: ReportSettings) -> dict[Path, bytes]:
    """All files of the report, made before any is written; the page comes last.

    Raises:
        ValueError: an input is missing or damaged, the evaluations cannot be compared or are of other policies
            than the training's, or the training's files disagree.
    """
    inputs = read_inputs(
        settings.train, settings.evaluation_numbers, settings.completions, settings.base, settings.trained
    )
    run = inputs.run
    refuse_unreconciled(run)
    overall, slices = compare_evaluations(inputs.base, inputs.trained)
    groups = group_statistics(run.rollouts, run.updates, run.method.components)
    pictures = draw_pictures(overall, slices, run.curves, groups, list(run.method.components))
    signal = signal_by_problem(run.rollouts, run.updates)
    page = write_page(PageParts(inputs, overall, slices, groups, signal, list(pictures), settings.samples))
    print("\n".join(text for text in (headline(overall, inputs.split), time_breakdown(run.curves.seconds)) if text))
    return {
        **{settings.output / "pictures" / name: data for name, data in pictures.items()},
        settings.output / "curves.csv": run.curves.csv(),
        settings.output / "comparison.json": comparison_json(overall, slices),
        settings.output / "headline.json": headline_json(overall),
        settings.output / "report.md": page.encode(),
    }
