"""Problems drawn from reasoning-gym's generators when they are read, by the same code as ``grpo make-data``.

For a first look at a task. What an experiment rests on is better drawn once, with ``grpo make-data``, and
put under version control.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from grpo.problem_files import ProblemFileError
from grpo.problem_sources.layout import GivenSplit, SourceRow
from grpo.problem_sources.reasoning_gym_slices import LIBRARY, SliceRecipe, draw_slice


@dataclass(frozen=True, kw_only=True)
class ReasoningGymTasks:
    """Slices of tasks, declared as in ``configs/data.yaml``."""

    version: str
    """The reasoning-gym version to draw from; another one may draw other problems."""
    seed: int
    """Seed of every draw."""
    slices: dict[str, SliceRecipe]
    """Name of the slice -> task, size, role, config, keep."""
    split: GivenSplit | None = None
    """heldout or validation takes all rows, train none of heldout; null: by the hash."""

    def read(self) -> Iterator[SourceRow]:
        """The problems, slice after slice; where two could draw the same question, the first has it.

        Raises:
            ProblemFileError: another version of reasoning-gym, or an empty slice.
            MakeDataError: a recipe that reasoning-gym refuses, or that has too few problems.
        """
        if metadata.version(LIBRARY) != self.version:
            raise ProblemFileError(
                f"version is {self.version}, but {LIBRARY} here is {metadata.version(LIBRARY)}: "
                f"run `pip install {LIBRARY}=={self.version}`, or change version and expect other problems"
            )
        taken: set[str] = set()
        for name, recipe in self.slices.items():
            if recipe.size < 1:
                raise ProblemFileError(f"slices.{name}.size is {recipe.size}: give at least 1")
            problems = draw_slice(name, recipe, f"{self.seed}/slices", taken)
            for number, problem in enumerate(problems, start=1):
                yield SourceRow(problem, f"{LIBRARY} {recipe.task}: slice {name}, row {number}", self.split)
