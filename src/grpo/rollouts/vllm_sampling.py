"""Sampling completions with vLLM: the same prompts, keys and rollouts as the own sampler's, drawn by another engine.

The engine has a copy of the policy, which is handed the weights whenever they have changed. It says of every token
which weights drew it, and afterwards which it has; a completion of any others is refused. A rollout's seed follows from
its key, so that no order of work changes a draw; which numbers vLLM draws from a seed is its own affair.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.records import PromptGroup, Rollout, RolloutKey, SamplingPolicy
from grpo.rollouts.endings import completion_text, ending
from grpo.rollouts.group_keys import member_keys
from grpo.rollouts.sampling_settings import SamplingSettings
from grpo.rollouts.stop_strings import Stop, StopStrings


class EngineFailed(RuntimeError):
    """The engine did not do what it was asked; nothing it gave is used, and the run can go on from its newest state."""

    exit_status = 75  # as of a run that was stopped

    def __str__(self) -> str:
        return f"{super().__str__()}. Run the training again to go on from its newest state"


class StaleWeights(EngineFailed):
    """The engine drew with other weights than those that were asked for."""


@dataclass(frozen=True)
class Request:
    """One completion to draw.

    Args:
        prompt: tokens.
        sampling: fields of vLLM's ``SamplingParams``, as JSON takes them.
    """

    prompt: tuple[int, ...]
    sampling: dict[str, Any]


@dataclass(frozen=True)
class Completion:
    """What the engine drew.

    Args:
        tokens: with the one that ended it.
        logprobs: under the distribution each was drawn from: after temperature and cuts.
        weights: names of the weights that drew them.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    weights: frozenset[str]


class Engine(Protocol):
    """vLLM, in this process or behind an address.

    Args:
        name: with version and precision, for the record.
        context: tokens that a prompt and its completion may have together.
    """

    name: str
    context: int

    def take_over(self, model: PreTrainedModel, weights: str) -> None:
        """Draw with the weights that ``model`` has now from here on, and call them ``weights``."""

    def held(self) -> set[str | None]:
        """What the weights loaded last are called, by each part of the engine; None where a load failed."""

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order."""

    def close(self) -> None:
        """Let go of what the engine holds."""


class VLLMSampler:
    """Draws completions with ``engine``.

    Args:
        engine: is handed the policy's weights.
        model: the policy, with all its weights.
        tokenizer: decodes completions.
        end_token_ids: the tokens that end a completion.
        settings: how tokens are drawn.
        run: names this training among those that an engine may be handed weights by; for an engine in a process of
            its own, a folder that it can read, where the weights are put for it.
    """

    def __init__(
        self,
        engine: Engine,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: Sequence[int],
        settings: SamplingSettings,
        run: str,
    ) -> None:
        self.engine = engine
        self.model = model
        self.tokenizer = tokenizer
        self.end_token_ids = frozenset(end_token_ids)
        self.settings = settings
        self.run = run
        self.handed_over: int | None = None
        self.stops: StopStrings | None = None
        if settings.stop_strings:
            vocabulary = model.config.get_text_config().vocab_size
            self.stops = StopStrings(settings.stop_strings, tokenizer, vocabulary)

    def hand_over(self, weights_version: int) -> None:
        """Give the engine the weights that the policy has now, ``weights_version`` optimiser steps from the start.

        Raises:
            EngineFailed: it did not take them.
        """
        if weights_version != self.handed_over:
            self.engine.take_over(self.model, self._weights(weights_version))
            self.handed_over = weights_version

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
            weights_version: optimiser steps behind the weights that are to draw.
            members: numbers of the completions to draw, of each group; None for all.

        Returns:
            a list a group, members in order.

        Raises:
            StaleWeights: the engine drew with other weights.
            EngineFailed: it could not draw.
            ValueError: a prompt leaves no room for its completion.
        """
        require_room(groups, self.settings.max_new_tokens, self.engine.context)
        chosen = member_keys(keys, group_size, members)
        requests = [
            Request(group.prompt_tokens, self._sampling(key))
            for group, keys in zip(groups, chosen, strict=True)
            for key in keys
        ]
        completions = iter(self.engine.complete(requests))
        # Names and weights are set one after the other, and another training may set either in between.
        self._require_current(self.engine.held(), weights_version)
        settings = replace(self.settings, shared_prompt=False)  # how vLLM keeps a prompt is its own affair
        policy = replace(settings.sampling_policy(weights_version), engine=self.engine.name)
        return [
            [self._rollout(key, group, policy, next(completions)) for key in keys]
            for group, keys in zip(groups, chosen, strict=True)
        ]

    def _weights(self, weights_version: int) -> str:
        return f"{self.run}/update-{weights_version}"

    def _sampling(self, key: RolloutKey) -> dict[str, Any]:
        settings = self.settings
        return {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "min_p": settings.min_p,
            "seed": seed_of(key),
            "max_tokens": settings.max_new_tokens,
            "logprobs": 0,  # of the drawn token, and of no others
            # The policy's end tokens as they are declared, and no other that vLLM finds in the folder.
            "stop_token_ids": sorted(self.end_token_ids),
            "ignore_eos": True,
            "stop": list(settings.stop_strings),
            "detokenize": bool(settings.stop_strings),
            "skip_special_tokens": False,  # the own sampler looks for stop strings in them too
        }

    def _rollout(self, key: RolloutKey, group: PromptGroup, policy: SamplingPolicy, drawn: Completion) -> Rollout:
        """Cut as the own sampler cuts, whatever vLLM takes for the end."""
        self._require_current(drawn.weights, policy.weights_version)
        stop = self._stop(drawn.tokens)
        length, finish_reason = ending(drawn.tokens, self.end_token_ids, stop)
        if finish_reason == "length" and length < self.settings.max_new_tokens:
            raise EngineFailed(f"vLLM ended the completion of {group.problem.id} after {length} tokens, for no reason")
        tokens, logprobs = drawn.tokens[:length], drawn.logprobs[:length]
        # Where the distribution is cut vLLM gives what was drawn from, and nothing tells the whole softmax.
        cut = bool(self.settings.cuts())
        return Rollout(
            key,
            group,
            tokens=tokens,
            text=completion_text(self.tokenizer, tokens, finish_reason, stop),
            logprobs=(math.nan,) * length if cut else logprobs,
            finish_reason=finish_reason,
            sampling_logprobs=logprobs if cut else None,
            sampling_policy=policy,
        )

    def _require_current(self, weights: Collection[str | None], weights_version: int) -> None:
        asked = self._weights(weights_version)
        if set(weights) != {asked}:
            named = ", ".join(sorted(one or "of no name" for one in weights)) or "of no name"
            raise StaleWeights(
                f"vLLM drew with the weights {named} where {asked} were asked for: it was started again, or another "
                "training hands it weights and needs an engine of its own. Nothing is trained on what it drew"
            )

    def _stop(self, tokens: Sequence[int]) -> Stop | None:
        """The first, as the own sampler finds it token by token; an end token ends before its text is looked at."""
        if self.stops is None:
            return None
        length, reason = ending(tokens, self.end_token_ids, None)
        drawn = tokens[: length - (reason == "end_token")]
        found = (self.stops.stop_at(drawn[: i + 1]) for i in range(len(drawn)))
        return next((stop for stop in found if stop is not None), None)


def require_room(groups: Sequence[PromptGroup], max_new_tokens: int, context: int) -> None:
    """vLLM would end a completion at its limit, as if it were the declared one.

    Args:
        groups: the prompts.
        max_new_tokens: of a completion.
        context: tokens that a prompt and its completion may have together.

    Raises:
        ValueError: a prompt leaves no room for its completion.
    """
    longest = max((len(group.prompt_tokens) for group in groups), default=0)
    if longest + max_new_tokens > context:
        raise ValueError(
            f"a prompt has {longest} tokens and sampling.max_new_tokens is {max_new_tokens}, together more than the "
            f"{context} that vLLM makes room for: raise engine.context (the server's --max-model-len), or lower "
            "data.max_prompt_tokens or sampling.max_new_tokens"
        )


def seed_of(key: RolloutKey) -> int:
    """63 bits of the key: vLLM's seed is a signed number of 64, and -1 means none to it."""
    return int.from_bytes(key.digest(8), "little") >> 1
