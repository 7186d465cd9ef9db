"""The training's side of an engine that samples: whether the two go together, and when it is handed the weights."""

from __future__ import annotations

from pathlib import Path

import lightning as L
from lightning.pytorch.strategies import SingleDeviceStrategy

from grpo.rollouts.engine_settings import EngineSettings
from grpo.rollouts.policies import LoadedPolicy
from grpo.rollouts.sampling import Sampler
from grpo.rollouts.sampling_settings import SamplingSettings
from grpo.rollouts.vllm_engines import InProcess, Server
from grpo.rollouts.vllm_sampling import Engine, VLLMSampler, require_room
from grpo.training.in_step import SamplerInStep
from grpo.training.prompt_group_datamodule import PromptGroupDataModule
from grpo.training.settings import LossSettings
from grpo.training.strategies import all_processes, cuts_up_weights

# In a run's folder: weights on their way to a server.
HANDED_OVER = "handed_over"


def check_engine(engine: EngineSettings, sampling: SamplingSettings, loss: LossSettings, adapted: bool) -> None:
    """Refuse a method that the engine could not carry out as declared.

    Args:
        engine: what draws.
        sampling: how tokens are to be drawn.
        loss: what is learnt from them.
        adapted: whether an adapter is trained.

    Raises:
        ValueError: naming the key, its value and the remedy.
    """
    engine.require_able(sampling)
    if engine.name == "own":
        return
    if loss.old_logprobs == "recorded" and sampling.cuts():
        raise ValueError(
            f"loss.old_logprobs is recorded with engine.name {engine.name} and a cut distribution (sampling.top_p, "
            "top_k or min_p): vLLM tells the probabilities under the cut alone; set loss.old_logprobs to recomputed"
        )
    if adapted:
        raise ValueError(
            f"adapter is given with engine.name {engine.name}: an adapter's weights are not handed over; set "
            "engine.name to own, or adapter to null"
        )


def make_engine(
    module: L.LightningModule, policy: Path, engine: EngineSettings, sampling: SamplingSettings, longest_wait: float
) -> Engine | None:
    """The engine, where it is not the live policy itself; made before a model is loaded.

    Args:
        module: attached to its trainer.
        policy: its folder.
        engine: what draws.
        sampling: how tokens are drawn.
        longest_wait: seconds that a server may go without a word.

    Raises:
        ValueError: the strategy leaves it no room, or has no use for a setting of it; or no server answers.
    """
    strategy = module.trainer.strategy
    if not engine.gather_weights and not cuts_up_weights(module):
        raise ValueError(
            f"engine.gather_weights is false with trainer.strategy {type(strategy).__name__}, where it has no effect: "
            "each process has all weights anyway; set it to true, or train with ZeRO's stage 3 or FSDP2"
        )
    if engine.name == "own":
        return None
    if engine.name == "vllm_server":
        return Server(engine.address, sampling.max_rows, longest_wait)
    if type(strategy) is not SingleDeviceStrategy:
        raise ValueError(
            f"engine.name is vllm with trainer.strategy {type(strategy).__name__}: an engine in the training process "
            "needs torch's process group for itself; set engine.name to vllm_server, or train on one device"
        )
    return InProcess(policy, engine, sampling.max_rows)


def require_rooms(module: L.LightningModule, engine: Engine | None, sampling: SamplingSettings) -> None:
    """Refuse a prompt of any round that leaves no room in the engine; the own sampler has that of the policy.

    Raises:
        ValueError: naming its length and what would make room.
    """
    if engine is not None:
        problems: PromptGroupDataModule = module.trainer.datamodule  # type: ignore[attr-defined]
        require_room(problems.prompts(), sampling.max_new_tokens, engine.context)


def require_same_engine(engine: Engine | None, before: str | None) -> None:
    """Refuse to go on from a state with another engine than made it: their draws and probabilities differ.

    Args:
        engine: None for the live policy itself.
        before: name of the engine until then.

    Raises:
        ValueError: naming both, and what to do.
    """
    now = None if engine is None else engine.name
    if now != before:
        raise ValueError(
            f"the run was sampled by {before} until its newest state, and engine.name gives {now} now: go on with the "
            "engine that it began with, of that version and precision, or set runs to another folder, to begin anew"
        )


def make_sampler(
    module: L.LightningModule, loaded: LoadedPolicy, engine: Engine | None, sampling: SamplingSettings, gathered: bool
) -> Sampler | VLLMSampler:
    """What draws the module's completions; made before the strategy cuts the policy up.

    Args:
        module: attached to its trainer, whose folder names the run.
        loaded: with all weights.
        engine: None for the live policy itself.
        sampling: how tokens are drawn.
        gathered: whether ``loaded`` goes on having all weights in each process.
    """
    parts = loaded.model, loaded.tokenizer, loaded.end_token_ids, sampling
    if engine is None:
        return Sampler(*parts) if gathered else SamplerInStep(*parts, module)
    # By the first process's name for it: it hands over, and the others ask for what it handed over.
    run = all_processes(str(Path(module.trainer.default_root_dir).resolve() / HANDED_OVER))[0]
    return VLLMSampler(engine, *parts, run)


def hand_over(module: L.LightningModule, sampler: Sampler | VLLMSampler) -> None:
    """Give an engine the weights as they are now; in all processes at once, of which the first has the word.

    This project's own sampler draws from the live policy, and needs nothing.
    """
    if isinstance(sampler, VLLMSampler):
        if module.trainer.is_global_zero:
            sampler.hand_over(module.trainer.global_step)
        module.trainer.strategy.barrier()
