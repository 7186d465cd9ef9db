"""A training's saved state as a policy folder, which transformers loads and ``grpo evaluate`` judges.

``grpo export --checkpoint runs/ID/checkpoints/update-12.ckpt --policy build/policy --output build/exported`` takes the
weights from the state, sharded or not, and everything else (tokenizer, template, end tokens) from the policy folder
that the training began with. An adapter of the state is added to the folder's weights. A finished run needs none of
this: what it publishes is such a folder already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser
from torch import Tensor

from grpo.rollouts.adapter_files import AdapterSettings
from grpo.rollouts.adapters import merge, weights_of_state
from grpo.rollouts.policies import LoadedPolicy, load_policy, save_policy
from grpo.rollouts.policy_files import require_policy_files, require_replaceable
from grpo.run_identity import policy_digest

POLICY_PREFIX = "policy."


class ExportError(ValueError):
    """A state of which no policy can be made."""


@dataclass(frozen=True)
class ExportSettings:
    """What becomes of what."""

    checkpoint: Path
    """A state that a training saved: a file, or under DeepSpeed a folder."""
    policy: Path
    """The policy folder that the training began with."""
    output: Path
    """The policy folder to write; an earlier policy there is replaced."""


def main(argv: list[str]) -> None:
    """The ``grpo export`` command."""
    parser = ArgumentParser(prog="grpo export", description=__doc__)
    parser.add_argument("--config", action="config", help="a file of these settings")
    parser.add_class_arguments(ExportSettings)
    values = parser.parse_args(argv)
    export(ExportSettings(values.checkpoint, values.policy, values.output))


def export(settings: ExportSettings) -> None:
    """Write the policy folder.

    Raises:
        ExportError: the state is not there, cannot be read, or is of another model.
    """
    require_policy_files(settings.policy)
    require_replaceable(settings.output, "output")
    weights = policy_weights(settings.checkpoint)
    adapter = adapter_form(settings.checkpoint)
    base = policy_digest(settings.policy)
    if adapter is not None and adapter["base_policy_sha256"] != base:
        raise ExportError(
            f"checkpoint {settings.checkpoint} holds an adapter that was trained beside another policy than "
            f"{settings.policy}: name the policy that the training began with"
        )
    loaded = load_policy(settings.policy)
    if adapter is None:
        _fill(loaded.model, weights, settings)
    else:
        loaded = _with_adapter(loaded, weights, adapter, settings)
    provenance = {"exported_from": settings.checkpoint.name, "base_policy_sha256": base}
    save_policy(settings.output, loaded, provenance)
    print(f"grpo export: {settings.output} holds the policy of {settings.checkpoint}")


def policy_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The policy's weights in float32, by their names in the model.

    Raises:
        ExportError: there is no such state, or it cannot be read.
    """
    if not checkpoint.exists():
        raise ExportError(f"checkpoint is {checkpoint}, which is not there: a run keeps its newest state alone")
    try:
        state = _sharded_state(checkpoint) if checkpoint.is_dir() else _whole_state(checkpoint)
    # What a cut-off or foreign file raises is any of pickle's, zipfile's and torch's own errors.
    except Exception as error:
        raise ExportError(f"checkpoint is {checkpoint}, which is no state of a training: {error!s:.200}") from error
    named = {n.removeprefix(POLICY_PREFIX): w.float() for n, w in state.items() if n.startswith(POLICY_PREFIX)}
    if not named:
        raise ExportError(f"checkpoint is {checkpoint}, which holds no policy: it is of another kind of training")
    return named


def adapter_form(checkpoint: Path) -> dict[str, Any] | None:
    """What the state says of the adapter that it holds; None where all weights were trained."""
    # DeepSpeed writes what is no weight into a file for each process, the same into all of them.
    file = min(checkpoint.rglob("*model_states.pt")) if checkpoint.is_dir() else checkpoint
    saved: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=not checkpoint.is_dir())
    found: dict[str, Any] | None = saved.get("adapter")
    return found


def _whole_state(file: Path) -> dict[str, Tensor]:
    saved: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    state: dict[str, Tensor] = saved["state_dict"]
    return state


def _sharded_state(folder: Path) -> dict[str, Tensor]:
    """DeepSpeed's parts of the float32 weights, put together on this machine whatever their number."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    state: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    return state


def _fill(model: torch.nn.Module, weights: dict[str, Tensor], settings: ExportSettings) -> None:
    """Every weight of the model from the state; a tied one may stand there under either of its names."""
    missing, unexpected = model.load_state_dict(weights, strict=False)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    given = {parameters[name] for name in weights.keys() & parameters.keys()}
    lacking = [name for name in missing if parameters.get(name) not in given]
    if lacking or unexpected:
        raise ExportError(
            f"checkpoint {settings.checkpoint} is not of the model in {settings.policy}: "
            f"missing {lacking[:3]}, not of this model {unexpected[:3]}; name the policy that the training began with"
        )


def _with_adapter(
    policy: LoadedPolicy, weights: Mapping[str, Tensor], form: Mapping[str, Any], settings: ExportSettings
) -> LoadedPolicy:
    """The policy that the training began with, and the state's adapter in its weights."""
    adapter = replace(weights_of_state(weights, AdapterSettings.of_form(form)), base=settings.policy)
    try:
        merge(adapter, policy.model)
    except ValueError as error:
        message = f"checkpoint {settings.checkpoint} is not of the model in {settings.policy}: {error}"
        raise ExportError(message) from error
    return replace(policy, adapter=adapter)
