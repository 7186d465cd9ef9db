"""Sampling completions on the live policy: shared prompts, rows that come and go, keyed randomness, tools.

The model is used as it stands, so there is no copy to refresh after an optimiser step. A group's prompt is
run once, and its keys and values are kept once for all members; rows that have ended make room for groups that
wait. Each token is a function of the rollout's key and the distribution alone. A tool's answer is fed in token
by token while the other rows draw theirs, so all rows stay side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.records import PromptGroup, Rollout, RolloutKey, SamplingPolicy
from grpo.rollouts.drawing import Drawing
from grpo.rollouts.draws import Draws, draw_cut_tokens, draw_tokens, keyed_uniforms
from grpo.rollouts.endings import completion_text, ending
from grpo.rollouts.group_keys import member_keys
from grpo.rollouts.growing_rows import GrowingRows, WaitingGroups
from grpo.rollouts.row_cache import require_handled_cache
from grpo.rollouts.sampling_settings import SamplingSettings
from grpo.rollouts.shared_attention import shared_attention
from grpo.rollouts.sharing_trial import can_share_prompts
from grpo.rollouts.stop_strings import StopStrings
from grpo.rollouts.tool_turns import ToolTurns

__all__ = ["Sampler", "SamplingSettings"]


class Sampler:
    """Draws completions from ``model``.

    Args:
        model: any causal language model of transformers whose cache is of keys and values, in any precision.
        tokenizer: decodes completions.
        end_token_ids: the tokens that end a completion.
        settings: how tokens are drawn.

    Raises:
        ValueError: the model's cache is of another kind.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: Sequence[int],
        settings: SamplingSettings,
    ) -> None:
        require_handled_cache(model)
        self.model = model
        self.tokenizer = tokenizer
        self.end_token_ids = frozenset(end_token_ids)
        self.settings = settings
        self.cuts = settings.cuts()
        self.stops: StopStrings | None = None
        if settings.stop_strings:
            vocabulary = model.config.get_text_config().vocab_size
            self.stops = StopStrings(settings.stop_strings, tokenizer, vocabulary)

    @torch.no_grad()
    def sample(
        self,
        groups: Sequence[PromptGroup],
        keys: Sequence[RolloutKey],
        group_size: int,
        weights_version: int = 0,
        members: Sequence[Sequence[int]] | None = None,
    ) -> list[list[Rollout]]:
        """``group_size`` completions of each group.

        Args:
            groups: the prompts.
            keys: one key a group; its ``member`` is set for each completion.
            group_size: completions a group.
            weights_version: optimiser steps behind the model's weights, for the record.
            members: numbers of the completions to draw, at least one of each group; None for all.

        Returns:
            a list a group, members in order.
        """
        if not groups:
            return []
        require_float64(self.model.device)
        chosen = member_keys(keys, group_size, members)
        was_training = self.model.training
        self.model.eval()
        # Under autocast, copies of the weights in half precision are kept until its context is left: those made
        # here have no gradient, and those made before an optimiser step are of the old weights.
        torch.clear_autocast_cache()
        shared = self.settings.shared_prompt and can_share_prompts(self.model)
        policy = replace(self.settings, shared_prompt=shared).sampling_policy(weights_version)
        try:
            with shared_attention(self.model) if shared else nullcontext():
                return self._sample(groups, chosen, policy, shared)
        finally:
            self.model.train(was_training)
            torch.clear_autocast_cache()

    def _sample(
        self,
        groups: Sequence[PromptGroup],
        members: Sequence[Sequence[RolloutKey]],
        policy: SamplingPolicy,
        shared: bool,
    ) -> list[list[Rollout]]:
        steps = self.settings.max_new_tokens
        uniforms = np.stack([keyed_uniforms(key, steps) for keys in members for key in keys])
        turns = None
        if self.settings.tools is not None:
            turns = ToolTurns(self.settings.tools, self.tokenizer, self.end_token_ids, len(uniforms), self.stops)
        sizes = [len(keys) for keys in members]
        waiting = WaitingGroups(groups, max(sizes), self.settings.max_rows)
        drawing = Drawing(
            GrowingRows(self.model, waiting, steps, shared),
            waiting,
            groups,
            sizes,
            uniforms,
            self._draw_step,
            sorted(self.end_token_ids),
            None if self.stops is None else self.stops.to(self.model.device),
            turns,
            cut=bool(self.cuts),
        )
        rows = iter(enumerate(drawing.draw_all().rows()))
        return [
            [self._rollout(key, group, policy, drawing, *next(rows)) for key in keys]
            for group, keys in zip(groups, members, strict=True)
        ]

    def _draw_step(self, logits: Tensor, uniforms: Tensor) -> Draws:
        if self.cuts:
            return Draws(*draw_cut_tokens(logits, uniforms, self.settings.temperature, self.cuts))
        return Draws(*draw_tokens(logits, uniforms, self.settings.temperature))

    def _rollout(
        self,
        key: RolloutKey,
        group: PromptGroup,
        policy: SamplingPolicy,
        drawing: Drawing,
        number: int,
        row: tuple[list[int], list[float], list[float] | None],
    ) -> Rollout:
        """Cut a row at its end; an end token belongs to the tokens and not to the text."""
        tokens, logprobs, cut_logprobs = row
        turns = None if drawing.turns is None else drawing.turns.rows[number]
        stop = drawing.stopped.get(number) if turns is None else turns.stop
        length, finish_reason = ending(tokens, self.end_token_ids, stop) if turns is None else turns.ending
        return Rollout(
            key,
            group,
            tokens=tuple(tokens[:length]),
            text=completion_text(self.tokenizer, tokens[:length], finish_reason, stop),
            logprobs=tuple(logprobs[:length]),
            finish_reason=finish_reason,
            drawn=None if turns is None else turns.drawn_mask,
            sampling_logprobs=None if cut_logprobs is None else tuple(cut_logprobs[:length]),
            tool_calls=() if turns is None else tuple(turns.calls),
            sampling_policy=policy,
        )


def require_float64(device: torch.device) -> None:
    """Refuse a device on which tokens could not be drawn exactly.

    Raises:
        ValueError: it has no numbers of 64 bits.
    """
    if device.type == "mps":
        raise ValueError(
            "the policy is on mps, which has no 64-bit numbers, and tokens are drawn from 64-bit sums: set "
            "trainer.accelerator to cpu"
        )
