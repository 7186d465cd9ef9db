"""Grade completions that already exist, with any reward or scorer, outside any training.

``grpo score --reward math_answer --input pairs.jsonl --output verdicts.jsonl`` writes a line of verdict for each line
of input, in its order: ``id``, ``value``, ``scored``, ``reason``, ``parts``. An input line has ``id``, ``gold`` and
``completion`` (``question`` and ``metadata`` where the check reads them), or all fields of a problem and
``completion``. Other fields are not read and not carried over; lines are matched by their order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from grpo.answer_readings import load_reading, strict_answer
from grpo.named_checks import load_reward, named_scorer, scorer_names
from grpo.output_folders import require_output_file
from grpo.problem_files import TEXT_FIELDS, ProblemFileError, parse_problem
from grpo.problem_sources.raw_rows import RawRow, read_rows
from grpo.records import Problem, Score
from grpo.rewards import RewardComponent, validate_components
from grpo.rewards.judging import Judges
from grpo.rewards.self_check import full_marks
from grpo.rollouts.reward_transform import weighted_sum
from grpo.scorers import Scorer
from grpo.whole_files import write_whole

# Stands in for what a line need not say; a check that reads it has no business with such a line.
UNSAID = "unsaid"
# Scorers that take long to import or stand elsewhere than in grpo.scorers, by the names one types.
SHORT_SCORERS = {"code_passes_tests": "grpo.code_scorer.code_passes_tests"}


class ScoreError(ValueError):
    """Grading that cannot be done as it is asked for."""


@dataclass(frozen=True)
class ScoreSettings:
    """What is graded, and by what: exactly one of ``reward``, ``scorer`` and ``config``."""

    input: Path
    """The completions: .jsonl or .parquet, also with .gz."""
    output: Path
    """The verdicts, a JSON object a line."""
    reward: str | None = None
    """A reward: a module of grpo.rewards that holds it under its own name (code_tests, say), or a dotted path."""
    scorer: str | None = None
    """A scorer: its name in grpo.scorers, code_passes_tests, or a dotted path. It sees the answer that is read."""
    reading: str | None = None
    """How a scorer's answer is found in a completion: a name of grpo.answer_readings, or the dotted path of a function
    (text) -> answer or None. null: as the scorer asks (code_passes_tests: final_code), or else strict_answer."""
    limit_seconds: float | None = 10.0
    """Wall-clock limit of one completion; null: none. Components of a config have limits of their own."""
    workers: int = 2
    """Processes that grade."""
    max_failure_share: float = 1.0
    """The largest share of lines whose check may fail before the command ends with an error."""


@dataclass(frozen=True)
class Verdict:
    """What is written of one completion, and whether it counts as accepted and as failed."""

    line: Mapping[str, Any]
    accepted: bool
    failed: bool


@dataclass(frozen=True)
class ReadScorer:
    """A scorer in a reward's place: it sees the answer that is read in the completion."""

    scorer: Scorer
    read: Callable[[str], str | None]

    def __call__(self, problem: Problem, completion: str) -> Score:
        return self.scorer(problem, self.read(completion))


def main(argv: list[str]) -> None:
    """The ``grpo score`` command."""
    parser = ArgumentParser(prog="grpo score", description=__doc__, exit_on_error=False)
    parser.add_argument(
        "--config",
        type=dict[str, RewardComponent] | None,
        enable_path=True,
        help="a file of reward components, such as configs/rewards.yaml: value is their weighted sum",
    )
    parser.add_class_arguments(ScoreSettings)
    try:
        values = parser.instantiate(parser.parse_args(argv))
    except ArgumentError as error:
        raise ScoreError(" ".join(str(error).split())) from error
    settings = {name: value for name, value in values.items() if name != "config"}
    score(ScoreSettings(**settings), values.config)


def score(settings: ScoreSettings, config: Mapping[str, RewardComponent] | None = None) -> None:
    """Read, grade and write; the summary goes to standard output.

    Raises:
        ProblemFileError: an input line that is no good, naming file, line, field and remedy; nothing is written.
        ScoreError: settings that do not fit, or, after writing, more failures than are allowed.
        ValueError: a reward or scorer that is not there, with the names of those that are.
    """
    require_output_file(settings.output, "output", settings.input)
    components = _components(settings, config)
    items = [_item(row) for row in read_rows(settings.input)]
    with Judges(components, settings.workers) as judges:
        scores = judges.judge(items)
    single = config is None
    verdicts = [_verdict(item[0], each, components, single) for item, each in zip(items, scores, strict=True)]
    lines = (json.dumps(each.line, ensure_ascii=False) + "\n" for each in verdicts)
    # Half a surrogate pair that a completion holds becomes JSON's own escape of it.
    write_whole(settings.output, "".join(lines).encode(errors="backslashreplace"))
    print(f"{settings.output}: {summary(verdicts)}")
    failed = sum(each.failed for each in verdicts)
    if failed > settings.max_failure_share * len(verdicts):
        raise ScoreError(
            f"checks failed on {failed} of {len(verdicts)} completions, more than max_failure_share = "
            f"{settings.max_failure_share}: {settings.output} has the reasons"
        )


def summary(verdicts: Sequence[Verdict]) -> str:
    """The counts, and the share of the scored that was accepted.

    >>> summary([Verdict({"value": 1.0}, True, False), Verdict({"value": 0.0}, False, False)])
    '2 completions: 1 accepted, 1 rejected, 0 unscored; accepted of scored 0.500, mean value 0.500'
    """
    values = [each.line["value"] for each in verdicts if each.line["value"] is not None]
    if not values:
        reason = " ".join(verdicts[0].line["reason"].split())[:200] if verdicts else ""
        return f"{len(verdicts)} completions: nothing was scored" + (f"; the first one: {reason}" if reason else "")
    accepted = sum(each.accepted for each in verdicts)
    counts = f"{accepted} accepted, {len(values) - accepted} rejected, {len(verdicts) - len(values)} unscored"
    rate = f"; accepted of scored {accepted / len(values):.3f}, mean value {sum(values) / len(values):.3f}"
    return f"{len(verdicts)} completions: {counts}{rate}"


def _components(settings: ScoreSettings, config: Mapping[str, RewardComponent] | None) -> Mapping[str, RewardComponent]:
    if not 0 <= settings.max_failure_share <= 1:
        raise ScoreError(f"max_failure_share is {settings.max_failure_share}: choose from 0 (none) to 1 (all may fail)")
    if settings.workers < 1:
        raise ScoreError(f"workers is {settings.workers}: give at least 1")
    named = [
        name for name, given in (("reward", settings.reward), ("scorer", settings.scorer), ("config", config)) if given
    ]
    if len(named) != 1:
        raise ScoreError(
            f"{' and '.join(named) or 'nothing'} given: give exactly one of --reward, --scorer and --config"
        )
    if settings.reading is not None and not settings.scorer:
        raise ScoreError("reading is given without a scorer: rewards see the whole completion, so leave it out")
    if config is None:
        check = load_reward(settings.reward) if settings.reward else _scorer_check(settings)
        config = {"reward": RewardComponent(check, limit_seconds=settings.limit_seconds)}
    validate_components(config)
    return config


def _scorer_check(settings: ScoreSettings) -> ReadScorer:
    name = settings.scorer or ""
    if "." not in name and name not in (known := sorted([*scorer_names(), *SHORT_SCORERS])):
        raise ScoreError(
            f"scorer is {name!r}, which is not there: choose one of {', '.join(known)}, or give the dotted path of a "
            "function (problem, answer) -> Score"
        )
    scorer = named_scorer(SHORT_SCORERS.get(name, name))
    natural: str = getattr(scorer, "natural_reading", strict_answer.__name__)
    return ReadScorer(scorer, load_reading(settings.reading or natural).read)


def _item(row: RawRow) -> tuple[Problem, str]:
    """The problem and the completion of a line."""
    completion = row.fields.get("completion")
    if not isinstance(completion, str):
        what = f"is {completion!r:.80}" if "completion" in row.fields else "is missing"
        raise ProblemFileError(f"{row.place}: field 'completion' {what}: give the text that is to be graded")
    if "gold" in row.fields and "answer" in row.fields:
        raise ProblemFileError(f"{row.place}: fields 'gold' and 'answer' both stand there: keep one")
    if "answer" in row.fields:
        fields = {name: row.fields[name] for name in TEXT_FIELDS if name in row.fields}
    else:
        fields = {"question": UNSAID, "slice": UNSAID} | {
            name: row.fields[name] for name in ("id", "question", "slice") if name in row.fields
        }
        fields["answer"] = _gold(row)
    fields |= {name: row.fields[name] for name in ("metadata", "context") if name in row.fields}
    try:
        return parse_problem(json.dumps(fields)), completion
    except ProblemFileError as error:
        raise ProblemFileError(f"{row.place}: {str(error).replace(repr('answer'), repr(_gold_name(row)))}") from error
    except TypeError as error:
        raise ProblemFileError(f"{row.place}: not JSON ({error}): keep metadata to plain data") from error


def _gold(row: RawRow) -> Any:
    if "gold" not in row.fields:
        raise ProblemFileError(
            f"{row.place}: field 'gold' is missing: give the right answer, or all fields of a problem"
        )
    return row.fields["gold"]


def _gold_name(row: RawRow) -> str:
    return "gold" if "gold" in row.fields else "answer"


def _verdict(
    problem: Problem, scores: Mapping[str, Score], components: Mapping[str, RewardComponent], single: bool
) -> Verdict:
    """A single check's score as it is; of several, the weighted sum that training would start from."""
    failed = [name for name, each in scores.items() if each.applicable and each.value is None]
    if single:
        (only,) = scores.values()
        value, reason, parts = only.value, only.reason, only.plain_parts()
    else:
        value = weighted_sum(scores, components)
        reason = "; ".join(f"{name}: {each.reason}" for name, each in scores.items() if each.reason)
        parts = {
            name: {"value": each.value, "reason": each.reason, "parts": each.plain_parts()}
            for name, each in scores.items()
        }
    line = {"id": problem.id, "value": value, "scored": value is not None, "reason": reason, "parts": parts}
    accepted = value is not None and full_marks(scores, components)[0] is True
    return Verdict(line, accepted, bool(failed))
