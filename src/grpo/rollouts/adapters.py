"""Adapters of low rank beside a policy's frozen weights (LoRA, arXiv:2106.09685).

The layers are PEFT's, put into the model itself: its class stays, and all that samples, scores and trains works on it
as it stands. The reference is the same model with the adapter off, or with the frozen one that the training began with.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from grpo.rollouts.adapter_files import (
    AdapterSettings,
    AdapterWeights,
    lora_config,
    read_adapter,
    require_beside,
)

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

# Names of the adapters in the layers: the one that is trained, and the one that the reference has, where it has one.
TRAINED = "default"
REFERENCE = "reference"


def adapted_layers(model: PreTrainedModel, settings: AdapterSettings) -> list[str]:
    """Full names of the linear layers that get an adapter; never the output layer, which may share its weights.

    Args:
        model: without an adapter.
        settings: name the layers, or leave it at all of them.

    Raises:
        ValueError: a name that no such layer has, or there is none at all.
    """
    output = model.get_output_embeddings()
    linear = [name for name, module in model.named_modules() if isinstance(module, Linear) and module is not output]
    wanted = settings.target_modules
    if not linear:
        raise ValueError(
            f"adapter is given, and {type(model).__name__} has no linear layers but its output's: set adapter to null"
        )
    unknown = [target for target in wanted or () if not any(_is_named(name, target) for name in linear)]
    if unknown:
        there = sorted({name.rpartition(".")[2] for name in linear})
        raise ValueError(
            f"adapter.target_modules is {None if wanted is None else list(wanted)}, and of these {unknown} are no "
            f"linear layers of the policy, or its output layer, which gets none; name some of {there}"
        )
    return [name for name in linear if wanted is None or any(_is_named(name, target) for target in wanted)]


def _is_named(layer: str, target: str) -> bool:
    """By the layer's whole name, or its last parts."""
    return layer == target or layer.endswith(f".{target}")


def require_fit(policy: Path, settings: AdapterSettings) -> None:
    """Refuse an adapter that cannot be put into a policy, before the policy is loaded.

    Args:
        policy: its folder.
        settings: of the adapter.

    Raises:
        ValueError: the policy has no such layers, or what is begun with cannot be read, stands on others, or was
            trained beside another policy.
    """
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(policy))
    _layers_and_start(shape, settings)
    require_beside(settings, policy)


def put_adapter(model: PreTrainedModel, settings: AdapterSettings, seed: int, own_reference: bool) -> None:
    """Put an adapter into the model's layers and freeze all other weights.

    Args:
        model: on the processor, whole; changed in place.
        settings: of the adapter.
        seed: of the first factor, which no other random number depends on, and which depends on none; the second is
            zero, so that the adapter changes nothing yet.
        own_reference: whether a frozen adapter is put beside it, which begins as the same and is the reference's.

    Raises:
        ValueError: the model has no such layers, or what is begun with cannot be read or stands on others.
    """
    layers, start = _layers_and_start(model, settings)
    for adapter in (REFERENCE, TRAINED) if own_reference else (TRAINED,):
        _inject(model, adapter, lora_config(settings, layers), seed)
        if start is not None:
            _fill(model, adapter, start)
    for layer in _lora_layers(model).values():
        layer.set_adapter(TRAINED)


def _layers_and_start(model: PreTrainedModel, settings: AdapterSettings) -> tuple[list[str], AdapterWeights | None]:
    """The layers that get an adapter, and what is begun with, which fits them."""
    layers = adapted_layers(model, settings)
    start = read_adapter(settings)
    if start is not None:
        remedy = "name an adapter of this policy, and its layers as adapter.target_modules"
        start.require_shapes(_shapes(model, layers, settings.rank), f"adapter.start is {settings.start}", remedy)
    return layers, start


def _inject(model: PreTrainedModel, adapter: str, config: LoraConfig, seed: int) -> None:
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # the second adapter is meant
        torch.default_generator.manual_seed(seed)  # the processor's alone
        inject_adapter_in_model(config, model, adapter)


@torch.no_grad()
def _fill(model: PreTrainedModel, adapter: str, weights: AdapterWeights) -> None:
    for name, layer in _lora_layers(model).items():
        for mine, theirs in zip(_factors(layer, adapter), weights.factors[name], strict=True):
            mine.copy_(theirs)


def _shapes(model: PreTrainedModel, layers: Sequence[str], rank: int) -> dict[str, tuple[torch.Size, torch.Size]]:
    """Of the two factors of each layer."""
    weights: dict[str, Any] = {name: model.get_submodule(name).weight for name in layers}
    return {name: (torch.Size((rank, w.shape[1])), torch.Size((w.shape[0], rank))) for name, w in weights.items()}


@contextmanager
def as_reference(model: PreTrainedModel) -> Iterator[None]:
    """Within it the model is the reference: its adapter is the reference's own, or off. For passes without a gradient.

    Args:
        model: with an adapter.
    """
    layers = list(_lora_layers(model).values())
    for layer in layers:
        if REFERENCE in layer.lora_A:
            layer.set_adapter(REFERENCE, inference_mode=True)
        else:
            layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
            layer.set_adapter(TRAINED)


def adapter_parameters(model: PreTrainedModel, adapter: str) -> dict[str, Parameter]:
    """The factors of one adapter by their names in the model; none where the model has no such adapter."""
    mine = {id(factor) for layer in _lora_layers(model).values() for factor in _factors(layer, adapter)}
    return {name: weight for name, weight in model.named_parameters() if id(weight) in mine}


def trained_weights(model: PreTrainedModel, settings: AdapterSettings) -> AdapterWeights:
    """The trained adapter apart from its model, float32 on the processor."""
    factors = {}
    for name, layer in _lora_layers(model).items():
        first, second = (factor.detach().float().cpu() for factor in _factors(layer, TRAINED))
        factors[name] = (first, second)
    return AdapterWeights(settings, factors)


def weights_of_state(state: Mapping[str, Tensor], settings: AdapterSettings) -> AdapterWeights:
    """The trained adapter of a saved state, whose names are those of the adapted model."""
    first, second = (f".lora_{factor}.{TRAINED}.weight" for factor in "AB")
    layers = [name.removesuffix(first) for name in state if name.endswith(first)]
    pairs = {name: (state[name + first], state[name + second]) for name in layers if name + second in state}
    return AdapterWeights(settings, pairs)


@torch.no_grad()
def merge(adapter: AdapterWeights, model: PreTrainedModel) -> None:
    """Add an adapter to the weights that it was trained beside, so that it is needed no more.

    Args:
        adapter: what to add.
        model: of the same policy folder, without an adapter; changed in place.

    Raises:
        ValueError: the adapter is of another model.
    """
    layers = adapted_layers(model, adapter.settings)
    remedy = "name the policy that the training began with"
    adapter.require_shapes(_shapes(model, layers, adapter.settings.rank), "the adapter is of another model", remedy)
    for name in layers:
        weight: Any = model.get_submodule(name).weight
        weight += adapter.product(name).to(weight)


def _lora_layers(model: PreTrainedModel) -> dict[str, LoraLayer]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _factors(layer: LoraLayer, adapter: str) -> tuple[Parameter, ...]:
    """``A [rank, in]`` and ``B [out, rank]`` of a layer; none where it has no such adapter."""
    pairs: tuple[Any, Any] = (layer.lora_A, layer.lora_B)
    return tuple(part[adapter].weight for part in pairs if adapter in part)
