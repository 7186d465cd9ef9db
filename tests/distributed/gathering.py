"""Uneven trainings that sample with a whole copy of the cut-up policy, and with none, in the same pair of processes.

Each process runs this script; how a training went goes to ``FOLDER/WAY/SITUATION.RANK.json``.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import situations
import torch
from fixtures_processes import CutsUpEveryWeight
from situations import LIMIT_SECONDS, RANK, Run
from torch import Tensor

from grpo.rollouts.engine_settings import EngineSettings
from grpo.rollouts.sampling import SamplingSettings
from grpo.train import EXPECTED_WARNINGS
from grpo.training.settings import RoundSettings

# Passes that try a model's shared prompts, which one that is to be cut up has made before; and the pass after them in
# which all that a process holds is counted, which takes its time.
TRIAL, LOOK = 10, 5
WAYS = {"gathered": True, "cut_up": False}


class Held(L.Callback):
    """What a training holds in the midst of a pass that samples, and how many passes without a gradient there are."""

    def __init__(self) -> None:
        self.before = self.bytes = self.passes = self.look = self.all_weights = 0
        self.own_model = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        gc.collect()
        self.before = bytes_held()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        sampled = pl_module.sampler.model
        self.own_model = sampled is pl_module.policy and pl_module.whole.model is pl_module.policy
        self.all_weights = sum(getattr(w, "ds_numel", w.numel()) for w in pl_module.policy.parameters())
        self.look = LOOK if self.own_model else TRIAL + LOOK
        sampled.model.layers[1].register_forward_hook(self._count)

    def _count(self, layer: torch.nn.Module, inputs: Any, output: Any) -> None:
        if not layer.training and not torch.is_grad_enabled():
            self.passes += 1
            if self.passes == self.look:
                self.bytes = bytes_held() - self.before


def bytes_held() -> int:
    """Under all tensors of floating-point numbers in this process, each storage once."""
    found = [thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in found if tensor.is_floating_point()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@dataclass
class Sampled(Run):
    """A training that samples in one of the two ways."""

    gathered: bool = True
    held: Held = field(default_factory=Held)

    def fit(self, *args: Any, callbacks: Sequence[L.Callback] = (), **settings: Any) -> None:
        callbacks = [CutsUpEveryWeight(), self.held, *callbacks]
        super().fit(*args, callbacks=callbacks, engine=EngineSettings(gather_weights=self.gathered), **settings)


def the_likeliest_tokens(run: Run) -> None:
    run.fit(sampling=SamplingSettings(max_new_tokens=8, top_k=1), round=RoundSettings(group_size=4, flat_groups="keep"))
    run.verdict.own = len(run.rows())


def completions_of_very_different_lengths(run: Run) -> None:
    run.fit(sampling=SamplingSettings(max_new_tokens=24 if RANK else 2))
    run.verdict.own = len(run.rows())


SITUATIONS = (
    the_likeliest_tokens,
    completions_of_very_different_lengths,
    situations.flat_groups_in_one_process_kept_with_a_reference,
    situations.draws_again_in_one_process,
    situations.fewer_validation_problems_than_processes,
)


def main(folder: Path, strategy: str, *names: str) -> None:
    torch.set_num_threads(1)
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)
    for situation in SITUATIONS:
        for way, gathered in WAYS.items():
            if names and situation.__name__ not in names:
                continue
            faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
            run = Sampled(folder / way / situation.__name__, strategy, gathered=gathered)
            run.folder.mkdir(parents=True, exist_ok=True)
            situation(run)
            verdict = asdict(run.verdict) | {
                name: vars(run.held)[name] for name in ("bytes", "passes", "own_model", "all_weights")
            }
            (folder / way / f"{situation.__name__}.{RANK}.json").write_text(json.dumps(verdict))
            print(situation.__name__, way, RANK, verdict, flush=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
