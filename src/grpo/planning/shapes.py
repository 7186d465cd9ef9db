"""How large a policy is, counted on the model itself: made on torch's meta device, where weights have no bytes."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from grpo.planning.workload import PlanError

_QWEN = {"model_type": "qwen2", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}


def _qwen(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool, vocabulary: int
) -> dict[str, Any]:
    return _QWEN | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        "vocab_size": vocabulary,
    }


# Public architectures by the size in their names: what their published config.json files say. 0.5B to 32B are those
# of Qwen2.5, 70B is that of Llama 3.1.
NAMED: dict[str, dict[str, Any]] = {
    "0.5B": _qwen(896, 4864, 24, 14, 2, True, 151936),
    "1.5B": _qwen(1536, 8960, 28, 12, 2, True, 151936),
    "3B": _qwen(2048, 11008, 36, 16, 2, True, 151936),
    "7B": _qwen(3584, 18944, 28, 28, 4, False, 152064),
    "14B": _qwen(5120, 13824, 48, 40, 8, False, 152064),
    "32B": _qwen(5120, 27648, 64, 40, 8, False, 152064),
    "70B": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
}


@dataclass(frozen=True)
class Shape:
    """Numbers of a policy's weights, counts all.

    Args:
        name: as the policy was asked for.
        parameters: weights, a shared one once.
        matrix_parameters: those that multiply every token, the output layer's left out.
        output_parameters: the output layer's, shared with the embedding or not.
        largest_parameter: of one tensor.
        adapter_inputs_and_outputs: widths in and out of every linear layer that an adapter would stand on, summed;
            times the rank, the adapters' weights.
        layers: of the model.
        hidden: width of the residual stream.
        attention_width: heads times their size.
        cache_width: key and value numbers of a token in one layer.
        vocabulary: tokens.
    """

    name: str
    parameters: int
    matrix_parameters: int
    output_parameters: int
    largest_parameter: int
    adapter_inputs_and_outputs: int
    layers: int
    hidden: int
    attention_width: int
    cache_width: int
    vocabulary: int

    def trainable(self, lora_rank: int | None) -> int:
        """Weights that are trained: all, or those of adapters of this rank (arXiv:2106.09685: r x (in + out) each)."""
        return self.parameters if lora_rank is None else lora_rank * self.adapter_inputs_and_outputs


def read_config(policy: str) -> PreTrainedConfig:
    """The architecture of a policy: a name of :data:`NAMED`, a policy folder, or a ``config.json``.

    Raises:
        PlanError: it is none of them.
    """
    if policy in NAMED:
        return _of_fields(dict(NAMED[policy]))
    path = Path(policy)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise PlanError(
            f"policy is {policy}, neither a folder with a config.json, nor such a file, nor one of {', '.join(NAMED)}: "
            "name one of these"
        )
    try:
        return _of_fields(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"policy is {policy}, whose {path.name} describes no model ({error}): name another") from error


def _of_fields(fields: dict[str, Any]) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return config


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """The same architecture with another number of layers."""
    changed = copy.deepcopy(config)
    changed.num_hidden_layers = layers
    if getattr(changed, "layer_types", None):
        changed.layer_types = changed.layer_types[:layers]
    return changed


def empty_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of an architecture, its weights neither read nor initialised; on the device of the context."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


@cache
def read_shape(policy: str) -> Shape:
    """Count the weights of a policy."""
    config = read_config(policy)
    with torch.device("meta"):
        model = empty_model(config)
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not model.get_output_embeddings()]
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Shape(
        name=policy,
        parameters=sum(p.numel() for p in model.parameters()),
        matrix_parameters=sum(m.weight.numel() for m in linear),
        output_parameters=model.get_output_embeddings().weight.numel(),
        largest_parameter=max(p.numel() for p in model.parameters()),
        adapter_inputs_and_outputs=sum(m.in_features + m.out_features for m in linear),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        attention_width=heads * size,
        cache_width=2 * (getattr(config, "num_key_value_heads", None) or heads) * size,
        vocabulary=config.vocab_size,
    )
