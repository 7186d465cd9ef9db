"""What becomes of groups whose rewards are all equal: their advantages are zero whatever they earned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from grpo.records import ScoredRollout

FlatGroups = Literal["keep", "skip", "resample"]
AtLimit = Literal["keep", "skip", "fail"]
Verdict = Literal["kept", "kept_flat", "skipped_flat", "resampled", "failed_flat", "unscored"]


class OnlyFlatGroups(RuntimeError):
    """A group stayed flat through all the draws it may have, and the run is declared to stop there."""


@dataclass(frozen=True)
class GroupVerdict:
    """What becomes of a group's draw, and why."""

    verdict: Verdict
    reason: str = ""

    @property
    def in_update(self) -> bool:
        return self.verdict in ("kept", "kept_flat")

    @property
    def flat(self) -> bool:
        return self.verdict in ("kept_flat", "skipped_flat", "resampled", "failed_flat")


def is_flat(group: Sequence[ScoredRollout]) -> bool:
    """True where all scored members earned exactly the same reward."""
    return len({member.reward for member in group if member.scored}) == 1


def judge_group(group: Sequence[ScoredRollout], flat_groups: Literal["keep", "skip", "fail"]) -> GroupVerdict:
    """Decide on a whole group at once: a rule by row would break the comparison it is made of.

    Args:
        group: the members of one prompt group.
        flat_groups: ``keep`` leaves flat groups in the denominators, with advantage 0 (the original
            objective); ``skip`` takes them out of the update; ``fail`` marks them, for the run to stop.
    """
    scored = [member for member in group if member.scored]
    if len(scored) < 2:
        return GroupVerdict("unscored", f"{len(scored)} of {len(group)} members were scored: nothing to compare")
    if not is_flat(group):
        return GroupVerdict("kept")
    reason = f"all {len(scored)} scored members earned {scored[0].reward}"
    verdicts: dict[str, Verdict] = {"keep": "kept_flat", "skip": "skipped_flat", "fail": "failed_flat"}
    return GroupVerdict(verdicts[flat_groups], reason)


def judge_draw(
    group: Sequence[ScoredRollout], flat_groups: FlatGroups, draw: int, max_draws: int, at_limit: AtLimit
) -> GroupVerdict:
    """The verdict on the ``draw``-th draw of a group, counted from 0.

    Under ``resample`` a flat draw is set aside whole and a fresh one takes its place, up to ``max_draws`` draws in
    all; ``at_limit`` says what becomes of the last. Nothing but the rewards of this draw is looked at.
    """
    if flat_groups != "resample":
        return judge_group(group, flat_groups)
    verdict = judge_group(group, at_limit)
    place = f"draw {draw + 1} of at most {max_draws}"
    if not verdict.flat:
        return verdict
    if draw + 1 < max_draws:
        return GroupVerdict("resampled", f"{verdict.reason}; {place}")
    return GroupVerdict(verdict.verdict, f"{verdict.reason}; {place}, the last")


@dataclass(frozen=True)
class DrawnGroup:
    """One draw of a group: its members, scored, and what becomes of them.

    Args:
        members: of the whole group, whichever processes drew them.
        verdict: on all of them together.
        here: a bool a member, whether this process drew it, and trains on it and records it; None where it drew all.
    """

    members: tuple[ScoredRollout, ...]
    verdict: GroupVerdict
    here: tuple[bool, ...] | None = None

    @property
    def own(self) -> list[int]:
        """Places of the members that this process drew."""
        return [i for i in range(len(self.members)) if self.here is None or self.here[i]]

    @property
    def own_members(self) -> list[ScoredRollout]:
        return [self.members[i] for i in self.own]


def has_failed(draws: Sequence[DrawnGroup]) -> bool:
    """Whether a group stayed flat that may not."""
    return any(draw.verdict.verdict == "failed_flat" for draw in draws)


def refuse_failed(draws: Sequence[DrawnGroup]) -> None:
    """Stop where a group may not stay flat and did.

    Raises:
        OnlyFlatGroups: naming the first such group.
    """
    failed = [draw for draw in draws if draw.verdict.verdict == "failed_flat"]
    if failed:
        problem = failed[0].members[0].rollout.group.problem.id
        raise OnlyFlatGroups(
            f"{len(failed)} groups stayed flat, first that of problem {problem} ({failed[0].verdict.reason}): "
            "round.at_limit is fail. Raise round.max_draws, take such problems out, or set at_limit to keep or skip"
        )
