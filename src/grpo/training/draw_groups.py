"""A round's groups: sampled from the live policy, scored, and drawn again where a flat group may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from grpo.records import PromptGroup, Purpose, Rollout, RolloutKey, ScoredRollout
from grpo.rewards import RewardComponent
from grpo.rewards.judging import Judges
from grpo.rollouts.flat_groups import DrawnGroup, judge_draw
from grpo.rollouts.group_keys import require_one_group
from grpo.rollouts.reward_transform import RewardTransform
from grpo.rollouts.sampling import Sampler
from grpo.rollouts.score_rollouts import score_rollouts
from grpo.rollouts.vllm_sampling import VLLMSampler
from grpo.training.in_step import SamplerInStep
from grpo.training.phase_clock import PhaseClock
from grpo.training.prompt_group_datamodule import RoundOfGroups
from grpo.training.settings import RoundSettings
from grpo.training.strategies import all_processes


@dataclass(frozen=True)
class GroupSource:
    """Draws groups and scores them.

    Args:
        sampler: of the live policy.
        components: the reward's.
        judges: run them.
        transform: from the components' weighted sum to the reward.
        round: group size and unit, and what becomes of flat groups.
        seed: of every rollout's key.
    """

    sampler: Sampler | VLLMSampler
    components: Mapping[str, RewardComponent]
    judges: Judges
    transform: RewardTransform
    round: RoundSettings
    seed: int

    def draw(self, batch: RoundOfGroups, weights_version: int, clock: PhaseClock) -> list[list[DrawnGroup]]:
        """The draws of each group, the last of which is the one that counts.

        Only under ``resample`` can there be more than one. Draws follow from whole groups alone: where those are this
        process's, processes need not wait for each other here, and where they are split, all draw again alike. Where
        passes are made in step, a process may have no groups left to draw while another has.
        """
        settings = self.round
        draws: list[list[DrawnGroup]] = [[] for _ in range(len(batch.groups) // batch.variants)]
        pending = list(range(len(draws)))
        for draw in range(settings.max_draws):
            again = batch.only(pending)
            with clock.phase("rollout"):
                drawn = self._sample(again, "train", settings.group_size, weights_version, draw)
            with clock.phase("reward"):
                here = {rollout.key for part in drawn for rollout in part}
                for i, members in zip(pending, self._groups(again, self._score(drawn)), strict=True):
                    verdict = judge_draw(members, settings.flat_groups, draw, settings.max_draws, settings.at_limit)
                    mine = tuple(member.rollout.key in here for member in members)
                    draws[i].append(DrawnGroup(tuple(members), verdict, mine))
            pending = [i for i in pending if draws[i][-1].verdict.verdict == "resampled"]
            if draw + 1 == settings.max_draws:
                break
            with clock.phase("rollout"):
                if not self._any_drawn_again(bool(pending)):
                    break
        return draws

    def _any_drawn_again(self, here: bool) -> bool:
        """Whether any group is: one of this process, or, where all have to sample together, of any other."""
        together = isinstance(self.sampler, SamplerInStep) and self.round.flat_groups == "resample"
        return any(all_processes(here)) if together else here

    def draw_validation(self, batch: RoundOfGroups, weights_version: int) -> list[list[ScoredRollout]]:
        """Scored groups under keys of their own; nothing is compared, so nothing is drawn again."""
        drawn = self._sample(batch, "validation", self.round.validation_samples, weights_version)
        return self._groups(batch, self._score(drawn))

    def _sample(
        self, batch: RoundOfGroups, purpose: Purpose, group_size: int, weights_version: int, draw: int = 0
    ) -> list[list[Rollout]]:
        """What this process draws of each prompt; the variants of a prompt share a group's completions evenly."""
        size = group_size // batch.variants
        members = [range(size)] * len(batch.groups) if batch.members is None else batch.members
        asked = [i for i, own in enumerate(members) if own]
        prompts = [batch.groups[i] for i in asked]
        keys = [self._key(prompt, purpose, batch.round, draw) for prompt in prompts]
        parts = iter(self.sampler.sample(prompts, keys, size, weights_version, [members[i] for i in asked]))
        return [next(parts) if own else [] for own in members]

    def _groups(self, batch: RoundOfGroups, parts: Sequence[Sequence[ScoredRollout]]) -> list[list[ScoredRollout]]:
        """Whole groups, whose members are of one, from what this process has of each prompt."""
        if batch.split:
            parts = [sorted(chain(*own), key=_member) for own in zip(*all_processes(parts), strict=True)]
        size = batch.variants
        groups = [list(chain(*parts[i : i + size])) for i in range(0, len(parts), size)]
        for group in groups:
            require_one_group([member.rollout for member in group], self.round.group_unit)
        return groups

    def _key(self, group: PromptGroup, purpose: Purpose, round_index: int, draw: int) -> RolloutKey:
        return RolloutKey(
            self.seed, purpose, round_index, group.problem.id, group.template_id, group.occurrence, draw=draw
        )

    def _score(self, groups: Sequence[Sequence[Rollout]]) -> list[list[ScoredRollout]]:
        """Failures are let through here, to be recorded before they are refused."""
        scored = score_rollouts(
            [rollout for group in groups for rollout in group],
            self.components,
            transform=self.transform,
            max_failure_share=1.0,
            judges=self.judges,
        )
        rest = iter(scored)
        return [[next(rest) for _ in group] for group in groups]


def _member(scored: ScoredRollout) -> int:
    return scored.rollout.key.member
