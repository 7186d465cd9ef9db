"""Sampling with a model whose passes are messages between processes: they stay in step until all have finished."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import lightning as L
import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.records import PromptGroup, Rollout, RolloutKey
from grpo.rollouts.completion_logprobs import evaluating
from grpo.rollouts.sampling import Sampler
from grpo.rollouts.sampling_settings import SamplingSettings
from grpo.rollouts.sharing_trial import can_share_prompts
from grpo.training.strategies import begin_pass, cut_up_again


class SamplerInStep(Sampler):
    """Draws with the trained model where each process has a part of every weight, and makes no copy of it.

    Each layer is put together in each pass, by all processes at once, and completions end at different lengths. So
    every pass is announced: a process that has finished makes passes over one token beside the others until none of
    them announces any, and all leave together. :meth:`sample` is therefore to be called as often in every process, with
    no groups where one has none.

    Args:
        model: before the strategy cuts it up.
        tokenizer: as for :class:`Sampler`, like the next two.
        end_token_ids: the tokens that end a completion.
        settings: how tokens are drawn.
        module: whose strategy cuts the model up.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: Sequence[int],
        settings: SamplingSettings,
        module: L.LightningModule,
    ) -> None:
        super().__init__(model, tokenizer, end_token_ids, settings)
        self.module = module
        if settings.shared_prompt:
            # While the model is whole, on the processor: a trial that fails within a pass would leave the others
            # waiting in theirs. Where the device would judge otherwise, ``shared_prompt: false`` is the way out.
            can_share_prompts(model)

    # What is gathered within inference mode, in which Lightning validates, could be in no later backward pass.
    @torch.inference_mode(False)
    @torch.no_grad()
    def sample(
        self,
        groups: Sequence[PromptGroup],
        keys: Sequence[RolloutKey],
        group_size: int,
        weights_version: int = 0,
        members: Sequence[Sequence[int]] | None = None,
    ) -> list[list[Rollout]]:
        """As :meth:`Sampler.sample`; a collective call, whatever the groups are."""
        with _uncached_autocast():
            announcing = self.model.register_forward_pre_hook(lambda *_: self._announce(), prepend=True)
            try:
                rollouts = super().sample(groups, keys, group_size, weights_version, members)
            finally:
                announcing.remove()
            with evaluating(self.model):
                self._make_passes_of_others()
        cut_up_again(self.model)
        return rollouts

    def _announce(self) -> None:
        """Before each pass of this process."""
        self._some_process_goes_on(True)
        begin_pass(self.module)

    def _make_passes_of_others(self) -> None:
        token = torch.zeros(1, 1, dtype=torch.long, device=self.module.device)
        while self._some_process_goes_on(False):
            begin_pass(self.module)
            self.model(input_ids=token, use_cache=False, logits_to_keep=1)

    def _some_process_goes_on(self, here: bool) -> bool:
        flag = torch.tensor(here, dtype=torch.int32, device=self.module.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return here or bool(flag)


@contextmanager
def _uncached_autocast() -> Iterator[None]:
    """Without the copies in half precision that autocast keeps of weights: they would add up to all of them."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
