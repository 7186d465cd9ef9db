"""The page's section on the training's groups: what they earned, and which slices and problems the signal came from."""

from __future__ import annotations

from collections.abc import Sequence

from grpo.reporting.group_statistics import GroupStatistics, ProblemSignal
from grpo.reporting.markdown import code, number, plain, share, table


def groups_section(groups: Sequence[GroupStatistics], problems: Sequence[ProblemSignal], picture: str) -> str:
    """The whole section.

    Args:
        groups: of each slice, and of all.
        problems: those to show, largest part of the signal first.
        picture: the text that shows it.
    """
    texts = [
        "## Groups: where the signal came from",
        "Of the training's rollouts, from the record. Only *mixed* groups (unequal rewards) teach anything; *spread* "
        "is the standard deviation of the rewards within a group; *accepted* completions have full marks; *of the "
        "signal* is the part of the sum of absolute advantages.",
        picture,
        _rewards_of_groups(groups),
        "*Repeated* completions stand in their group already; *finished* ones drew an end token.",
        _completions_of_groups(groups),
        _problems(problems),
    ]
    return "\n\n".join(text for text in texts if text)


def _problems(problems: Sequence[ProblemSignal]) -> str:
    if not problems or not problems[0].share:
        return ""
    rows = [[plain(one.slice), code(one.prompt, 60), str(one.groups), share(one.share)] for one in problems]
    found = table(["Slice", "Prompt", "Groups", "Of the signal"], rows, left=2)
    return f"The problems that most of the signal came from; every one stands in the record.\n\n{found}"


def _rewards_of_groups(groups: Sequence[GroupStatistics]) -> str:
    """With a column of draws where flat groups were drawn again."""
    again = any(one.draws > 1 for one in groups)
    header = ["Slice", "Groups", *(["Draws a group"] if again else []), "Reward", "Spread", "Accepted", "Mixed"]
    rows = [
        [
            _slice_name(one),
            str(one.groups),
            *([number(one.draws)] if again else []),
            number(one.reward, 3),
            number(one.deviation, 3),
            share(one.accepted),
            share(one.mixed),
            share(one.advantage_share),
        ]
        for one in groups
    ]
    return table([*header, "Of the signal"], rows)


def _completions_of_groups(groups: Sequence[GroupStatistics]) -> str:
    header = [
        "Slice",
        "Repeated",
        "Distinct texts",
        "Distinct answers",
        "Length",
        "Finished",
        "Cut off",
        "Other endings",
    ]
    rows = [
        [
            _slice_name(one),
            share(one.duplicates),
            number(one.distinct),
            number(one.distinct_answers),
            number(one.length),
            share(one.finished),
            share(one.truncated),
            share(one.other_endings),
        ]
        for one in groups
    ]
    return table(header, rows)


def _slice_name(one: GroupStatistics) -> str:
    return "all" if one.slice is None else plain(one.slice)
