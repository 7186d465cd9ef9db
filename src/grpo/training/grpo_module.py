"""The GRPO step: sample a round, reward it, compare within groups, update the policy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.maths.group_advantages import centred_rewards, group_advantages
from grpo.records import ScoredRollout
from grpo.rewards import RewardComponent
from grpo.rewards.judging import Judges
from grpo.rollouts.adapter_files import AdapterSettings
from grpo.rollouts.adapters import as_reference, require_fit
from grpo.rollouts.engine_settings import EngineSettings
from grpo.rollouts.flat_groups import DrawnGroup, has_failed, refuse_failed
from grpo.rollouts.policies import LoadedPolicy, load_policy
from grpo.rollouts.reward_transform import RewardTransform
from grpo.rollouts.sampling import SamplingSettings
from grpo.rollouts.score_rollouts import refuse_failures, validate_components
from grpo.rollouts.vllm_sampling import Engine
from grpo.run_identity import policy_digest
from grpo.training.adapter import add_adapter, frozen_weights, renew_reference, with_adapter_merged
from grpo.training.draw_groups import GroupSource
from grpo.training.engines import (
    check_engine,
    hand_over,
    make_engine,
    make_sampler,
    require_rooms,
    require_same_engine,
)
from grpo.training.phase_clock import PhaseClock
from grpo.training.policy_update import UpdateRow, is_counted, update_rows
from grpo.training.prompt_group_datamodule import RoundOfGroups
from grpo.training.rollout_log import RolloutLog, Table
from grpo.training.round_decisions import round_decisions
from grpo.training.round_metrics import rollout_metrics, round_counts
from grpo.training.round_update import RoundUpdate
from grpo.training.settings import AdvantageSettings, LossSettings, OptimizerSettings, RoundSettings, check_together
from grpo.training.strategies import (
    all_processes,
    cut_up,
    cuts_up_weights,
    keep_frozen_weights,
    prepare_strategy,
)
from grpo.training.update_metrics import advantage_metrics
from grpo.training.whole_policy import WholePolicy, copy_weights

POLICY_PREFIX = "policy."
REFERENCE_PREFIX = "reference."


class GRPOModule(L.LightningModule):
    """A policy, its frozen reference, and the GRPO step.

    Args:
        policy: policy folder; also the reference, which stays as it is there unless the loss says otherwise.
        rewards: the reward's components by name.
        sampling: how completions are drawn; the temperature is the loss's too.
        round: what happens in a round.
        advantages: how rewards become advantages.
        loss: the objective.
        optimizer: AdamW and the gradient.
        reward_transform: what becomes of the rewards' weighted sum before it enters the group.
        adapter: what is trained in the place of all weights; null trains them all.
        engine: what draws the completions.
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
        reward_transform: RewardTransform = RewardTransform(),
        adapter: AdapterSettings | None = None,
        engine: EngineSettings = EngineSettings(),
        seed: int = 1,
    ) -> None:
        super().__init__()
        validate_components(rewards)
        reward_transform.check_components(rewards)
        reward_transform.check_length(sampling.max_new_tokens)
        check_together(sampling, round, advantages, loss, reward_transform)
        if adapter is not None:
            adapter.check()
        check_engine(engine, sampling, loss, adapted=adapter is not None)
        self.automatic_optimization = False
        self.policy_folder = policy
        self.components = rewards
        self.judges = Judges(rewards, round.reward_workers)
        self.reward_transform = reward_transform
        self.sampling = sampling
        self.round = round
        self.advantage_settings = advantages
        self.loss_settings = loss
        self.optimizer_settings = optimizer
        self.adapter_settings = adapter
        self.engine_settings = engine
        self.seed = seed
        self.engine: Engine | None = None
        self.longest_wait_minutes = 30.0
        self.rollout_log: RolloutLog | None = None
        self.ledger: Counter[str] = Counter()
        self.reference: PreTrainedModel | None = None
        self.reference_version = 0
        self.register_state_dict_post_hook(_without_what_is_not_kept)  # type: ignore[no-untyped-call]

    def setup(self, stage: str) -> None:
        """Load the policy, and the reference where the KL term needs one."""
        prepare_strategy(self)
        longest_wait = 60 * self.longest_wait_minutes
        self.engine = make_engine(self, self.policy_folder, self.engine_settings, self.sampling, longest_wait)
        require_rooms(self, self.engine, self.sampling)
        if self.adapter_settings is not None:
            require_fit(self.policy_folder, self.adapter_settings)
            self.base_policy = policy_digest(self.policy_folder)
        loaded = load_policy(self.policy_folder)
        if self.adapter_settings is not None:
            add_adapter(loaded.model, self.adapter_settings, self.loss_settings, self.seed)
        self.policy = loaded.model.train()
        gathered = self.engine_settings.gather_weights
        self.whole = WholePolicy(self.policy, cuts_up_weights(self), copied=gathered)
        self.loaded = replace(loaded, model=self.whole.model)
        self.sampler = make_sampler(self, self.loaded, self.engine, self.sampling, gathered)
        self.groups = GroupSource(
            self.sampler, self.components, self.judges, self.reward_transform, self.round, self.seed
        )
        anchored = self.loss_settings.kl_beta > 0
        adapted = self.adapter_settings is not None
        if anchored and not adapted:
            self.reference = load_policy(self.policy_folder).model.eval().requires_grad_(False)
        self.round_update = RoundUpdate(
            self,
            self.policy,
            self.policy if anchored and adapted else self.reference,
            self.round,
            self.loss_settings,
            self.optimizer_settings,
            self.sampling.temperature,
            self.seed,
            partial(as_reference, self.policy) if adapted else nullcontext,
        )

    def configure_model(self) -> None:
        """Cut the models up, where the strategy leaves that to the module."""
        cut_up(self, [self.policy, self.reference])

    def trained_policy(self) -> LoadedPolicy:
        """What is published, with plain weights."""
        assert self.whole.is_whole, "the training ended without putting its weights together"
        if self.adapter_settings is None:
            return replace(self.loaded, model=self.whole.model)
        if policy_digest(self.policy_folder) != self.base_policy:
            raise ValueError(
                f"data.policy is {self.policy_folder}, which has changed since the training began: put it back and run "
                "again; nothing is published, and the run's state is kept"
            )
        return with_adapter_merged(self.policy_folder, self.whole.model, self.adapter_settings)

    def teardown(self, stage: str) -> None:
        """Lightning comes here at the end of a whole run alone; whoever starts one is to close it, however it ends."""
        self.close()

    def close(self) -> None:
        """End the processes that rewards ran in, and an engine that was started for the run."""
        self.judges.close()
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def on_train_start(self) -> None:
        """Take rounds past the resumed one out of the record: they are about to be run again."""
        if self.rollout_log is not None and self.trainer.is_global_zero:
            self.rollout_log.forget_from(self.ledger["rounds"])
        self.trainer.strategy.barrier()
        self._hand_over()

    def on_train_end(self) -> None:
        """Put together what is published: the process that publishes could not do it alone."""
        self.whole.gather(here=self.trainer.is_global_zero)

    def on_train_batch_start(self, batch: RoundOfGroups, batch_idx: int) -> None:
        """Renew the reference, before the step: within it ZeRO's stage 3 holds weights that could not be changed."""
        self._refresh_reference(batch.round)

    def training_step(self, batch: RoundOfGroups, batch_idx: int) -> None:
        """One round, from prompts to updated weights and the record of both."""
        clock = PhaseClock()
        draws = self.groups.draw(batch, self.trainer.global_step, clock)
        with clock.phase("record"):
            self._write_rollouts(batch.round, [draw.own_members for group in draws for draw in group])
            groups, mine = self._everywhere(draws, batch.split)
            all_draws = [draw for group in groups for draw in group]
            refuse_failures([m for draw in all_draws for m in draw.members], self.round.max_failure_share)
        with clock.phase("reward"):
            centred, advantages = self._advantages(groups)
        with clock.phase("update"):
            # Where a group may not stay flat and did, the round ends without an update, its decisions recorded.
            last = [] if has_failed(all_draws) else [group[-1] for group in draws]
            rows = update_rows(last, advantages[mine], self.loss_settings)
            self._set_learning_rate(batch.round)
            outcome = self.round_update.run(rows, draws[0][-1].members, batch.round)
            self._hand_over()
        with clock.phase("record"):
            decided = round_decisions(
                draws, centred[mine], advantages[mine], rows, outcome.old, outcome.reference, self.reference_version
            )
            if self.rollout_log is not None:
                self.rollout_log.write_updates(batch.round, decided)
            refuse_failed(all_draws)
            metrics = outcome.metrics | self._count(groups, advantages, rows)
        self._log_round(batch.round, metrics | clock.metrics())

    def validation_step(self, batch: RoundOfGroups, batch_idx: int) -> None:
        """The same rewards on the validation split, sampled under keys of its own."""
        batch = RoundOfGroups(self.trainer.fit_loop.epoch_loop.batch_idx, batch.groups)
        scored = self.groups.draw_validation(batch, self.trainer.global_step)
        self._write_rollouts(batch.round, scored, table="validation")
        gathered = [group for part in all_processes(scored) for group in part]
        refuse_failures([member for group in gathered for member in group], self.round.max_failure_share)
        self.ledger["validation_rollouts"] += sum(len(group) for group in gathered)
        metrics = rollout_metrics(gathered, self.components)
        kept = {f"validation/{n}": v for n, v in metrics.items() if "groups/" not in n}
        self._log_metrics(kept, batch.round)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        settings = self.optimizer_settings
        return torch.optim.AdamW(
            [weight for weight in self.policy.parameters() if weight.requires_grad],
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

    def _refresh_reference(self, round_index: int) -> None:
        every = self.loss_settings.reference_refresh_rounds
        if every is None or not round_index or round_index % every:
            return
        if self.reference is not None:
            copy_weights(self.whole.model.parameters(), self.reference.parameters())
        else:
            renew_reference(self.whole.model, self.policy)
        self.reference_version = self.trainer.global_step

    def _hand_over(self) -> None:
        """Whatever samples goes on with the weights as they are now."""
        self.whole.follow()
        hand_over(self, self.sampler)

    def _everywhere(self, draws: list[list[DrawnGroup]], split: bool) -> tuple[list[list[DrawnGroup]], slice]:
        """The groups of all processes, and which of them are ``draws``: all of them, where every group is split."""
        parts = [draws] if split else all_processes(draws)
        start = sum(map(len, parts[: 0 if split else self.global_rank]))
        return [group for part in parts for group in part], slice(start, start + len(draws))

    def _advantages(self, groups: Sequence[Sequence[DrawnGroup]]) -> tuple[Tensor, Tensor]:
        """Centred rewards and advantages ``[P, G]`` of the groups of all processes: a batch's mean is over all."""
        last = [group[-1].members for group in groups]
        values = [[math.nan if member.reward is None else member.reward for member in group] for group in last]
        rewards = torch.tensor(values, dtype=torch.float64)
        scored = ~rewards.isnan()
        rewards = rewards.nan_to_num(0.0)
        settings = self.advantage_settings
        centred = centred_rewards(rewards, scored=scored, baseline=settings.baseline)
        return centred, group_advantages(rewards, scored=scored, **settings.options())

    def _write_rollouts(
        self, round_index: int, groups: Sequence[Sequence[ScoredRollout]], table: Table = "rollouts"
    ) -> None:
        if self.rollout_log is not None:
            self.rollout_log.write_rollouts(round_index, groups, table)

    def _count(
        self, groups: Sequence[Sequence[DrawnGroup]], advantages: Tensor, rows: Sequence[UpdateRow]
    ) -> dict[str, float]:
        """Add the round to the ledger; give its metrics.

        Those of rollouts and rewards are from the first draws: what is drawn again is not a fair sample of the policy.
        """
        tokens = sum(all_processes(sum(sum(row.counted_tokens) for row in rows)))
        counts = round_counts(groups, tokens)
        self.ledger.update(counts)
        self.ledger["updates"] = self.trainer.global_step
        last = [group[-1] for group in groups]
        inside = [draw.verdict.in_update for draw in last]
        counted = [[is_counted(member, self.loss_settings) for member in draw.members] for draw in last]
        advantages = advantages.where(torch.tensor(counted), 0.0)
        return (
            rollout_metrics([group[0].members for group in groups], self.components)
            | advantage_metrics([draw.members for draw in last], advantages, inside)
            | {"groups/in_update": sum(inside), "groups/draws": counts["groups"] / len(groups)}
            | {f"tokens/{name}": float(counts[f"tokens_{name}"]) for name in ("sampled", "in_loss")}
        )

    def _log_round(self, round_index: int, metrics: dict[str, float]) -> None:
        """To the loggers, and a few of them to the progress bar."""
        shown = {"reward": "reward/mean", "mixed": "groups/mixed", "kl": "loss/kl"}
        values = {label: metrics[name] for label, name in shown.items() if name in metrics}
        self.log_dict(values, prog_bar=True, logger=False, batch_size=1)
        self._log_metrics(metrics, round_index)

    def _log_metrics(self, metrics: dict[str, float], round_index: int) -> None:
        """To every logger at once, under the round: updates and rounds differ where a round has no mixed group."""
        for logger in self.loggers:
            logger.log_metrics(metrics, step=round_index)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The ledger, what draws, an adapter's form, and whether the reference is no longer what it began as."""
        keep_frozen_weights(self, keep=bool(self.reference_version))
        checkpoint["ledger"] = dict(self.ledger)
        checkpoint["reference_version"] = self.reference_version
        checkpoint["engine"] = None if self.engine is None else self.engine.name
        if self.adapter_settings is not None:
            checkpoint["adapter"] = self.adapter_settings.form() | {"base_policy_sha256": self.base_policy}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Give back what is not kept, as it was loaded: one device and DDP check all other names strictly."""
        require_same_engine(self.engine, checkpoint["engine"])
        self.ledger = Counter(checkpoint["ledger"])
        self.reference_version = checkpoint["reference_version"]
        if "state_dict" in checkpoint:  # DeepSpeed keeps weights in its own files
            checkpoint["state_dict"].update(self.not_kept())

    def not_kept(self) -> dict[str, Tensor]:
        """Weights that no state holds, by their names: they are in the policy folder, or the adapter begun with."""
        found: dict[str, Tensor] = {}
        if self.reference is not None and not self.reference_version:
            found |= self.reference.state_dict(prefix=REFERENCE_PREFIX)
        if self.adapter_settings is not None:
            frozen = frozen_weights(self.policy, renewed=bool(self.reference_version))
            found |= {POLICY_PREFIX + name: weight for name, weight in frozen.items()}
        return found


def _without_what_is_not_kept(module: GRPOModule, state: dict[str, Any], prefix: str, _: object) -> None:
    """Whoever saves the weights: Lightning into one file, or DeepSpeed what its engine holds, tied names and all."""
    for name in module.not_kept():
        state.pop(prefix + name, None)
