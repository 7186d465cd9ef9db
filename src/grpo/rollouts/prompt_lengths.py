"""Whether prompts and their completions fit: a prompt is never cut, and no model goes past its last place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo.records import PromptGroup
from grpo.rollouts.policy_files import context_length


def refuse_long_prompts(groups: Sequence[PromptGroup], limit: int, key: str) -> None:
    """Refuse prompts of more than ``limit`` tokens.

    Args:
        groups: the prompts.
        limit: tokens.
        key: the setting that says so.

    Raises:
        ValueError: naming the setting, how many are longer and the longest of them.
    """
    too_long = [group for group in groups if len(group.prompt_tokens) > limit]
    if too_long:
        longest = max(too_long, key=_length)
        raise ValueError(
            f"{len(too_long)} prompts are longer than {key} = {limit}, the longest ({longest.problem.id}) has "
            f"{_length(longest)} tokens: raise the limit or take the problems out; a prompt is never cut"
        )


def require_places(groups: Sequence[PromptGroup], max_new_tokens: int, policy: Path, key: str) -> None:
    """Refuse completions that could run past the model's last place, where positions were never trained.

    Args:
        groups: the prompts.
        max_new_tokens: of a completion.
        policy: the policy's folder; its config.json says how many places there are.
        key: the setting of ``max_new_tokens``.

    Raises:
        ValueError: naming the setting, the longest prompt and what would fit.
    """
    places = context_length(policy)
    if places is None or not groups:
        return
    longest = max(groups, key=_length)
    room = places - _length(longest)
    if max_new_tokens > room:
        remedy = f"set it to at most {room}" if room > 0 else "take such problems out"
        raise ValueError(
            f"{key} is {max_new_tokens}, and the longest prompt ({longest.problem.id}) has {_length(longest)} tokens, "
            f"but the policy has places for {places} in all (in its config.json max_position_embeddings, or where "
            f"rotary positions are scaled by a batch's length original_max_position_embeddings): {remedy}, "
            "or choose a policy of a longer context"
        )


def _length(group: PromptGroup) -> int:
    return len(group.prompt_tokens)
