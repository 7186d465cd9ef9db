"""A finished run held against itself: its record, its decisions, its curves, its ledger and its configuration.

Nothing is sampled or judged again. What follows from the recorded scores is worked out once more by the
training's own definitions, so that no number can stand in one place and be another elsewhere. Everything here is
a function of rows and settings that gives complaints; none says that all agree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo.maths.group_advantages import centred_rewards, group_advantages
from grpo.reporting.finished_run import FinishedRun, Method, Row, drawn_tokens
from grpo.reporting.recorded_groups import Members, by_round, component_scores, rollout_key, scored_members
from grpo.reporting.recorded_metrics import round_values, validation_values
from grpo.rollouts.flat_groups import GroupVerdict, judge_draw
from grpo.rollouts.reward_transform import reward_of

# Further apart than this, relative to 1 or to the larger of the two, is more than the order of a sum explains.
TOLERANCE = 1e-9

_SCORES = ("reward_raw", "reward_weighted", "reward_steps")


def complaints(run: FinishedRun) -> list[str]:
    """All in which a run disagrees with itself; what builds on a disagreement is not looked at then."""
    return _names(run) or _shapes(run) or [*_rewards(run), *_decisions(run), *_curves(run), *_ledger(run)]


def _names(run: FinishedRun) -> list[str]:
    """Which rollouts there are: each once, under its own name, of this run, with one decision."""
    rows = [*run.rollouts, *run.validation]
    drawn, decided = Counter(r["rollout_id"] for r in run.rollouts), Counter(r["rollout_id"] for r in run.decisions)
    seed = run.method.seed
    return [
        *_summed_up("rollouts stand in the record twice", _twice(r["rollout_id"] for r in rows)),
        *_summed_up("rollouts have two decisions", _twice(decided.elements())),
        *_summed_up("rollouts have no decision", sorted(drawn.keys() - decided.keys())),
        *_summed_up("decisions are of rollouts that were not recorded", sorted(decided.keys() - drawn.keys())),
        *_each(rows, "rollouts are of another run", lambda row: row["run_id"] != run.run["run_id"]),
        *_each(
            rows,
            "rollouts do not have the id of their key",
            lambda row: row["rollout_id"] != rollout_key(row, seed).rollout_id,
        ),
        *_each(run.rollouts, "training rollouts have another purpose", lambda row: row["purpose"] != "train"),
        *_each(run.validation, "validation rollouts have another purpose", lambda row: row["purpose"] != "validation"),
    ]


def _shapes(run: FinishedRun) -> list[str]:
    """How many rounds, groups and members there are, and that their numbers are numbers."""
    method, rounds = run.method, by_round(run.rollouts)
    found = []
    for source, numbers in (("the record", list(rounds)), ("metrics.csv", sorted(run.curves.values()))):
        if numbers != list(range(method.rounds)):
            found.append(f"data.rounds is {method.rounds}, the rounds of {source} are {_listed(numbers)}")
    for number, groups in rounds.items():
        if len(groups) != method.groups_per_round:
            found.append(f"round {number} has {len(groups)} groups, data.groups_per_round is {method.groups_per_round}")
        draws = [draw for group in groups for draw in group]
        odd = [draw for draw in draws if len(draw) != method.group_size]
        found += [f"{_draw_name(draw)} has {len(draw)} members, not {method.group_size}" for draw in odd[:1]]
        mixed = [draw for draw in draws if len({row["group_id"] for row in draw}) > 1]
        found += [f"{_draw_name(draw)} has members of several group ids" for draw in mixed[:1]]
    rows, components = [*run.rollouts, *run.validation], list(method.components)
    return [
        *found,
        *_each(
            rows,
            f"rollouts have other scores than {', '.join(components)}",
            lambda row: not _has(row, components),
        ),
        *_each(rows, "rollouts have a score that is no finite number", lambda row: not _finite(_scores(row))),
        *_each(
            run.decisions,
            "decisions hold a value that is no finite number",
            lambda row: not _finite([row["centred"], row["advantage"]]),
        ),
    ]


def _rewards(run: FinishedRun) -> list[str]:
    """Each reward from its components: weighted, summed, transformed."""
    rows, method = [*run.rollouts, *run.validation], run.method
    steps = [
        *_each(
            rows, "rollouts have another weighted score than weight times raw", lambda row: not _weighs(row, method)
        ),
        *_each(rows, "rollouts have other reward_steps than their scores give", lambda row: not _steps(row, method)),
    ]
    return steps or _each(
        rows,
        "rollouts have another reward than their reward_steps come to",
        lambda row: not same(row["reward"], reward_of(dict(row["reward_steps"]))),
    )


def _weighs(row: Row, method: Method) -> bool:
    """Whether each weighted score is the component's weight times its raw one."""
    weights = {name: component.weight for name, component in method.components.items()}
    expected = {name: None if value is None else weights[name] * value for name, value in row["reward_raw"]}
    return _same_values(expected, dict(row["reward_weighted"]))


def _steps(row: Row, method: Method) -> bool:
    """Whether the transform gives the recorded steps from the raw scores, the length and the tool calls."""
    scores, calls = component_scores(row), sum(not call["valid"] for call in row["tool_calls"])
    try:
        expected = method.transform.steps(scores, method.components, length=drawn_tokens(row), invalid_tool_calls=calls)
    except ValueError:  # past the float range, which the training refuses to record
        return False
    return _same_values(expected, dict(row["reward_steps"]))


def _decisions(run: FinishedRun) -> list[str]:
    """Verdicts, advantages and tokens in the loss, from the rewards."""
    updates = run.updates
    found: list[str] = []
    for groups in by_round(run.rollouts).values():
        found += [text for group in groups for text in _verdicts(group, updates, run.method)]
        last = [draws[-1] for draws in groups]
        centred, advantages = _advantages(last, run.method)
        for i, draw in enumerate(last):
            for j, row in enumerate(draw):
                decided = updates[row["rollout_id"]]
                values = {"centred": centred[i, j].item(), "advantage": advantages[i, j].item()}
                expected = dict.fromkeys(values) if row["reward"] is None else values
                found += [
                    f"{_row_name(row)} has {name} {decided[name]}, its group's rewards give {value}"
                    for name, value in expected.items()
                    if not same(decided[name], value)
                ]
    return [*_summed_up("decisions do not follow from the rewards", found), *_loss_tokens(run)]


def _verdicts(draws: Sequence[Members], updates: Mapping[str, Row], method: Method) -> list[str]:
    """Each draw's verdict, and that a fresh draw follows where, and only where, one was set aside."""
    found = []
    for place, draw in enumerate(draws):
        members = scored_members(draw)
        expected = judge_draw(members, method.flat_groups, place, method.max_draws, method.at_limit).verdict
        decided = {updates[row["rollout_id"]]["verdict"] for row in draw}
        if decided != {expected} or draw[0]["draw"] != place:
            found.append(f"{_draw_name(draw)} is {' and '.join(sorted(decided))}, its rewards make it {expected}")
        elif (expected == "resampled") != (place + 1 < len(draws)):
            found.append(f"{_draw_name(draw)} is {expected}, and {len(draws) - place - 1} draws follow it")
        if place + 1 < len(draws) and any(updates[row["rollout_id"]]["advantage"] is not None for row in draw):
            found.append(f"{_draw_name(draw)} was set aside and has advantages")
    return found


def _advantages(draws: Sequence[Members], method: Method) -> tuple[Tensor, Tensor]:
    """Centred rewards and advantages ``[P, G]`` of a round, whose groups are compared together."""
    values = [[math.nan if row["reward"] is None else row["reward"] for row in draw] for draw in draws]
    rewards = torch.tensor(values, dtype=torch.float64)
    scored = ~rewards.isnan()
    rewards = rewards.nan_to_num(0.0)
    centred = centred_rewards(rewards, scored=scored, baseline=method.advantages["baseline"])
    return centred, group_advantages(rewards, scored=scored, **method.advantages)


def _loss_tokens(run: FinishedRun) -> list[str]:
    """In the loss is what a group in the update drew, but for what is unscored or masked as cut off."""
    updates = run.updates

    def expected(row: Row) -> int:
        inside = GroupVerdict(updates[row["rollout_id"]]["verdict"]).in_update
        masked = row["reward"] is None or (run.method.mask_truncated and row["finish_reason"] == "length")
        return drawn_tokens(row) if inside and not masked else 0

    return _each(
        run.rollouts,
        "rollouts have other loss_tokens than their verdict and ending give",
        lambda row: updates[row["rollout_id"]]["loss_tokens"] != expected(row),
    )


def _curves(run: FinishedRun) -> list[str]:
    """Every metric that the record determines, in every round."""
    written, updates = run.curves.values(), run.updates
    expected = {
        number: round_values(groups, updates, run.method.components)
        for number, groups in by_round(run.rollouts).items()
    }
    for number, groups in by_round(run.validation).items():
        expected.setdefault(number, {}).update(validation_values(groups, run.method.components))
    known = sorted({name for row in expected.values() for name in row})
    pairs = [
        (f"{name} of round {number}", written.get(number, {}).get(name), row.get(name))
        for number, row in expected.items()
        for name in known
    ]
    found = [f"{name} is {value}, the record gives {other}" for name, value, other in pairs if not same(value, other)]
    return _summed_up("metrics are not the record's", found)


def _ledger(run: FinishedRun) -> list[str]:
    """What the run counted as it went, and what its record holds."""
    groups = [draw for groups in by_round(run.rollouts).values() for draws in groups for draw in draws]
    updates = run.updates
    counted = Counter(f"groups_{updates[draw[0]['rollout_id']]['verdict']}" for draw in groups)
    counted.update(
        rounds=len({row["round"] for row in run.rollouts}),
        groups=len(groups),
        rollouts=len(run.rollouts),
        validation_rollouts=len(run.validation),
        tokens_sampled=sum(map(drawn_tokens, run.rollouts)),
        tokens_in_loss=sum(row["loss_tokens"] for row in run.decisions),
        updates=round(sum(row.get("loss/updates", 0) for row in run.curves.values().values())),
    )
    names = sorted({*counted, *(name for name in run.ledger if name.startswith("groups_"))})
    return [
        f"the ledger counts {run.ledger.get(name, 0)} {name.replace('_', ' ')}, the record holds {counted[name]}"
        for name in names
        if run.ledger.get(name, 0) != counted[name]
    ]


def same(one: float | None, other: float | None) -> bool:
    """Whether two numbers are one but for rounding; no number is the same as none alone."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _same_values(one: Mapping[str, float | None], other: Mapping[str, float | None]) -> bool:
    return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())


def _has(row: Row, components: Sequence[str]) -> bool:
    return all(sorted(name for name, _ in row[column] or ()) == sorted(components) for column in _SCORES[:2])


def _scores(row: Row) -> list[float | None]:
    return [row["reward"], *(value for column in _SCORES for _, value in row[column] or ())]


def _finite(values: Iterable[float | None]) -> bool:
    return all(value is None or math.isfinite(value) for value in values)


def _twice(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _each(rows: Iterable[Row], what: str, is_odd: Callable[[Row], bool]) -> list[str]:
    """One complaint of all rows that are odd."""
    return _summed_up(what, [_row_name(row) for row in rows if is_odd(row)])


def _summed_up(what: str, found: Sequence[str]) -> list[str]:
    """One complaint for many: how many there are, and the first."""
    return [f"{len(found)} {what}, first: {found[0]}"] if found else []


def _row_name(row: Row) -> str:
    return f"{row['rollout_id']} of round {row['round']}"


def _draw_name(draw: Members) -> str:
    row = draw[0]
    return f"draw {row['draw']} of problem {row['problem_id']} in round {row['round']}"


def _listed(numbers: Sequence[Any]) -> str:
    if len(numbers) > 6:
        return f"{numbers[0]} … {numbers[-1]}, {len(numbers)} in all"
    return ", ".join(map(str, numbers)) or "none"
