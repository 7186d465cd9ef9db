"""Small policies, problems and rewards that the tests share: random weights, made in milliseconds."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from grpo.problem_files import write_problems
from grpo.records import Problem, PromptGroup, Rollout, RolloutKey, Score, ScoredRollout
from grpo.rollouts.adapter_files import AdapterSettings, AdapterWeights
from grpo.rollouts.adapters import put_adapter, trained_weights
from grpo.rollouts.policies import LoadedPolicy, save_policy
from grpo.rollouts.prompts import PromptTemplate
from grpo.train import EXPECTED_WARNINGS
from grpo.training.checkpoints import newest_checkpoint
from grpo.training.grpo_module import GRPOModule
from grpo.training.prompt_group_datamodule import PromptGroupDataModule
from grpo.training.run_loggers import RoundCSVLogger
from grpo.training.tiny_policy import character_tokenizer

TOKENIZER = character_tokenizer()
TEMPLATE = PromptTemplate("bare", "{question}")


def random_llama(seed: int = 0, spread: float = 0.1, layers: int = 2) -> LlamaForCausalLM:
    """32 wide; a larger spread of the weights makes it surer of its tokens."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=spread,
        tie_word_embeddings=True,
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def policy_folder(folder: Path, seed: int = 0, spread: float = 0.1, layers: int = 2) -> Path:
    """A policy folder of random weights, which ends a completion at a new line too."""
    ends = (TOKENIZER.eos_token_id, *TOKENIZER("\n").input_ids)
    model = random_llama(seed, spread, layers)
    model.generation_config = GenerationConfig(eos_token_id=list(ends), pad_token_id=ends[0], do_sample=True)
    save_policy(folder, LoadedPolicy(model, TOKENIZER, TEMPLATE, ends), {"made": "for tests"})
    return folder


def adapter_folder(folder: Path, settings: AdapterSettings, spread: float = 0.1) -> Path:
    """An adapter of random factors beside the tests' policy, as a supervised training would leave one.

    Args:
        folder: where to.
        settings: its form.
        spread: of the second factors, which a fresh adapter has at zero.
    """
    model = random_llama()
    put_adapter(model, settings, seed=3, own_reference=False)
    generator = torch.Generator().manual_seed(5)
    pairs = trained_weights(model, settings).factors
    factors = {name: (a, spread * torch.randn(b.shape, generator=generator)) for name, (a, b) in pairs.items()}
    AdapterWeights(settings, factors).save(folder)
    return folder


def problems(count: int, prefix: str = "p") -> list[Problem]:
    """Sums of two numbers, their questions of uneven lengths."""
    return [Problem(f"{prefix}{i:02d}", f"{i * i} + {i} =", str(i * i + i), "sums") for i in range(count)]


def problem_folder(folder: Path, train: int = 6, validation: int = 2) -> Path:
    folder.mkdir()
    write_problems(folder / "train.jsonl", problems(train))
    write_problems(folder / "validation.jsonl", problems(validation, "v"))
    return folder


def prompt(question: str, name: str = "p", occurrence: int = 0) -> PromptGroup:
    problem = Problem(name, question, "1", "sums")
    return PromptGroup(problem, "bare", question, tuple(TOKENIZER(question).input_ids), occurrence)


def key(name: str = "p", seed: int = 1) -> RolloutKey:
    return RolloutKey(seed, "train", 0, name, "bare")


def scored_group(
    rewards: Sequence[float | None], lengths: Sequence[int] | None = None, name: str = "p", question: str = "1+1="
) -> list[ScoredRollout]:
    """Members with these rewards (None: not scored) and completion lengths; all but the last token are letters."""
    members = []
    for i, reward in enumerate(rewards):
        length = 3 if lengths is None else lengths[i]
        tokens = (*(20 + (i + j) % 10 for j in range(length - 1)), TOKENIZER.eos_token_id)
        text = TOKENIZER.decode(tokens[:-1])
        rollout = Rollout(
            key(name).of_member(i), prompt(question, name), tokens, text, tuple(-0.5 for _ in tokens), "end_token"
        )
        score = Score(reward) if reward is not None else Score.unscorable("the checker failed")
        members.append(ScoredRollout(rollout, {"made": score}, reward))
    return members


def share_of_lower_case(_: Problem, completion: str) -> Score:
    """A toy reward that a policy of random weights can climb at once."""
    return Score(sum(c.islower() for c in completion) / max(1, len(completion)))


def starts_with_a_letter(_: Problem, completion: str) -> Score:
    """A toy reward that is all or nothing, so that small groups often are flat."""
    return Score(float(completion[:1].isalpha()))


# Training proves its rewards on known answers first; these know none.
for toy in (share_of_lower_case, starts_with_a_letter):
    toy.graded_on_gold = False  # type: ignore[attr-defined]


class KeepsState(L.Callback):
    """Sets a run's newest state aside, which goes when the run is published.

    Args:
        to: where.
    """

    def __init__(self, to: Path) -> None:
        self.to = to

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:  # the first process may have published before another comes here
            newest = newest_checkpoint(Path(trainer.default_root_dir))
            assert newest is not None
            if newest.is_dir():
                shutil.copytree(newest, self.to)
            else:
                shutil.copyfile(newest, self.to)


class CountsExchanges(L.Callback):
    """Writes how often gradients went between processes under DDP, beside the number of updates.

    Args:
        to: the file, ``exchanges updates``.
    """

    def __init__(self, to: Path) -> None:
        self.to = to
        self.exchanges = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Bare: torch compares annotations with its own class, and here they are text.
        hook = lambda state, bucket: self._exchange(state, bucket)  # noqa: E731
        trainer.strategy.model.register_comm_hook(None, hook)  # type: ignore[union-attr, operator]

    def _exchange(self, state: None, bucket: GradBucket) -> Future[Tensor]:
        self.exchanges += bucket.is_last()
        return allreduce_hook(state, bucket)  # type: ignore[arg-type]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self.to.write_text(f"{self.exchanges} {trainer.global_step}")


class DiesOnce:
    """The toy reward, until it ends its process on the spot; not once ``marker`` says that it did.

    Args:
        marker: is made then.
        calls: how many go well in a process.
    """

    graded_on_gold = False

    def __init__(self, marker: Path, calls: int) -> None:
        self.marker = marker
        self.calls = calls

    def __call__(self, problem: Problem, completion: str) -> Score:
        self.calls -= 1
        if self.calls < 0 and not self.marker.exists():
            self.marker.touch()
            os._exit(3)
        return share_of_lower_case(problem, completion)


def fit(module: GRPOModule, data: PromptGroupDataModule, folder: Path, **options: Any) -> L.Trainer:
    """Train as the train stage does, without its command line."""
    with warnings.catch_warnings():
        for message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=RoundCSVLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            **options,
        )
        trainer.fit(module, data)
    return trainer


def train_config(folder: Path, **data: Any) -> dict[str, Any]:
    """The train stage's configuration for a run of a second or two, below ``folder``."""
    policy = folder / "policy"
    return {
        "seed_everything": 1,
        "output": str(folder / "output"),
        "runs": str(folder / "runs"),
        "checkpoint_every_n_updates": 2,
        "wandb": {"mode": "disabled"},
        "model": {
            "rewards": {"lower_case": {"check": "fixtures_policy.share_of_lower_case", "limit_seconds": None}},
            "sampling": {"max_new_tokens": 6},
            "round": {"group_size": 4},
            "optimizer": {"learning_rate": 1e-3, "micro_batch_rows": 4},
        },
        "data": {
            "policy": str(policy if policy.exists() else policy_folder(policy)),
            "problems": str(
                folder / "problems" if (folder / "problems").exists() else problem_folder(folder / "problems")
            ),
            "rounds": 6,
            "groups_per_round": 2,
            **data,
        },
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "val_check_interval": 0.5,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
    }


def write_config(path: Path, config: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return str(path)


def leaning_policy_folder(folder: Path, favoured: str, by: float = 2.0) -> Path:
    """A policy folder of random weights that makes each of these characters likelier than it would be.

    One coordinate of the residual stream is the same for every token and nothing writes to it, so that it
    works as the bias that the output layer does not have.

    Args:
        folder: where to.
        favoured: characters.
        by: nats, about.
    """
    model = random_llama()
    config = LlamaConfig(**model.config.to_dict() | {"tie_word_embeddings": False})
    untied = LlamaForCausalLM(config).eval()
    untied.load_state_dict(model.state_dict())
    with torch.no_grad():
        untied.lm_head.weight[:] = model.lm_head.weight.clone()
        untied.model.embed_tokens.weight[:, 0] = 1.0
        for layer in untied.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        untied.lm_head.weight[TOKENIZER(favoured).input_ids, 0] += (
            by / 2.0
        )  # the last norm leaves about 2 at that coordinate
    ends = (TOKENIZER.eos_token_id, *TOKENIZER("\n").input_ids)
    untied.generation_config = GenerationConfig(eos_token_id=list(ends), pad_token_id=ends[0], do_sample=True)
    save_policy(folder, LoadedPolicy(untied, TOKENIZER, TEMPLATE, ends), {"made": "for tests"})
    return folder
