"""Working memory of the passes over the model, by running the model itself on tensors without data.

torch's fake tensors have shapes and no numbers: a pass over them takes seconds for any size, and allocates and frees
what a real pass would, operation by operation. All layers being alike, two short models tell what a layer adds.
Workspace inside an operation is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import DynamicCache, PreTrainedModel

from grpo.planning.shapes import Shape, empty_model, read_config, with_layers
from grpo.planning.workload import Precision, Workload
from grpo.rollouts.draws import draw_tokens


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations make while it is active, and the most that were alive at once.

    Args:
        known: tensors that are accounted for elsewhere, views of which count nothing.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.alive: int = 0
        self.peak: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        name = storage._cdata
        if name in self.sizes:
            return
        self.sizes[name] = storage.nbytes()
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._freed, name)

    def _freed(self, name: int) -> None:
        self.alive -= self.sizes.pop(name)


@dataclass(frozen=True)
class Passes:
    """The shapes of a pass over the model.

    Args:
        rows: of the model's input.
        tokens: of each.
        masked: whether completions share the row, which takes a mask of its own.
        checkpointed: whether layers are run again in the backward pass.
        precision: as in the workload.
        half_weights: whether the weights themselves are bfloat16, as under DeepSpeed.
    """

    rows: int
    tokens: int
    masked: bool
    checkpointed: bool
    precision: Precision
    half_weights: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return torch.bfloat16 if self.half_weights else torch.float32

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "bf16-mixed" and not self.half_weights:
            return torch.autocast("cpu", torch.bfloat16)
        return nullcontext()


def _passes(workload: Workload, rows: int, tokens: int, masked: bool = False, checkpointed: bool = False) -> Passes:
    return Passes(rows, tokens, masked, checkpointed, workload.precision, workload.weight_bytes == 2)


def update_bytes(shape: Shape, workload: Workload) -> int:
    """Bytes that a micro-batch's forward and backward pass needs at its peak, the output layer's part left out.

    The embedding's gradient, as large as the embedding, is made last, when the activations are gone.
    """
    cut = workload.cut(shape.hidden)
    passes = _passes(workload, cut.rows, cut.tokens, cut.share > 1, workload.gradient_checkpointing)
    one, two = (_update_peak(shape.name, passes, layers) for layers in (1, 2))
    embedding = shape.vocabulary * shape.hidden * passes.dtype.itemsize
    return max(one + (shape.layers - 1) * (two - one), embedding)


def sampling_bytes(shape: Shape, workload: Workload) -> tuple[int, int]:
    """Bytes beside weights and caches: of the last token's pass and draw, and of the pass over the prompts."""
    rows = workload.groups_side_by_side * workload.members
    last = _passes(workload, rows, workload.max_new_tokens)  # beside the prompts, which are not copied
    prompts = _passes(workload, workload.groups_side_by_side, workload.prompt_tokens)
    return _last_token_peak(shape.name, last), _prompts_peak(shape.name, prompts)


@cache
def _update_peak(policy: str, passes: Passes, layers: int) -> int:
    with FakeTensorMode():
        model = _model(policy, passes, layers).train()
        if passes.checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        state = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
        with PeakBytes(state) as counter, passes.autocast():
            hidden = model.base_model(**_packed_inputs(passes, model.config.hidden_size))[0]
            places = torch.zeros(passes.rows * passes.tokens, dtype=torch.long)
            hidden.flatten(0, 1)[places].sum().backward()
    return int(counter.peak)


def _packed_inputs(passes: Passes, width: int) -> dict[str, Any]:
    """As the training makes them: a mask that is added to the scores where completions stand side by side.

    Embedded already: the peak would otherwise be the embedding's gradient in short models, and the layers' not be seen.
    """
    tokens = torch.zeros(passes.rows, passes.tokens, dtype=torch.long)
    embedded = torch.zeros(passes.rows, passes.tokens, width, dtype=passes.dtype, requires_grad=True)
    if not passes.masked:
        return {"inputs_embeds": embedded, "attention_mask": torch.ones_like(tokens), "use_cache": False}
    mask = torch.zeros(passes.rows, 1, passes.tokens, passes.tokens, dtype=passes.dtype)
    return {"inputs_embeds": embedded, "position_ids": tokens, "attention_mask": mask, "use_cache": False}


@cache
def _last_token_peak(policy: str, passes: Passes) -> int:
    with FakeTensorMode(), torch.no_grad():
        model = _model(policy, passes, 1).eval()
        filled, known = _filled_cache(model, passes.rows, passes.tokens - 1)
        mask = torch.ones(passes.rows, passes.tokens, dtype=torch.long)
        first = mask[:, -1:]
        with PeakBytes([*model.parameters(), *known]) as counter, passes.autocast():
            output = model(input_ids=first, attention_mask=mask, position_ids=first, cache=filled, logits_to_keep=1)
            draw_tokens(output.logits[:, -1], torch.zeros(passes.rows, dtype=torch.float64), 1.0)
        # This cache is copied to a longer one, where the sampler's has room.
        copied = sum(tensor.untyped_storage().nbytes() for tensor in known)
    return max(0, int(counter.peak) - copied)


@cache
def _prompts_peak(policy: str, passes: Passes) -> int:
    with FakeTensorMode(), torch.no_grad():
        model = _model(policy, passes, 1).eval()
        tokens = torch.zeros(passes.rows, passes.tokens, dtype=torch.long)
        with PeakBytes(model.parameters()) as counter, passes.autocast():
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, logits_to_keep=1)
    return int(counter.peak)


def _filled_cache(model: PreTrainedModel, rows: int, length: int) -> tuple[DynamicCache, list[Tensor]]:
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    keys, values = (torch.zeros(rows, heads, length, size, dtype=model.dtype) for _ in range(2))
    filled = DynamicCache()
    filled.update(keys, values, 0)
    layer: Any = filled.layers[0]
    return filled, [layer.keys, layer.values]


def _model(policy: str, passes: Passes, layers: int) -> PreTrainedModel:
    return empty_model(with_layers(read_config(policy), layers), passes.dtype)
