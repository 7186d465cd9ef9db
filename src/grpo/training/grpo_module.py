"""The GRPO step: sample a round, reward it, compare within groups, update the policy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.maths.group_advantages import centred_rewards, group_advantages
from grpo.maths.grpo_loss import LossOutput, grpo_loss, mean_metrics
from grpo.records import PromptGroup, Purpose, Rollout, RolloutKey, ScoredRollout
from grpo.rewards import RewardComponent
from grpo.rollouts.flat_groups import GroupVerdict, judge_group
from grpo.rollouts.policies import completion_logprobs, load_policy
from grpo.rollouts.sampling import Sampler, SamplingSettings
from grpo.rollouts.score_rollouts import refuse_failures, score_rollouts, validate_components
from grpo.training.policy_update import MicroBatch, plan_update
from grpo.training.prompt_group_datamodule import RoundOfGroups
from grpo.training.rollout_log import Decision, RolloutLog
from grpo.training.round_metrics import PhaseClock, rollout_metrics, round_counts
from grpo.training.settings import AdvantageSettings, LossSettings, OptimizerSettings, RoundSettings
from grpo.training.strategies import all_processes, require_whole_weights, step_optimizer, summed_gradients


class GRPOModule(L.LightningModule):
    """A policy, its frozen reference, and the GRPO step.

    Args:
        policy: policy folder; also the reference, which stays as it is there.
        rewards: the reward's components by name.
        sampling: how completions are drawn; the temperature is the loss's too.
        round: what happens in a round.
        advantages: how rewards become advantages.
        loss: the objective.
        optimizer: AdamW and the gradient.
        seed: of every random choice.
    """

    def __init__(
        self,
        policy: Path,
        rewards: dict[str, RewardComponent],
        sampling: SamplingSettings = SamplingSettings(),
        round: RoundSettings = RoundSettings(),
        advantages: AdvantageSettings = AdvantageSettings(),
        loss: LossSettings = LossSettings(),
        optimizer: OptimizerSettings = OptimizerSettings(),
        seed: int = 1,
    ) -> None:
        super().__init__()
        if sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature is 0: a greedy group is G copies of one completion, with nothing to compare; "
                "train at a positive temperature (1 is usual)"
            )
        validate_components(rewards)
        _require_room_for_a_group(sampling, round, optimizer)
        if round.flat_groups == "skip" and advantages.baseline in ("batch_mean", "none"):
            raise ValueError(
                f"round.flat_groups is skip with advantages.baseline {advantages.baseline}: without a baseline "
                "of its own a flat group has a signal, so set round.flat_groups to keep"
            )
        self.automatic_optimization = False
        self.policy_folder = policy
        self.components = rewards
        self.sampling = sampling
        self.round = round
        self.advantage_settings = advantages
        self.loss_settings = loss
        self.optimizer_settings = optimizer
        self.seed = seed
        self.rollout_log: RolloutLog | None = None
        self.ledger: Counter[str] = Counter()

    def setup(self, stage: str) -> None:
        """Load the policy, and the reference where the KL term needs one."""
        require_whole_weights(self)
        self.loaded = load_policy(self.policy_folder)
        self.policy = self.loaded.model.train()
        self.sampler = Sampler(self.policy, self.loaded.tokenizer, self.loaded.end_token_ids, self.sampling)
        self.reference = None
        if self.loss_settings.kl_beta > 0:
            self.reference = load_policy(self.policy_folder).model.eval().requires_grad_(False)

    def on_train_start(self) -> None:
        """Take rounds past the resumed one out of the record: they are about to be run again."""
        if self.rollout_log is not None and self.trainer.is_global_zero:
            self.rollout_log.forget_from(self.ledger["rounds"])
        self.trainer.strategy.barrier()

    def training_step(self, batch: RoundOfGroups, batch_idx: int) -> None:
        """One round, from prompts to updated weights and the record of both."""
        clock = PhaseClock()
        with clock.phase("rollout"):
            rollouts = self._sample(batch, "train", self.round.group_size)
        with clock.phase("reward"):
            scored = [score_rollouts(group, self.components, max_failure_share=1.0) for group in rollouts]
            verdicts = [judge_group(group, self.round.flat_groups) for group in scored]
            centred, advantages = self._advantages(scored)
        with clock.phase("record"):
            self._write_rollouts(batch.round, scored)
            everywhere = [member for part in all_processes(scored) for group in part for member in group]
            refuse_failures(everywhere, self.round.max_failure_share)
        with clock.phase("update"):
            chosen = [i for i, verdict in enumerate(verdicts) if verdict.in_update]
            self._set_learning_rate(batch.round)
            reference, update_metrics = self._update([scored[i] for i in chosen], advantages[chosen], scored[0])
        with clock.phase("record"):
            self._write_updates(batch.round, scored, verdicts, centred, advantages, reference)
        self._report(batch.round, scored, verdicts, update_metrics | clock.metrics())

    def validation_step(self, batch: RoundOfGroups, batch_idx: int) -> None:
        """The same rewards on the validation split, sampled under keys of its own."""
        batch = RoundOfGroups(self.trainer.fit_loop.epoch_loop.batch_idx, batch.groups)
        rollouts = self._sample(batch, "validation", self.round.validation_samples)
        scored = [score_rollouts(group, self.components, max_failure_share=1.0) for group in rollouts]
        if self.rollout_log is not None:
            self.rollout_log.write_rollouts(batch.round, scored, self.trainer.global_step, table="validation")
        gathered = [group for part in all_processes(scored) for group in part]
        refuse_failures([member for group in gathered for member in group], self.round.max_failure_share)
        self.ledger["validation_rollouts"] += sum(len(group) for group in gathered)
        metrics = {f"validation/{n}": v for n, v in rollout_metrics(gathered).items() if not n.startswith("groups")}
        self._log_metrics(metrics, batch.round)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        settings = self.optimizer_settings
        return torch.optim.AdamW(
            self.policy.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
        )

    def _set_learning_rate(self, round_index: int) -> None:
        """A function of the round alone, so there is no schedule whose state could be resumed wrongly."""
        rate = self.optimizer_settings.learning_rate_of(round_index, int(self.trainer.num_training_batches))
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def _sample(self, batch: RoundOfGroups, purpose: Purpose, group_size: int) -> list[list[Rollout]]:
        keys = [self._key(group, purpose, batch.round) for group in batch.groups]
        return self.sampler.sample(batch.groups, keys, group_size)

    def _key(self, group: PromptGroup, purpose: Purpose, round_index: int) -> RolloutKey:
        return RolloutKey(self.seed, purpose, round_index, group.problem.id, group.template_id, group.occurrence)

    def _advantages(self, scored: Sequence[Sequence[ScoredRollout]]) -> tuple[Tensor, Tensor]:
        """Centred rewards and advantages ``[P, G]`` of this process's groups.

        All processes' rewards are put together first: a batch's mean or std is over the whole round.
        """
        mine = [[math.nan if member.reward is None else member.reward for member in group] for group in scored]
        parts = all_processes(mine)
        rewards = torch.tensor([group for part in parts for group in part], dtype=torch.float64)
        is_scored = ~rewards.isnan()
        rewards = rewards.nan_to_num(0.0)
        settings = self.advantage_settings
        centred = centred_rewards(rewards, scored=is_scored, baseline=settings.baseline)
        advantages = group_advantages(
            rewards,
            scored=is_scored,
            baseline=settings.baseline,
            scale=settings.scale,
            std_correction=settings.std_correction,
            epsilon=settings.epsilon,
        )
        start = sum(len(part) for part in parts[: self.global_rank])
        return centred[start : start + len(mine)], advantages[start : start + len(mine)]

    def _update(
        self, groups: list[list[ScoredRollout]], advantages: Tensor, spare: list[ScoredRollout]
    ) -> tuple[dict[str, tuple[float, ...]], dict[str, float]]:
        """Move the policy; give the reference's log-probabilities by rollout, and metrics."""
        rows = self.optimizer_settings.micro_batch_rows
        plan = [micro.to(self.device) for micro in plan_update(groups, advantages, spare, self.loss_settings, rows)]
        if not plan:
            return {}, {}
        references = [self._reference_logprobs(micro) for micro in plan]
        outputs: list[LossOutput] = []
        for _ in range(self.round.updates):
            with summed_gradients(self):
                outputs += [self._backward(*pair) for pair in zip(plan, references, strict=True)]
            norm = step_optimizer(self, self.optimizer_settings.max_gradient_norm)
        everywhere = all_processes([output.metrics for output in outputs])
        gathered = [LossOutput(torch.zeros(()), metrics) for part in everywhere for metrics in part]
        metrics = {f"loss/{name}": value for name, value in mean_metrics(gathered).items()}
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        metrics |= {"loss/gradient_norm": norm, "loss/learning_rate": rate}
        return _by_rollout(plan, references), metrics

    def _logprobs(self, model: PreTrainedModel, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        batch = micro.batch
        return completion_logprobs(
            model, batch.prompts, batch.prompt_mask, batch.completions, batch.mask, self.sampling.temperature
        )

    @torch.no_grad()
    def _reference_logprobs(self, micro: MicroBatch) -> Tensor | None:
        return None if self.reference is None else self._logprobs(self.reference, micro)[0]

    def _backward(self, micro: MicroBatch, reference: Tensor | None) -> LossOutput:
        """Add one micro-batch's part to the gradient.

        With one update a round the weights are still those that sampled, so the old log-probabilities
        are the policy's own, and the ratio is exactly 1; the sampler's agree up to rounding, which
        ``loss/mismatch`` measures.
        """
        settings = self.loss_settings
        logprobs, entropy = self._logprobs(self.policy, micro)
        sampled = micro.batch.old_logprobs
        output = grpo_loss(
            logprobs,
            logprobs.detach() if self.round.updates == 1 else sampled,
            micro.advantages,
            micro.counted,
            reference_logprobs=reference,
            token_weights=micro.weights,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
            ratio=settings.ratio,
            kl_beta=settings.kl_beta,
            kl_estimator=settings.kl_estimator,
            entropy=entropy,
            sampling_logprobs=sampled,
        )
        self.manual_backward(output.loss)
        return output

    def _write_rollouts(self, round_index: int, scored: list[list[ScoredRollout]]) -> None:
        if self.rollout_log is not None:
            self.rollout_log.write_rollouts(round_index, scored, policy_version=self.trainer.global_step)

    def _write_updates(
        self,
        round_index: int,
        scored: list[list[ScoredRollout]],
        verdicts: list[GroupVerdict],
        centred: Tensor,
        advantages: Tensor,
        reference: dict[str, tuple[float, ...]],
    ) -> None:
        if self.rollout_log is None:
            return
        decisions = []
        for i, (group, verdict) in enumerate(zip(scored, verdicts, strict=True)):
            for j, member in enumerate(group):
                name = member.rollout.key.rollout_id
                in_loss = verdict.in_update and member.scored
                tokens = len(member.rollout.tokens) if in_loss else 0
                values = float(centred[i, j]), float(advantages[i, j])
                anchor = reference.get(name) if in_loss else None
                decisions.append(Decision(name, verdict, *values, anchor, tokens))
        self.rollout_log.write_updates(round_index, decisions)

    def _report(
        self,
        round_index: int,
        scored: list[list[ScoredRollout]],
        verdicts: list[GroupVerdict],
        metrics: dict[str, float],
    ) -> None:
        groups = [group for part in all_processes(scored) for group in part]
        decided = [verdict for part in all_processes(verdicts) for verdict in part]
        self.ledger.update(round_counts(groups, decided))
        self.ledger["updates"] = self.trainer.global_step
        metrics = rollout_metrics(groups) | {"groups/in_update": sum(v.in_update for v in decided)} | metrics
        shown = {"reward": "reward/mean", "mixed": "groups/mixed", "kl": "loss/kl"}
        self.log_dict(
            {label: metrics[name] for label, name in shown.items() if name in metrics},
            prog_bar=True,
            logger=False,
            batch_size=1,
        )
        self._log_metrics(metrics, round_index)

    def _log_metrics(self, metrics: dict[str, float], round_index: int) -> None:
        """To every logger at once, under the round: updates and rounds differ where a round has no mixed group."""
        for logger in self.loggers:
            logger.log_metrics(metrics, step=round_index)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave the reference out: it never changes, and its folder is named in the config."""
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {n: v for n, v in weights.items() if not n.startswith("reference.")}
        checkpoint["ledger"] = dict(self.ledger)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Give the reference back as it was loaded, so that every other name is still checked strictly."""
        self.ledger = Counter(checkpoint["ledger"])
        if "state_dict" in checkpoint:  # DeepSpeed keeps the weights in files of its own
            own = self.state_dict()
            checkpoint["state_dict"].update({n: v for n, v in own.items() if n.startswith("reference.")})


def _require_room_for_a_group(sampling: SamplingSettings, round: RoundSettings, optimizer: OptimizerSettings) -> None:
    """A group is sampled and trained on side by side, since its members share the pass over their prompt."""
    for name, rows in (
        ("sampling.max_rows", sampling.max_rows),
        ("optimizer.micro_batch_rows", optimizer.micro_batch_rows),
    ):
        if rows < round.group_size:
            raise ValueError(
                f"{name} is {rows}, less than round.group_size = {round.group_size}: a group stays together, "
                f"so raise it to {round.group_size} or lower the group size"
            )


def _by_rollout(plan: list[MicroBatch], values: list[Tensor | None]) -> dict[str, tuple[float, ...]]:
    """Rows of ``[N, T]`` values by rollout id, without their padding."""
    rows: dict[str, tuple[float, ...]] = {}
    for micro, value in zip(plan, values, strict=True):
        if value is not None:
            for name, row, mask in zip(micro.rollout_ids, value, micro.batch.mask, strict=True):
                rows[name] = tuple(row[mask].tolist())
    return rows
