"""What becomes of groups whose rewards are all equal: their advantages are zero whatever they earned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from grpo.records import ScoredRollout

FlatGroups = Literal["keep", "skip"]
Verdict = Literal["kept", "kept_flat", "skipped_flat", "unscored"]


@dataclass(frozen=True)
class GroupVerdict:
    """Whether a group enters the update, and why."""

    verdict: Verdict
    reason: str = ""

    @property
    def in_update(self) -> bool:
        return self.verdict in ("kept", "kept_flat")


def is_flat(group: Sequence[ScoredRollout]) -> bool:
    """True where all scored members earned exactly the same reward."""
    return len({member.reward for member in group if member.scored}) == 1


def judge_group(group: Sequence[ScoredRollout], flat_groups: FlatGroups) -> GroupVerdict:
    """Decide on a whole group at once: a rule by row would break the comparison it is made of.

    Args:
        group: the members of one prompt group.
        flat_groups: ``keep`` leaves flat groups in the denominators, with advantage 0 (the original
            objective); ``skip`` takes them out of the update.
    """
    scored = [member for member in group if member.scored]
    if len(scored) < 2:
        return GroupVerdict("unscored", f"{len(scored)} of {len(group)} members were scored: nothing to compare")
    if not is_flat(group):
        return GroupVerdict("kept")
    reason = f"all {len(scored)} scored members earned {scored[0].reward}"
    return GroupVerdict("kept_flat" if flat_groups == "keep" else "skipped_flat", reason)
