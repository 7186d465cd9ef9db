"""The first stage: check the raw problems, grade the rewards on them, and split them.

``grpo prepare --config configs/prepare.yaml`` stops before any training where the data or the rewards cannot
be trusted: a gold answer without full marks, a wrong or empty one with them, a question that stands twice,
or a worked example that is held out.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from grpo.problem_files import normalised, question_key, read_problems, write_problems
from grpo.records import Problem
from grpo.rewards import RewardComponent, judge, validate_components
from grpo.rewards.exact_answer import same_answer
from grpo.whole_files import write_whole

SPLITS = ("train", "validation", "heldout")
ROLES = ("train", "heldout_only")

# An error lists this many places and counts the others.
SHOWN = 5


class PrepareError(ValueError):
    """Problems or rewards that must not go into training."""


@dataclass(frozen=True)
class PrepareSettings:
    """What ``grpo prepare`` reads."""

    problems: Path
    """The raw problems; ``metadata.role`` of each is train (the default) or heldout_only."""
    rewards: dict[str, RewardComponent]
    """The components to grade: the file that training uses, relative to this config."""
    seed: int
    """Key of the split; another one splits anew."""
    worked_examples: Path | None = None
    """Examples a policy is warmed up on: graded, and kept out of validation and heldout."""
    validation: float = 0.1
    """Share of the problems of role train that validation gets."""
    heldout: float = 0.25
    """Share of the problems of role train that heldout gets, beside all of role heldout_only."""
    output: Path = Path("build/problems")
    """The folder of train.jsonl, validation.jsonl, heldout.jsonl and summary.json."""


@dataclass(frozen=True)
class Row:
    """A problem, where it was read, and the split it goes to (worked examples have none)."""

    problem: Problem
    place: str
    split: str | None


def main(argv: list[str]) -> None:
    """The ``grpo prepare`` command."""
    parser = ArgumentParser(prog="grpo prepare", description=__doc__)
    parser.add_argument("--config", action="config", help="configs/prepare.yaml")
    parser.add_class_arguments(PrepareSettings, sub_configs=True)  # rewards may be the path of a file
    values = parser.instantiate(parser.parse_args(argv))
    prepare(PrepareSettings(**{name: value for name, value in values.items() if name != "config"}))


def prepare(settings: PrepareSettings) -> None:
    """Check, grade, split and write.

    Raises:
        ProblemFileError: a raw file that cannot be read.
        PrepareError: settings, problems or rewards that must not go into training. The output folder is
            then left as it was.
    """
    _check(settings)
    rows = _problem_rows(settings)
    examples = _example_rows(settings)
    _refuse("questions that stand twice", repeated_questions(rows) + repeated_questions(examples))
    _refuse("worked examples that are held out", leaked_examples(examples, rows))
    _refuse("rewards that misjudge", misjudged([*rows, *examples], settings.rewards))
    by_split = {split: [row.problem for row in rows if row.split == split] for split in SPLITS}
    for split, problems in by_split.items():
        if not problems:
            raise PrepareError(f"no problem falls into {split}: add problems, or change validation, heldout or seed")
    _write(settings.output, by_split, _summary(settings, by_split, len(examples)))
    counts = ", ".join(f"{split} {len(problems)}" for split, problems in by_split.items())
    print(f"{settings.output}: {counts}")


def split_of(key: str, role: str, *, seed: int, validation: float, heldout: float) -> str:
    """The split of a problem, from its question's key, its role and the seed alone: adding rows moves no other.

    The hash is a number in [0, 1). Heldout lies below its share and validation next, so that a new
    ``validation`` moves no problem into or out of heldout.
    """
    if role == "heldout_only":
        return "heldout"
    keyed = json.dumps([seed, key]).encode()
    position = int.from_bytes(hashlib.blake2b(keyed, digest_size=8).digest(), "big") / 2**64
    if position < heldout:
        return "heldout"
    return "validation" if position < heldout + validation else "train"


def repeated_questions(rows: Sequence[Row]) -> list[str]:
    """One complaint for each row whose question an earlier row has, or whose words one of another split has."""
    first: dict[str, Row] = {}
    alike: dict[str, Row] = {}
    complaints = []
    for row in rows:
        earlier = first.setdefault(normalised(row.problem.question), row)
        mirror = alike.setdefault(question_key(row.problem.question), row)
        if earlier is row and mirror.split == row.split:
            continue
        earlier = mirror if earlier is row else earlier
        kind = f"within {row.split or 'worked examples'}"
        if earlier.split != row.split:
            kind = f"a leak between {earlier.split} and {row.split}"
        complaints.append(f"{row.place}: the question of {earlier.place} again ({kind}): remove one")
    return complaints


def leaked_examples(examples: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    """One complaint for each worked example whose question, in any order of its words, is in validation or heldout."""
    guarded = {question_key(row.problem.question): row for row in rows if row.split != "train"}
    return [
        f"{example.place}: the question of {row.place} in {row.split}: remove the worked example"
        for example in examples
        if (row := guarded.get(question_key(example.problem.question)))
    ]


def misjudged(rows: Sequence[Row], components: Mapping[str, RewardComponent]) -> list[str]:
    """Complaints of the rewards, each rendering an answer as a whole completion.

    The gold answer must get full marks; the empty one, and another problem's answer, must not.
    """
    complaints = []
    for row, wrong in zip(rows, wrong_answers([row.problem for row in rows]), strict=True):
        for what, text, deserved in (("gold", row.problem.answer, True), ("empty", "", False), ("wrong", wrong, False)):
            full, marks = _marks(row.problem, text, components)
            if full is not deserved:
                must = "must" if deserved else "must not"
                complaints.append(f"{row.place}: the {what} answer {text!r:.60} {must} get full marks; it gets {marks}")
    return complaints


def wrong_answers(problems: Sequence[Problem]) -> list[str]:
    """For each problem the answer of another one, of its slice where that has a second answer.

    Which one hangs on the problem's id, so that not all problems are held against the same answer.
    """
    everywhere = sorted({problem.answer for problem in problems})
    of_slice: dict[str, set[str]] = {}
    for problem in problems:
        of_slice.setdefault(problem.slice, set()).add(problem.answer)
    pools = {name: sorted(answers) for name, answers in of_slice.items()}
    return [_other_answer(problem, pools[problem.slice], everywhere) for problem in problems]


def _other_answer(problem: Problem, *pools: Sequence[str]) -> str:
    start = int.from_bytes(hashlib.blake2b(problem.id.encode(), digest_size=8).digest(), "big")
    for pool in pools:
        for step in range(len(pool)):
            answer = pool[(start + step) % len(pool)]
            if not same_answer(answer, problem.answer):
                return answer
    raise PrepareError(f"every problem has the answer {problem.answer!r:.60}: add some with another, to grade against")


def _marks(problem: Problem, text: str, components: Mapping[str, RewardComponent]) -> tuple[bool | None, str]:
    """Whether every component that counts gives its best value (None: one failed), and what each says."""
    full: bool | None = True
    said: list[str] = []
    for name, component in components.items():
        score = judge(component.check, problem, text)
        if component.weight == 0 or not score.applicable:
            continue
        if score.value is None:
            return None, f"{name}: {score.reason}"
        said.append(f"{name}={score.value:g}")
        full = full and (score.value >= 1 if component.weight > 0 else score.value <= 0)
    return (full, ", ".join(said)) if said else (False, "no mark, as no component applies")


def _problem_rows(settings: PrepareSettings) -> list[Row]:
    rows = []
    for number, problem in enumerate(read_problems(settings.problems), start=1):
        place = f"{settings.problems}:{number}"
        role = problem.metadata.get("role", "train")
        if role not in ROLES:
            raise PrepareError(f"{place}: metadata.role is {role!r:.60}: choose {' or '.join(ROLES)}")
        shares = {"validation": settings.validation, "heldout": settings.heldout}
        split = split_of(question_key(problem.question), role, seed=settings.seed, **shares)
        rows.append(Row(problem, place, split))
    return rows


def _example_rows(settings: PrepareSettings) -> list[Row]:
    path = settings.worked_examples
    if path is None:
        return []
    return [Row(problem, f"{path}:{number}", None) for number, problem in enumerate(read_problems(path), start=1)]


def _check(settings: PrepareSettings) -> None:
    validate_components(settings.rewards)
    for name in ("validation", "heldout"):
        share = getattr(settings, name)
        if not 0 < share < 1:
            raise PrepareError(f"{name} is {share}: choose a share above 0 and below 1")
    if settings.validation + settings.heldout >= 1:
        raise PrepareError(
            f"validation {settings.validation} and heldout {settings.heldout} leave nothing to train on: "
            "keep their sum below 1"
        )


def _refuse(what: str, complaints: Sequence[str]) -> None:
    if not complaints:
        return
    more = f"\n  and {len(complaints) - SHOWN} more" if len(complaints) > SHOWN else ""
    raise PrepareError(f"{what} ({len(complaints)}):" + "".join(f"\n  {text}" for text in complaints[:SHOWN]) + more)


def _summary(
    settings: PrepareSettings, by_split: Mapping[str, Sequence[Problem]], worked_examples: int
) -> dict[str, Any]:
    return {
        "counts": {split: _counts(problems) for split, problems in by_split.items()},
        "worked_examples": worked_examples,
        "data_sha256": data_sha256([path for path in (settings.problems, settings.worked_examples) if path]),
        "settings": {
            "problems": settings.problems.as_posix(),
            "worked_examples": settings.worked_examples and settings.worked_examples.as_posix(),
            "seed": settings.seed,
            "validation": settings.validation,
            "heldout": settings.heldout,
            "rewards": {
                name: {"check": _dotted(component.check), "weight": component.weight}
                for name, component in settings.rewards.items()
            },
        },
    }


def data_sha256(paths: Sequence[Path]) -> str:
    """SHA-256 over the lines ``<sha256 of the file>  <its name>``: the content, wherever the folder stands."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in paths]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _counts(problems: Sequence[Problem]) -> dict[str, Any]:
    slices = Counter(problem.slice for problem in problems)
    return {"problems": len(problems), "slices": dict(sorted(slices.items()))}


def _dotted(check: object) -> str:
    named = check if hasattr(check, "__qualname__") else type(check)
    return f"{named.__module__}.{named.__qualname__}"


def _write(output: Path, by_split: Mapping[str, Sequence[Problem]], summary: Mapping[str, Any]) -> None:
    """Write all files aside, then move them in, the summary last."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as aside:
        for split, problems in by_split.items():
            write_problems(Path(aside) / f"{split}.jsonl", problems)
        text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
        write_whole(Path(aside) / "summary.json", text.encode())
        output.mkdir(exist_ok=True)
        for name in (*(f"{split}.jsonl" for split in by_split), "summary.json"):
            os.replace(Path(aside) / name, output / name)
