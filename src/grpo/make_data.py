"""Write the raw problems: slices of reasoning-gym's generators, the same bytes on every run.

``grpo make-data --config configs/data.yaml`` was run once and its output put under version control; run it
again to change the slices. Where a problem comes from stands in its metadata, and for all in source.json.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser

from grpo.problem_files import normalised, write_problems
from grpo.records import Problem
from grpo.whole_files import write_whole

LIBRARY = "reasoning-gym"

# Entries are drawn in blocks of a fixed size, each with a seed of its own, so that a larger slice begins
# with the problems of the smaller one.
BLOCK = 256

Role = Literal["train", "heldout_only"]


class MakeDataError(ValueError):
    """Slices that cannot be made as declared."""


@dataclass(frozen=True)
class SliceRecipe:
    """How the problems of one slice are drawn."""

    task: str
    """Name of the reasoning-gym dataset."""
    size: int
    """Number of problems, all different."""
    role: Role = "train"
    """train: spread over all splits; heldout_only: never trained on, to see what carries over."""
    config: dict[str, Any] = field(default_factory=dict)
    """Settings of the dataset, without its size and seed."""
    keep: str = ""
    """Regular expression that a question must match; the others are passed over. A slice can so be one operation."""


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


def draw_slice(name: str, recipe: SliceRecipe, stream: str, taken: set[str]) -> list[Problem]:
    """The first ``recipe.size`` problems to keep whose questions are not in ``taken``, which they are then added to.

    ``stream`` keys the draws together with the slice's name.
    """
    drawn: list[Problem] = []
    repeats = 0
    for entry in _entries(name, recipe, f"{stream}/{name}"):
        problem = _problem(name, recipe, entry)
        question = normalised(problem.question)
        wanted = question not in taken and re.search(recipe.keep, problem.question) is not None
        repeats = 0 if wanted else repeats + 1
        # In a space of n equally likely questions with one left, 20 n misses in a row have a chance of e^-20.
        if repeats > max(1000, 20 * len(taken)):
            raise MakeDataError(
                f"slice {name!r}: only {len(drawn)} different problems were found where size is {recipe.size}: "
                "ask for fewer, or widen the slice's config or keep"
            )
        if wanted:
            taken.add(question)
            drawn.append(problem)
        if len(drawn) == recipe.size:
            break
    return drawn


def _entries(name: str, recipe: SliceRecipe, stream: str) -> Iterator[Mapping[str, Any]]:
    import reasoning_gym  # seconds to import, and needed by this command alone

    for block in itertools.count():
        digest = hashlib.blake2b(f"{stream}/{block}".encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "big") >> 1
        try:
            dataset = reasoning_gym.create_dataset(recipe.task, size=BLOCK, seed=seed, **recipe.config)
        except (ValueError, TypeError, AssertionError) as error:
            raise MakeDataError(f"slice {name!r}: reasoning-gym refuses task {recipe.task!r}: {error}") from error
        yield from dataset


def _problem(name: str, recipe: SliceRecipe, entry: Mapping[str, Any]) -> Problem:
    question, answer = entry["question"], entry["answer"]
    if not isinstance(answer, str) or not answer.strip():
        raise MakeDataError(
            f"slice {name!r}: task {recipe.task!r} draws problems without one gold answer ({answer!r:.80}): "
            "choose a task that has one"
        )
    digest = hashlib.sha256(normalised(question).encode()).hexdigest()
    origin = {"task": recipe.task, "role": recipe.role, "entry": _as_json(name, entry["metadata"])}
    return Problem(id=f"{name}-{digest[:12]}", question=question, answer=answer, slice=name, metadata=origin)


def _as_json(name: str, value: Any) -> Any:
    """``value`` as it will be read back, so that a problem is equal before and after the file."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise MakeDataError(f"slice {name!r}: its metadata is not JSON ({error}): choose another task") from error


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
