"""What must be known before the numbers are read: said in plain words, and only where it is so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from grpo.reporting.inputs import MODES, Evaluated, ReportInputs
from grpo.reporting.recorded_groups import Members, by_round
from grpo.rollouts.flat_groups import GroupVerdict, Verdict

_CALLED = {"heldout": "held-out", "train": "training", "validation": "validation"}
_NOT_IN_UPDATE: Mapping[Verdict, str] = {
    "skipped_flat": "skipped as flat (equal rewards)",
    "unscored": "without two scored members",
}


def problems_called(split: str | None) -> str:
    """What the problems of an evaluated split are called; those of another file claim nothing."""
    return "evaluated" if split is None else _CALLED.get(split, split)


def cautions(inputs: ReportInputs) -> list[str]:
    """Sentences, of which a sound run has none."""
    return [*_about_the_problems(inputs), *_about_the_training(inputs), *_about_the_answers(inputs)]


def _about_the_problems(inputs: ReportInputs) -> list[str]:
    found = []
    if inputs.split is None:
        found.append(
            "The evaluated file is none of those that the run's problems were prepared into: whether it was held out "
            "cannot be told from here."
        )
    elif inputs.split != "heldout":
        found.append(
            f"The evaluated file is the {problems_called(inputs.split)} split of the run's problems: nothing of it was "
            "held out."
        )
    asked = {answer.problem_id for answer in inputs.base.answers}
    both = asked & {row["problem_id"] for row in inputs.run.rollouts}
    if both:
        found.append(f"{len(both)} of the {len(asked)} evaluated problems were drawn in training (by their ids).")
    return found


def _about_the_training(inputs: ReportInputs) -> list[str]:
    run, updates = inputs.run, inputs.run.updates
    rounds = by_round(run.rollouts)
    verdicts: dict[int, Counter[Verdict]] = {
        number: Counter(updates[draws[-1][0]["rollout_id"]]["verdict"] for draws in groups)
        for number, groups in rounds.items()
    }
    idle = [number for number, counts in verdicts.items() if not any(GroupVerdict(v).in_update for v in counts)]
    unscored = [number for number, counts in verdicts.items() if counts.keys() == {"unscored"}]
    cut = [number for number, groups in rounds.items() if _all_cut(groups)]
    found = []
    if idle:
        found.append(
            f"No group was in the update in {_rounds(idle, rounds)}, so the policy did not move there: "
            f"{_reasons([verdicts[number] for number in idle])}."
        )
    if unscored:
        found.append(f"No group could be compared for lack of scores in {_rounds(unscored, rounds)}.")
    if cut:
        found.append(f"Every completion was cut off at the token budget in {_rounds(cut, rounds)} of the training.")
    if inputs.base.identity["policy_sha256"] == inputs.trained.identity["policy_sha256"]:
        found.append("The policies before and after training are the same, file for file: training changed nothing.")
    return found


def _about_the_answers(inputs: ReportInputs) -> list[str]:
    evaluated = (("before", inputs.base), ("after", inputs.trained))
    unscored = [
        f"The scorer had no verdict on {count} of the {asked} {mode} answers of the policy {when} training: they "
        "are in none of the accuracies that they have no verdict for."
        for when, one in evaluated
        for mode in MODES
        if (count := sum(answer.unscored for answer in one.answers if answer.mode == mode))
        and (asked := sum(answer.mode == mode for answer in one.answers))
    ]
    return unscored + [
        f"Every {mode} completion of the policy {when} training was cut off at the token budget."
        for when, one in evaluated
        for mode in MODES
        if _answers_cut(one, mode)
    ]


def _answers_cut(one: Evaluated, mode: str) -> bool:
    return all(answer.attempt.truncated for answer in one.answers if answer.mode == mode)


def _all_cut(groups: Sequence[Sequence[Members]]) -> bool:
    return all(row["finish_reason"] == "length" for draws in groups for draw in draws for row in draw)


def _rounds(some: Sequence[int], every: Collection[int]) -> str:
    """``every round``, or how many and the first of them."""
    if len(some) == len(every):
        return "every round"
    listed = ", ".join(map(str, some[:8])) + (", …" if len(some) > 8 else "")
    return f"{len(some)} of {len(every)} rounds ({listed})"


def _reasons(verdicts: Sequence[Mapping[Verdict, int]]) -> str:
    counts: Counter[Verdict] = Counter()
    for one in verdicts:
        counts.update(one)
    return ", ".join(f"{count} groups {_NOT_IN_UPDATE.get(name, name)}" for name, count in sorted(counts.items()))
