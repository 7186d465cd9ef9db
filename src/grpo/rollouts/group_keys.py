"""What the members of a group have in common, without which their rewards cannot be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from grpo.records import Rollout, RolloutKey

GroupUnit = Literal["problem", "problem_over_variants"]

# A group over variants compares how a problem is asked, and nothing else.
_MAY_VARY: dict[GroupUnit, frozenset[str]] = {
    "problem": frozenset(),
    "problem_over_variants": frozenset({"template_id"}),
}


class MixedGroup(ValueError):
    """Rollouts that stand in one group are not of one; the message names the field and the values."""


@dataclass(frozen=True)
class GroupKey:
    """The unit of comparison: one problem, asked and sampled in one way, in one draw.

    ``context_sha256`` is of the retrieved context; ``tools`` and ``sampling_settings`` are JSON.
    """

    seed: int
    purpose: str
    round: int
    problem_id: str
    occurrence: int
    draw: int
    template_id: str
    context_sha256: str
    tools: str
    sampling_settings: str
    policy_version: int
    engine: str

    def id(self, unit: GroupUnit) -> str:
        """The name under which the record knows the group."""
        fields = {name: value for name, value in asdict(self).items() if name not in _MAY_VARY[unit]}
        return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()


def group_key(rollout: Rollout) -> GroupKey:
    """The key of the group that a rollout belongs to."""
    key, policy = rollout.key, rollout.sampling_policy
    return GroupKey(
        seed=key.seed,
        purpose=key.purpose,
        round=key.round,
        problem_id=rollout.group.problem.id,
        occurrence=key.occurrence,
        draw=key.draw,
        template_id=rollout.group.template_id,
        context_sha256=hashlib.sha256(rollout.group.problem.context.encode()).hexdigest(),
        tools=policy.tools,
        sampling_settings=policy.settings,
        policy_version=policy.weights_version,
        engine=policy.engine,
    )


def member_keys(
    keys: Sequence[RolloutKey], group_size: int, members: Sequence[Sequence[int]] | None = None
) -> list[list[RolloutKey]]:
    """The keys of the completions to draw of each group.

    Args:
        keys: one a group.
        group_size: completions of a whole group.
        members: numbers of those to draw, of each group; None for all.
    """
    numbers = [range(group_size)] * len(keys) if members is None else members
    return [[key.of_member(member) for member in own] for key, own in zip(keys, numbers, strict=True)]


def require_one_group(members: Sequence[Rollout], unit: GroupUnit = "problem") -> None:
    """Refuse members that differ in what they must have in common.

    Raises:
        MixedGroup: naming the first field that differs, or a member that stands there twice.
    """
    first, *others = [asdict(group_key(member)) for member in members]
    for name, value in first.items():
        odd = next((other[name] for other in others if other[name] != value), value)
        if name not in _MAY_VARY[unit] and odd != value:
            raise MixedGroup(
                f"a group of problem {first['problem_id']!r} mixes {name} {value!r} and {odd!r}: its rewards cannot be "
                "compared; members of one group share everything that decides how they were asked and drawn"
            )
    ids = [member.key.rollout_id for member in members]
    if len(set(ids)) < len(ids):
        raise MixedGroup(
            f"a group of problem {first['problem_id']!r} holds one rollout twice: give each member its key"
        )
