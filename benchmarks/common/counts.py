"""Floating-point operations and bytes of a round, counted from the model's shape and the lengths.

Only what no implementation can leave out is counted: matrix products and attention over real tokens, each prompt once a
group, the weights read once a pass, the keys and values read once a step (a prompt's once for its group), the
optimiser's state. Activations that
travel through memory are not, nor norms, softmax and the drawing itself; the bound is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FLOAT = 4
# Weight, gradient and two moments read; weight and two moments written.
OPTIMIZER_TRIPS = 7


@dataclass(frozen=True)
class Shape:
    """What a transformer of Llama's kind is made of."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: Any) -> Shape:
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head,
            config.vocab_size,
            config.tie_word_embeddings,
        )

    @property
    def block_weights(self) -> int:
        """Of all layers' matrices."""
        attention = self.width * self.head * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.inner)

    @property
    def head_weights(self) -> int:
        return self.width * self.vocabulary

    @property
    def weights(self) -> int:
        return self.block_weights + self.head_weights * (1 if self.tied else 2)

    def attention_flops(self, pairs: int) -> int:
        """Of query times key and of probability times value, for so many pairs of positions."""
        return 4 * self.layers * self.heads * self.head * pairs

    def cache_bytes(self, positions: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head * FLOAT * positions


@dataclass(frozen=True)
class Pass:
    """Work between two points at which everything before must be done."""

    flops: float
    bytes: float


def bound_seconds(passes: Sequence[Pass], flops_a_second: float, bytes_a_second: float) -> float:
    return sum(max(one.flops / flops_a_second, one.bytes / bytes_a_second) for one in passes)


def _prompts(groups: Sequence[int], prompts: Sequence[int]) -> list[int]:
    """The length of each group's prompt, once."""
    return list(dict(zip(groups, prompts, strict=True)).values())


def _causal(length: int, before: int = 0) -> int:
    """Pairs of a position and one that it sees, for ``length`` positions after ``before``."""
    return length * before + length * (length + 1) // 2


def sampling_passes(
    shape: Shape, groups: Sequence[int], prompts: Sequence[int], completions: Sequence[int]
) -> list[Pass]:
    """The prompts' pass, then one for each position after the first at which some completion goes on."""
    once = _prompts(groups, prompts)
    flops = 2 * shape.block_weights * sum(once) + 2 * shape.head_weights * len(once)
    flops += shape.attention_flops(sum(map(_causal, once)))
    weights = FLOAT * (shape.block_weights + shape.head_weights)
    passes = [Pass(flops, weights + shape.cache_bytes(sum(once)))]
    for step in range(1, max(completions)):
        going = [i for i, length in enumerate(completions) if length > step]
        pairs = sum(prompts[i] + step for i in going)
        read = sum({groups[i]: prompts[i] for i in going}.values()) + step * len(going)
        flops = 2 * (shape.block_weights + shape.head_weights) * len(going) + shape.attention_flops(pairs)
        passes.append(Pass(flops, weights + shape.cache_bytes(read)))
    return passes


def update_passes(
    shape: Shape, groups: Sequence[int], prompts: Sequence[int], completions: Sequence[int]
) -> list[Pass]:
    """Forward and twice as much backward over prompts (once a group) and completions; then the optimiser.

    A completion's last token is drawn but never fed in, and only positions that a token is drawn from need the head.
    """
    once = _prompts(groups, prompts)
    fed = sum(once) + sum(completions) - len(completions)
    pairs = sum(map(_causal, once))
    pairs += sum(_causal(length - 1, prompt) for prompt, length in zip(prompts, completions, strict=True))
    heads = sum(completions) - len(completions) + len(once)
    forward = 2 * shape.block_weights * fed + 2 * shape.head_weights * heads + shape.attention_flops(pairs)
    gradient = 3 * FLOAT * shape.weights  # weights read forward and backward, gradient written
    return [Pass(3 * forward, gradient), Pass(10 * shape.weights, OPTIMIZER_TRIPS * FLOAT * shape.weights)]
