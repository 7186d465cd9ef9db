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
        cut_up: whether the strategy leaves each process a part of every weight.
        copied: whether there is a copy then.
    """

    def __init__(self, trained: PreTrainedModel, cut_up: bool, copied: bool) -> None:
        self.trained = trained
        self.model = copy.deepcopy(trained).requires_grad_(False) if cut_up and copied else trained
        self._empty = _without_weights(trained) if cut_up and not copied else None

    @property
    def is_whole(self) -> bool:
        return self._empty is None

    @torch.no_grad()
    def gather(self, here: bool) -> None:
        """Put the trained weights together once, in the host's memory, where there is no copy.

        Args:
            here: whether this process keeps them; all have to take part.
        """
        if self._empty is None:
            return
        whole = _with_room(self._empty, self.trained) if here else None
        rooms = None if whole is None else list(whole.parameters())
        for i, weight in enumerate(self.trained.parameters()):
            with _put_together(weight):
                values = weight.full_tensor() if isinstance(weight, DTensor) else weight
                if rooms is not None:
                    rooms[i].copy_(values)
        if whole is not None:
            self.model, self._empty = whole, None

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


def _without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The same layers on the meta device, where weights have no bytes."""
    empty = copy.deepcopy(model).requires_grad_(False)
    module: torch.nn.Module = empty
    module.to("meta")
    empty.tie_weights()  # they part on their way to another device
    return empty


def _with_room(empty: PreTrainedModel, like: PreTrainedModel) -> PreTrainedModel:
    """Room for the weights of ``like``, whose buffers each process has whole."""
    module: torch.nn.Module = empty
    module.to(dtype=next(like.parameters()).dtype).to_empty(device="cpu")
    empty.tie_weights()
    for mine, theirs in zip(empty.buffers(), like.buffers(), strict=True):
        mine.copy_(theirs)
    return empty


def _put_together(weight: Parameter, changed: bool = False) -> AbstractContextManager[None]:
    """Within it the weight is whole; what was changed is cut up again as the first process has it."""
    if not hasattr(weight, "ds_id"):
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    gathered: AbstractContextManager[None] = GatheredParameters([weight], modifier_rank=0 if changed else None)
    return gathered
