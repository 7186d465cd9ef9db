"""What a training of an adapter does otherwise than one of all weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from grpo.rollouts.adapter_files import AdapterSettings
from grpo.rollouts.adapters import REFERENCE, TRAINED, adapter_parameters, merge, put_adapter, trained_weights
from grpo.rollouts.policies import LoadedPolicy, load_policy
from grpo.training.settings import LossSettings
from grpo.training.whole_policy import copy_weights


def add_adapter(policy: PreTrainedModel, settings: AdapterSettings, loss: LossSettings, seed: int) -> None:
    """Put the adapter into the policy, and a frozen one beside it where the reference is not the policy without any.

    Args:
        policy: as it was loaded; changed in place.
        settings: of the adapter.
        loss: says whether there is a reference, and whether it is renewed.
        seed: of the run.

    Raises:
        ValueError: naming the key of a setting that does not fit the policy.
    """
    moves = settings.start is not None or loss.reference_refresh_rounds is not None
    put_adapter(policy, settings, seed, own_reference=moves and loss.kl_beta > 0)


def renew_reference(whole: PreTrainedModel, policy: PreTrainedModel) -> None:
    """The reference's adapter becomes the trained one, in every process at once.

    Args:
        whole: the policy with all its weights in each process.
        policy: the policy that is trained, which is also the reference.
    """
    trained, reference = adapter_parameters(whole, TRAINED), adapter_parameters(policy, REFERENCE)
    copy_weights(trained.values(), reference.values())


def frozen_weights(policy: PreTrainedModel, renewed: bool) -> dict[str, Tensor]:
    """What is in the policy folder, or in the adapter that the run began with, and in no kept state; by name.

    Args:
        policy: with its adapter.
        renewed: whether the reference's adapter is another one by now, so that it must be kept.
    """
    adapters = (TRAINED, REFERENCE) if renewed else (TRAINED,)
    kept = {name for adapter in adapters for name in adapter_parameters(policy, adapter)}
    return {name: weight for name, weight in policy.state_dict().items() if name not in kept}


def with_adapter_merged(folder: Path, trained: PreTrainedModel, settings: AdapterSettings) -> LoadedPolicy:
    """What is published: the policy folder, read again, with the adapter in its weights.

    Args:
        folder: that the training began with.
        trained: the policy with all its weights, the adapter apart from them.
        settings: of the adapter.
    """
    plain = load_policy(folder)
    adapter = replace(trained_weights(trained, settings), base=folder)
    merge(adapter, plain.model)
    return replace(plain, adapter=adapter)
