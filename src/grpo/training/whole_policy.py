"""All weights of the policy in one process, to sample with and to publish, whatever the strategy cuts up."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter
from transformers import PreTrainedModel


class WholePolicy:
    """The trained model itself where each process has all of it, else a copy that follows it, where one is wanted.

    At ZeRO's stage 3, and under FSDP2, a pass of the trained model is a collective call for each layer, and completions
    that end at different lengths would leave processes waiting for each other, or mix their weights up. The copy costs
    each process the weights once more, and no message while it samples. Without it see
    :class:`grpo.training.in_step.SamplerInStep`; the model here then is the trained one, until it is gathered.

    No ``Module``, which the strategy would cut up with the rest.

    Args:
        trained: before the strategy has it.
        copied: whether there is a copy: of use where the strategy leaves each process a part of every weight.
    """

    def __init__(self, trained: PreTrainedModel, copied: bool) -> None:
        self.trained = trained
        self.model = copy.deepcopy(trained).requires_grad_(False) if copied else trained

    @torch.no_grad()
    def gather(self, into: PreTrainedModel) -> None:
        """Put the trained weights together in a model made as theirs was, where it lies, in every process at once."""
        model: torch.nn.Module = into.requires_grad_(False)
        model.to(dtype=next(self.trained.parameters()).dtype)
        copy_weights(self.trained.parameters(), into.parameters())
        self.model = into

    @torch.no_grad()
    def follow(self) -> None:
        """Take over the trained weights, in every process at once; one is whole at a time."""
        if self.model is self.trained:
            return
        like = next(self.trained.parameters())
        model: torch.nn.Module = self.model
        model.to(device=like.device, dtype=like.dtype)
        copy_weights(self.trained.parameters(), self.model.parameters())


@torch.no_grad()
def copy_weights(source: Iterable[Parameter], to: Iterable[Parameter]) -> None:
    """Copy weight by weight; a collective call where either side is cut up."""
    source, to = list(source), list(to)
    for weights in (source, to):
        kinds = {isinstance(weight, DTensor) for weight in weights}
        assert len(kinds) <= 1, "some weights of a cut-up model are whole: it was not cut up again after its last pass"
    for theirs, mine in zip(source, to, strict=True):
        with _put_together(theirs), _put_together(mine, changed=True):
            whole = theirs.full_tensor() if isinstance(theirs, DTensor) else theirs
            if isinstance(mine, DTensor):
                whole = distribute_tensor(whole, mine.device_mesh, mine.placements)
            mine.copy_(whole)


def _put_together(weight: Parameter, changed: bool = False) -> AbstractContextManager[None]:
    """Within it the weight is whole; what was changed is cut up again as the first process has it."""
    if not hasattr(weight, "ds_id"):
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    gathered: AbstractContextManager[None] = GatheredParameters([weight], modifier_rank=0 if changed else None)
    return gathered
