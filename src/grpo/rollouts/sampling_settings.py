"""How tokens are drawn, as a configuration states it and the record keeps it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from transformers import LogitsProcessorList

from grpo.records import SamplingPolicy
from grpo.rollouts.draws import distribution_cuts
from grpo.rollouts.tools import ToolSettings

# Logits divided by less can leave the float32 range.
LOWEST_TEMPERATURE = 1e-4


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are drawn.

    Args:
        temperature: divides the logits; 0 takes the most likely token (evaluation only).
        max_new_tokens: the longest completion, end token and tokens inserted by tools included.
        max_rows: completions sampled side by side; more is faster and needs more memory. Prompts that find no
            room join as rows end.
        top_p: draw from the smallest set of likeliest tokens that holds this much probability; 1 is off.
        top_k: draw from this many likeliest tokens; 0 is off. The cuts apply after the temperature, in the
            order top_k, top_p, min_p; greedy completions are not cut.
        min_p: draw from tokens with at least this share of the likeliest one's probability; 0 is off.
        tools: what a completion may call; null for nothing.
        stop_strings: a completion ends with the token that completes one of these texts; what the policy drew is
            looked at, not the prompt and not what a tool put in.
        shared_prompt: keep a prompt's keys and values once for all completions of the group, where the model's
            attention allows it; else each completion has a copy. The same to rounding.
    """

    temperature: float = 1.0
    max_new_tokens: int = 16
    max_rows: int = 128
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    tools: ToolSettings | None = None
    stop_strings: tuple[str, ...] = ()
    shared_prompt: bool = True

    def __post_init__(self) -> None:
        if self.temperature != 0 and not LOWEST_TEMPERATURE <= self.temperature < float("inf"):
            raise ValueError(
                f"sampling.temperature is {self.temperature}: it must be 0 (greedy) or a number from "
                f"{LOWEST_TEMPERATURE} up"
            )
        for name, least in (("max_new_tokens", 1), ("max_rows", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"sampling.{name} is {getattr(self, name)}: it must be at least {least}")
        self._check_cuts()
        self._check_stop_strings()

    def _check_cuts(self) -> None:
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p is {self.top_p}: it must be above 0 and at most 1 (1 cuts nothing)")
        if self.top_k < 0:
            raise ValueError(f"sampling.top_k is {self.top_k}: it must be 0 (cuts nothing) or at least 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"sampling.min_p is {self.min_p}: it must be from 0 (cuts nothing) to 1")

    def _check_stop_strings(self) -> None:
        given: object = self.stop_strings
        if isinstance(given, str):  # a tuple of its letters otherwise
            raise ValueError(f"sampling.stop_strings is the text {self.stop_strings!r}: give a list of texts")
        for text in self.stop_strings:
            if not text:
                raise ValueError("sampling.stop_strings has an empty text, which every completion holds: take it out")
            if self.tools is not None and text in self.tools.closing:
                raise ValueError(
                    f"sampling.stop_strings has {text!r}, which stands in sampling.tools.closing "
                    f"({self.tools.closing!r}): every call would end its completion unanswered, so take it out"
                )

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
