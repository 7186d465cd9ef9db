"""What draws the completions of a training run: this project's own sampler, or vLLM."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Literal

from grpo.rollouts.sampling_settings import SamplingSettings

EngineName = Literal["own", "vllm", "vllm_server"]

# vLLM raises a lower temperature to this, with a warning in its log.
VLLM_LOWEST_TEMPERATURE = 0.01
# Which engine reads a setting.
READ_BY = {
    "address": "vllm_server",
    "precision": "vllm",
    "cache_gb": "vllm",
    "context": "vllm",
    "gather_weights": "own",
}


@dataclass(frozen=True)
class EngineSettings:
    """What draws the completions of training and validation.

    Args:
        name: ``own``, this project's sampler on the live policy; ``vllm``, an engine of vLLM in the training process;
            or ``vllm_server``, vLLM's server as ``launch/vllm_server.sh`` starts it. Both are handed the weights after
            every round.
        address: of the server; for ``vllm_server``.
        precision: of the engine's weights and cache, ``float32`` or ``bfloat16``; for ``vllm``, as are the next two.
        cache_gb: memory for keys and values, in units of 10^9 bytes.
        context: tokens of the longest prompt with its completion; null for as many as the policy can read.
        gather_weights: for ``own``, where the strategy cuts weights up: whether each process samples with a whole copy
            of them. ``false`` holds none; each layer is gathered in each pass, and processes wait for each other there.
    """

    name: EngineName = "own"
    address: str = "http://127.0.0.1:8000"
    precision: Literal["float32", "bfloat16"] = "float32"
    cache_gb: float = 1.0
    context: int | None = None
    gather_weights: bool = True

    def __post_init__(self) -> None:
        if not self.address.startswith(("http://", "https://")):
            raise ValueError(f"engine.address is {self.address}: give it with http:// or https:// before it")
        if not 0 < self.cache_gb < float("inf"):
            raise ValueError(f"engine.cache_gb is {self.cache_gb}: it must be positive (1 is usual for a small policy)")
        if self.context is not None and self.context < 2:
            raise ValueError(f"engine.context is {self.context}: a prompt and its completion are at least 2 tokens")
        for field in fields(self):
            value, reader = getattr(self, field.name), READ_BY.get(field.name, self.name)
            if value != field.default and reader != self.name:
                raise ValueError(
                    f"engine.{field.name} is {value}, which has an effect only where engine.name is {reader}, and it "
                    f"is {self.name}: set one of them otherwise"
                )

    def require_able(self, sampling: SamplingSettings) -> None:
        """Refuse what the engine would draw otherwise than declared, or could not draw at all.

        Raises:
            ValueError: naming the key, its value and the remedy.
        """
        if self.name == "own":
            return
        if sampling.tools is not None:
            raise ValueError(
                f"sampling.tools is given with engine.name {self.name}: vLLM would end at a call and not go on with "
                "its answer; set engine.name to own, or sampling.tools to null"
            )
        if not sampling.shared_prompt:
            raise ValueError(
                f"sampling.shared_prompt is false with engine.name {self.name}, where it has no effect: vLLM keeps "
                "prompts in its own way; set it to true, or engine.name to own"
            )
        if 0 < sampling.temperature < VLLM_LOWEST_TEMPERATURE:
            raise ValueError(
                f"sampling.temperature is {sampling.temperature} with engine.name {self.name}: vLLM would draw at "
                f"{VLLM_LOWEST_TEMPERATURE} instead; raise it to that, or set engine.name to own"
            )
        if sampling.min_p > 0 and sampling.top_p < 1:
            raise ValueError(
                f"sampling.min_p is {sampling.min_p} and sampling.top_p is {sampling.top_p} with engine.name "
                f"{self.name}: vLLM cuts min_p first, which leaves other tokens; switch one off (min_p 0, top_p 1)"
            )
        if self.name == "vllm" and find_spec("vllm") is None:
            raise ValueError(
                "engine.name is vllm, and the package vllm is not installed here: `make setup-vllm` makes an "
                "environment that has it, .venv-vllm; train with its grpo, or set engine.name to own or vllm_server"
            )
