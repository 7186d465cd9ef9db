"""This project's own problem files, as they are; and what the configuration may name in place of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo.problem_files import ProblemFileError, parse_problem
from grpo.problem_sources.layout import GivenSplit, ProblemSource, SourceRow
from grpo.problem_sources.raw_rows import numbered_lines

Sources = Path | ProblemSource | list[Path | ProblemSource]


@dataclass(frozen=True)
class PlainProblems:
    """A file of problems, one a line, with the fields of ``Problem``; ``metadata.role`` says the role of each."""

    path: Path
    """The file; .gz is unpacked on the way."""
    split: GivenSplit | None = None
    """heldout or validation takes all rows, train none of heldout; null: by the hash."""

    def read(self) -> Iterator[SourceRow]:
        """The problems in the order of their lines.

        Raises:
            ProblemFileError: naming the line, the field and the remedy.
        """
        for place, line in numbered_lines(self.path):
            try:
                problem = parse_problem(line)
            except ProblemFileError as error:
                raise ProblemFileError(f"{place}: {error}") from error
            yield SourceRow(problem, place, self.split)


def as_sources(sources: Sources | None) -> list[ProblemSource]:
    """One source or several as a list; a path is a plain file."""
    if sources is None:
        return []
    each = sources if isinstance(sources, list) else [sources]
    return [PlainProblems(source) if isinstance(source, Path) else source for source in each]
