"""Sampling completions on the live policy: shared prompts, a preallocated cache, keyed randomness, tools.

The model is used as it stands, so there is no copy to refresh after an optimiser step. A group's
prompt is run once and its keys and values are shared out to the members; rows that have ended leave
the batch. Each token is a function of the rollout's key and the distribution alone. A tool's answer is
fed in token by token while the other rows draw theirs, so all rows stay side by side.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from grpo.records import FinishReason, PromptGroup, Rollout, RolloutKey, SamplingPolicy
from grpo.rollouts.draws import Draws, distribution_cuts, draw_cut_tokens, draw_tokens, keyed_uniforms
from grpo.rollouts.growing_rows import GrowingRows, preallocated_cache
from grpo.rollouts.tool_turns import RowTurns, ToolTurns
from grpo.rollouts.tools import ToolSettings

__all__ = ["Sampler", "SamplingSettings", "draw_tokens", "keyed_uniforms", "preallocated_cache"]

# Rows are taken out only when this share of them has ended: it costs a copy of the cache of those that stay.
COMPACT_WHEN_ENDED = 0.125

# Logits divided by less can leave the float32 range.
LOWEST_TEMPERATURE = 1e-4


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are drawn.

    Args:
        temperature: divides the logits; 0 takes the most likely token (evaluation only).
        max_new_tokens: the longest completion, end token and tokens inserted by tools included.
        max_rows: completions sampled side by side; more is faster and needs more memory.
        top_p: draw from the smallest set of likeliest tokens that holds this much probability; 1 is off.
        top_k: draw from this many likeliest tokens; 0 is off. The cuts apply after the temperature, in the
            order top_k, top_p, min_p; greedy completions are not cut.
        min_p: draw from tokens with at least this share of the likeliest one's probability; 0 is off.
        tools: what a completion may call; null for nothing.
    """

    temperature: float = 1.0
    max_new_tokens: int = 16
    max_rows: int = 128
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    tools: ToolSettings | None = None

    def __post_init__(self) -> None:
        if self.temperature != 0 and not LOWEST_TEMPERATURE <= self.temperature < float("inf"):
            raise ValueError(
                f"sampling.temperature is {self.temperature}: it must be 0 (greedy) or a number from "
                f"{LOWEST_TEMPERATURE} up"
            )
        for name, least in (("max_new_tokens", 1), ("max_rows", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"sampling.{name} is {getattr(self, name)}: it must be at least {least}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p is {self.top_p}: it must be above 0 and at most 1 (1 cuts nothing)")
        if self.top_k < 0:
            raise ValueError(f"sampling.top_k is {self.top_k}: it must be 0 (cuts nothing) or at least 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"sampling.min_p is {self.min_p}: it must be from 0 (cuts nothing) to 1")

    def cuts(self) -> LogitsProcessorList:
        """What cuts the distribution; empty for greedy completions."""
        if self.temperature == 0:
            return LogitsProcessorList()
        return distribution_cuts(self.top_k, self.top_p, self.min_p)

    def sampling_policy(self, weights_version: int = 0) -> SamplingPolicy:
        """These settings with the weights they draw from, as every rollout records them.

        The tools stand apart from the settings, by name and version; how a call is written and how many a
        completion may make stays with the settings, under ``tool_calls``.
        """
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "tools"}
        if self.tools is not None:
            settings["tool_calls"] = self.tools.rules()
        tools = {} if self.tools is None else self.tools.versions()
        return SamplingPolicy(weights_version, json.dumps(settings, sort_keys=True), json.dumps(tools, sort_keys=True))


class Sampler:
    """Draws completions from ``model``.

    Args:
        model: any causal language model of transformers whose cache is of keys and values.
        tokenizer: decodes completions.
        end_token_ids: the tokens that end a completion.
        settings: how tokens are drawn.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: Sequence[int],
        settings: SamplingSettings,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.end_token_ids = frozenset(end_token_ids)
        self.settings = settings
        self.cuts = settings.cuts()

    @torch.no_grad()
    def sample(
        self,
        groups: Sequence[PromptGroup],
        keys: Sequence[RolloutKey],
        group_size: int,
        weights_version: int = 0,
    ) -> list[list[Rollout]]:
        """``group_size`` completions of each group.

        Args:
            groups: the prompts.
            keys: one key a group; its ``member`` is set for each completion.
            group_size: completions a group.
            weights_version: optimiser steps behind the model's weights, for the record.

        Returns:
            a list a group, members in order.
        """
        policy = self.settings.sampling_policy(weights_version)
        was_training = self.model.training
        self.model.eval()
        sampled: dict[int, list[Rollout]] = {}
        try:
            for indices in self._chunks(groups, group_size):
                members = [[keys[i].of_member(member) for member in range(group_size)] for i in indices]
                drawn = self._sample_chunk([groups[i] for i in indices], members, policy)
                sampled.update(zip(indices, drawn, strict=True))
        finally:
            self.model.train(was_training)
        return [sampled[i] for i in range(len(groups))]

    def _chunks(self, groups: Sequence[PromptGroup], group_size: int) -> Iterator[list[int]]:
        """Indices of groups to sample together: prompts of like lengths need the least padding."""
        order = sorted(range(len(groups)), key=lambda i: (len(groups[i].prompt_tokens), i))
        size = max(1, self.settings.max_rows // group_size)
        for start in range(0, len(order), size):
            yield order[start : start + size]

    def _sample_chunk(
        self, groups: Sequence[PromptGroup], members: Sequence[Sequence[RolloutKey]], policy: SamplingPolicy
    ) -> list[list[Rollout]]:
        uniforms = np.stack([keyed_uniforms(key, self.settings.max_new_tokens) for keys in members for key in keys])
        tools = self.settings.tools
        turns = None if tools is None else ToolTurns(tools, self.tokenizer, self.end_token_ids, len(uniforms))
        growing = GrowingRows(self.model, groups, len(members[0]), uniforms.shape[1])
        draws = self._draw(growing, uniforms, turns)
        rows = zip(draws.rows(), [None] * len(uniforms) if turns is None else turns.rows, strict=True)
        return [
            [self._rollout(key, group, policy, *next(rows)) for key in keys]
            for group, keys in zip(groups, members, strict=True)
        ]

    def _draw(self, growing: GrowingRows, uniforms: np.ndarray, turns: ToolTurns | None) -> Draws:
        """All steps, ``[rows, steps]``; what stands after a row's end means nothing."""
        device = self.model.device
        numbers = torch.from_numpy(uniforms).to(device)
        ends = torch.tensor(sorted(self.end_token_ids), device=device)
        draws = Draws.zeros(numbers.shape, device, cut=bool(self.cuts))
        ended = torch.zeros(len(numbers), dtype=torch.bool, device=device)
        for step in range(numbers.shape[1]):
            drawn = self._draw_step(growing.logits, numbers[growing.rows, step])
            if turns is None:
                ended |= torch.isin(drawn.tokens, ends)
            else:
                drawn, ended = turns.take(growing.rows, drawn)
            draws.put(growing.rows, step, drawn)
            share_ended = float(ended.float().mean())
            if share_ended == 1.0 or step + 1 == numbers.shape[1]:
                break
            tokens = drawn.tokens
            if share_ended >= COMPACT_WHEN_ENDED:
                stay = (~ended).nonzero().squeeze(-1)
                growing.keep(stay)
                tokens, ended = tokens[stay], ended[stay]
            growing.append(tokens)
        return draws

    def _draw_step(self, logits: Tensor, uniforms: Tensor) -> Draws:
        if self.cuts:
            return Draws(*draw_cut_tokens(logits, uniforms, self.settings.temperature, self.cuts))
        return Draws(*draw_tokens(logits, uniforms, self.settings.temperature))

    def _rollout(
        self,
        key: RolloutKey,
        group: PromptGroup,
        policy: SamplingPolicy,
        row: tuple[list[int], list[float], list[float] | None],
        turns: RowTurns | None,
    ) -> Rollout:
        """Cut a row at its end; an end token belongs to the tokens and not to the text."""
        tokens, logprobs, cut_logprobs = row
        length, finish_reason = self._ending(tokens) if turns is None else turns.ending
        text_length = length - 1 if finish_reason == "end_token" else length
        return Rollout(
            key,
            group,
            tokens=tuple(tokens[:length]),
            text=str(self.tokenizer.decode(tokens[:text_length])),
            logprobs=tuple(logprobs[:length]),
            finish_reason=finish_reason,
            drawn=None if turns is None else turns.drawn_mask,
            sampling_logprobs=None if cut_logprobs is None else tuple(cut_logprobs[:length]),
            tool_calls=() if turns is None else tuple(turns.calls),
            sampling_policy=policy,
        )

    def _ending(self, tokens: Sequence[int]) -> tuple[int, FinishReason]:
        """How many of a row's tokens are its completion's, and why it ends there."""
        end = next((i for i, token in enumerate(tokens) if token in self.end_token_ids), None)
        return (len(tokens), "length") if end is None else (end + 1, "end_token")
