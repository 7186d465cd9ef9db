"""Slices of Reasoning Gym's generators: a recipe, and the problems that are drawn by it."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo.problem_files import normalised
from grpo.records import Problem

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
