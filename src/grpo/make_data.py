"""Write the raw problems: slices of reasoning-gym's generators, the same bytes on every run.

``grpo make-data --config configs/data.yaml`` was run once and its output put under version control; run it
again to change the slices. Where a problem comes from stands in its metadata, and for all in source.json.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from grpo.problem_files import write_problems
from grpo.problem_sources.reasoning_gym_slices import LIBRARY, MakeDataError, SliceRecipe, draw_slice
from grpo.whole_files import write_whole

__all__ = ["MakeDataError", "MakeDataSettings", "SliceRecipe", "main", "make_data"]


@dataclass(frozen=True)
class MakeDataSettings:
    """What ``grpo make-data`` reads."""

    version: str
    """The reasoning-gym version to draw from; another one may draw other problems."""
    seed: int
    """Seed of every draw."""
    slices: dict[str, SliceRecipe]
    """The problems. Where two slices could draw the same question, the one declared first has it."""
    worked_examples: dict[str, SliceRecipe]
    """Examples with answers to warm a policy up on; never one of the problems."""
    output: Path = Path("data")
    """The folder of problems.jsonl, worked_examples.jsonl and source.json."""


def main(argv: list[str]) -> None:
    """The ``grpo make-data`` command."""
    parser = ArgumentParser(prog="grpo make-data", description=__doc__)
    parser.add_argument("--config", action="config", help="configs/data.yaml")
    parser.add_class_arguments(MakeDataSettings)
    values = parser.instantiate(parser.parse_args(argv))
    make_data(MakeDataSettings(**{name: value for name, value in values.items() if name != "config"}))


def make_data(settings: MakeDataSettings) -> None:
    """Draw everything, then write it.

    Raises:
        MakeDataError: another version of reasoning-gym; a recipe that is no good; more problems asked for
            than there are. Nothing is then written.
    """
    _check(settings)
    taken: set[str] = set()
    problems = [
        problem
        for name, recipe in settings.slices.items()
        for problem in draw_slice(name, recipe, f"{settings.seed}/slices", taken)
    ]
    examples = [
        problem
        for name, recipe in settings.worked_examples.items()
        for problem in draw_slice(name, recipe, f"{settings.seed}/worked_examples", taken)
    ]
    write_problems(settings.output / "problems.jsonl", problems)
    write_problems(settings.output / "worked_examples.jsonl", examples)
    source = json.dumps(_source(settings), indent=2, sort_keys=True) + "\n"
    write_whole(settings.output / "source.json", source.encode())
    print(f"{settings.output}: {len(problems)} problems, {len(examples)} worked examples")


def _check(settings: MakeDataSettings) -> None:
    try:
        installed = metadata.version(LIBRARY)
    except metadata.PackageNotFoundError:
        installed = "not installed"
    if installed != settings.version:
        raise MakeDataError(
            f"version is {settings.version}, but {LIBRARY} here is {installed}: "
            f"run `pip install {LIBRARY}=={settings.version}`, or change version and expect other problems"
        )
    if not settings.slices or not settings.worked_examples:
        raise MakeDataError("slices and worked_examples each need at least one entry")
    for key, recipes in (("slices", settings.slices), ("worked_examples", settings.worked_examples)):
        for name, recipe in recipes.items():
            _check_recipe(f"{key}.{name}", name, recipe)
    for name, recipe in settings.worked_examples.items():
        if recipe.role != "train":
            raise MakeDataError(f"worked_examples.{name}.role is {recipe.role!r}: worked examples are for training")


def _check_recipe(key: str, name: str, recipe: SliceRecipe) -> None:
    if not name.strip():
        raise MakeDataError(f"{key!r}: give the slice a name")
    if recipe.size < 1:
        raise MakeDataError(f"{key}.size is {recipe.size}: give at least 1")
    try:
        re.compile(recipe.keep)
    except re.error as error:
        raise MakeDataError(f"{key}.keep is {recipe.keep!r}, which is no regular expression: {error}") from error
    for reserved in ("size", "seed"):
        if reserved in recipe.config:
            raise MakeDataError(f"{key}.config.{reserved}: not taken here: set {key}.size and the top seed")


def _source(settings: MakeDataSettings) -> dict[str, Any]:
    return {
        "library": LIBRARY,
        "version": settings.version,
        "seed": settings.seed,
        "slices": {name: asdict(recipe) for name, recipe in settings.slices.items()},
        "worked_examples": {name: asdict(recipe) for name, recipe in settings.worked_examples.items()},
    }
