"""A round's groups: sampled from the live policy, scored, and drawn again where a flat group may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo.records import PromptGroup, Purpose, Rollout, RolloutKey, ScoredRollout
from grpo.rewards import RewardComponent
from grpo.rewards.judging import Judges
from grpo.rollouts.flat_groups import DrawnGroup, judge_draw
from grpo.rollouts.group_keys import require_one_group
from grpo.rollouts.reward_transform import RewardTransform
from grpo.rollouts.sampling import Sampler
from grpo.rollouts.score_rollouts import score_rollouts
from grpo.training.phase_clock import PhaseClock
from grpo.training.prompt_group_datamodule import RoundOfGroups
from grpo.training.settings import RoundSettings


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

    sampler: Sampler
    components: Mapping[str, RewardComponent]
    judges: Judges
    transform: RewardTransform
    round: RoundSettings
    seed: int

    def draw(self, batch: RoundOfGroups, weights_version: int, clock: PhaseClock) -> list[list[DrawnGroup]]:
        """The draws of each group, the last of which is the one that counts.

        Only under ``resample`` can there be more than one. Draws follow from this process's groups alone, so
        processes need not wait for each other here.
        """
        settings = self.round
        draws: list[list[DrawnGroup]] = [[] for _ in range(len(batch.groups) // batch.variants)]
        pending = list(range(len(draws)))
        for draw in range(settings.max_draws):
            again = RoundOfGroups(batch.round, [g for i in pending for g in batch.of_group(i)], batch.variants)
            with clock.phase("rollout"):
                rollouts = self._sample(again, "train", settings.group_size, weights_version, draw)
            with clock.phase("reward"):
                for i, members in zip(pending, self._score(rollouts), strict=True):
                    verdict = judge_draw(members, settings.flat_groups, draw, settings.max_draws, settings.at_limit)
                    draws[i].append(DrawnGroup(tuple(members), verdict))
            pending = [i for i in pending if draws[i][-1].verdict.verdict == "resampled"]
            if not pending:
                break
        return draws

    def draw_validation(self, batch: RoundOfGroups, weights_version: int) -> list[list[ScoredRollout]]:
        """Scored groups under keys of their own; nothing is compared, so nothing is drawn again."""
        return self._score(self._sample(batch, "validation", self.round.validation_samples, weights_version))

    def _sample(
        self, batch: RoundOfGroups, purpose: Purpose, group_size: int, weights_version: int, draw: int = 0
    ) -> list[list[Rollout]]:
        """The rollouts of each group; the variants of a prompt share a group's evenly."""
        keys = [self._key(prompt, purpose, batch.round, draw) for prompt in batch.groups]
        size = batch.variants
        parts = self.sampler.sample(batch.groups, keys, group_size // size, weights_version)
        groups = [[r for part in parts[i : i + size] for r in part] for i in range(0, len(parts), size)]
        for group in groups:
            require_one_group(group, self.round.group_unit)
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
