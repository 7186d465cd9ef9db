"""A round's optimiser steps: old and reference log-probabilities, the loss of each micro-batch, the gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import lightning as L
import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.maths.grpo_loss import grpo_loss
from grpo.records import ScoredRollout
from grpo.rollouts.completion_logprobs import completion_logprobs
from grpo.training.policy_update import MicroBatch, UpdateRow, plan_update, split_minibatches
from grpo.training.settings import LossSettings, OptimizerSettings, RoundSettings
from grpo.training.strategies import all_processes, exchanged, step_optimizer, summed_gradients
from grpo.training.update_metrics import RowMetrics, loss_metrics

Logprobs = dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class UpdateOutcome:
    """What a round's update leaves for the record. Log-probabilities are by rollout id, a number a token.

    Args:
        old: under the ratio, where the training computed them itself.
        reference: of the KL anchor, where there is one.
        metrics: ``loss/...``, of all processes, overall and by slice.
    """

    old: Logprobs = field(default_factory=dict)
    reference: Logprobs = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class RoundUpdate:
    """Moves the policy on one round's rows.

    Args:
        module: whose optimiser steps; its strategy spreads the gradient over the processes.
        policy: the model that is moved.
        reference: the KL anchor, None without one.
        temperature: the tokens were drawn at.
        seed: of the split into minibatches.
        as_reference: within what it gives ``reference`` is the reference: where it is the policy otherwise.
    """

    module: L.LightningModule
    policy: PreTrainedModel
    reference: PreTrainedModel | None
    round: RoundSettings
    loss: LossSettings
    optimizer: OptimizerSettings
    temperature: float
    seed: int
    as_reference: Callable[[], AbstractContextManager[None]] = nullcontext

    def __post_init__(self) -> None:
        if self.optimizer.gradient_checkpointing:
            # Where no gradient is recorded, as in sampling, checkpointed layers keep their cache.
            self.policy.activation_checkpointing_enable({"use_reentrant": False})

    def run(self, rows: Sequence[UpdateRow], spare: Sequence[ScoredRollout], round_index: int) -> UpdateOutcome:
        """All optimiser steps of a round: epochs times minibatches.

        Args:
            rows: this process's part of the update.
            spare: any rollouts of this process, run with weight 0 where another process has more micro-batches.
            round_index: counted from 0.
        """
        everything = self._plan(rows, spare)
        if not everything:
            return UpdateOutcome()
        with self.as_reference():
            reference = self._logprobs_of(self.reference, everything) if self.reference is not None else {}
        recomputed = self.loss.old_logprobs == "recomputed"
        old = self._logprobs_of(self.policy, everything) if recomputed and self.round.minibatches > 1 else {}
        row_metrics: list[RowMetrics] = []
        norms: list[float] = []
        for epoch in range(self.round.epochs):
            for minibatch in split_minibatches(rows, self.round, f"{self.seed}/{round_index}/{epoch}"):
                plan = everything if self.round.minibatches == 1 else self._plan(minibatch, spare)
                if not plan:
                    continue
                with summed_gradients(self.module):
                    for micro in plan:
                        with exchanged(self.module, now=micro is plan[-1]):
                            row_metrics.append(self._backward(micro.to(self.module.device), old, reference))
                norms.append(step_optimizer(self.module, self.optimizer.max_gradient_norm))
                torch.clear_autocast_cache()  # copies of the weights as they were before the step
        # On the processor: gathered as they are, every process would open every other one's device.
        own = [(slices, {name: value.cpu() for name, value in values.items()}) for slices, values in row_metrics]
        metrics = loss_metrics([one for part in all_processes(own) for one in part])
        metrics |= {"loss/gradient_norm": max(norms), "loss/updates": float(len(norms))}
        metrics["loss/learning_rate"] = self.module.trainer.optimizers[0].param_groups[0]["lr"]
        return UpdateOutcome(old, reference, metrics)

    def _plan(self, rows: Sequence[UpdateRow], spare: Sequence[ScoredRollout]) -> list[MicroBatch]:
        limits = self.optimizer.limits(self.policy.config.get_text_config().hidden_size)
        return plan_update(rows, spare, self.loss, limits)

    @torch.no_grad()
    def _logprobs_of(self, model: PreTrainedModel, plan: Sequence[MicroBatch]) -> Logprobs:
        """By rollout, so that updates can be cut in other ways than the plan."""
        found: Logprobs = {}
        for micro in plan:
            found |= micro.rows(self._logprobs(model, micro.to(self.module.device))[0])
        # Under autocast, what was made here of the weights has no gradient and must not serve the passes that have.
        torch.clear_autocast_cache()
        return found

    def _logprobs(
        self, model: PreTrainedModel, micro: MicroBatch, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        batch = micro.batch
        return completion_logprobs(
            model,
            batch.prompts,
            batch.prompt_mask,
            batch.completions,
            micro.counted,
            self.temperature,
            batch.rows_per_prompt,
            entropy_gradient,
        )

    def _backward(self, micro: MicroBatch, old: Logprobs, reference: Logprobs) -> RowMetrics:
        """Add one micro-batch's part to the gradient; give its rows' slices and metrics.

        The first pass over a rollout that no update has preceded runs at the weights that sampled: its own
        log-probabilities then are the old ones, to the last bit, and later passes find them in ``old``.
        """
        logprobs, entropy = self._logprobs(self.policy, micro, self.loss.entropy_bonus > 0)
        if self.loss.old_logprobs == "recorded":
            old_logprobs = micro.batch.recorded_logprobs
        else:
            fresh = micro.rows(logprobs)
            if not fresh.keys() <= old.keys():
                old.update(fresh)
            old_logprobs = micro.tensor(old)
        output = grpo_loss(
            logprobs,
            old_logprobs,
            micro.advantages,
            micro.counted,
            reference_logprobs=None if self.reference is None else micro.tensor(reference),
            token_weights=micro.weights,
            kl_mask=micro.kl_counted,
            entropy=entropy,
            sampling_logprobs=micro.batch.sampling_logprobs,
            **self.loss.options(),
        )
        self.module.manual_backward(output.loss)
        return micro.slices, output.metrics
