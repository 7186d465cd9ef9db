"""TRL's ``GRPOTrainer`` as a worker: ``python -m common.trl_worker WORK TUNING``.

Where its times are taken: *rollout* is ``_generate`` (tokenising, transformers' ``generate``, cutting at the end token,
decoding), *reward* is ``_calculate_rewards``, and *update* is all the rest between ``on_step_begin`` and
``on_step_end``: padding, the reference's pass, loss, backward, clipping, the optimiser's step. What is left of a
round, from one ``on_step_end`` to the next, is the loading of data and logging.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-untyped]
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]

from common.our_worker import make_data
from common.turns import Turns, memory_mib
from common.work import REWARDS, Tuning, Work
from grpo.records import Problem
from grpo.rollouts.policies import load_tokenizer


class TimedTrainer(GRPOTrainer):
    """Its own methods do the work; their times and what they returned are kept."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: Counter[str] = Counter()

    def _generate(self, prompts: list[str]) -> Any:
        start = time.perf_counter()
        outputs = super()._generate(prompts)
        self.seen["rollout"] += time.perf_counter() - start  # type: ignore[assignment]
        self.seen["tokens"] += sum(len(tokens) for tokens in outputs[1])
        self.prompt_tokens = outputs[0]
        return outputs

    def _calculate_rewards(self, *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        rewards = super()._calculate_rewards(*args, **options)
        self.seen["reward"] += time.perf_counter() - start  # type: ignore[assignment]
        self.seen["mean_reward"] = float(rewards.mean())  # type: ignore[assignment]
        return rewards


class Told(TrainerCallback):
    """Replies with what a round took, and waits for the next command."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.trainer: TimedTrainer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.turns.reply(ready=True, loaded_mib=memory_mib("VmRSS"))
        self._wait(control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.trainer is not None
        seen, step = self.trainer.seen, time.perf_counter() - self.begun
        update = step - seen["rollout"] - seen["reward"]
        prompt_tokens = sum(map(len, self.trainer.prompt_tokens))
        round_seconds = self.turns.seconds()
        self.turns.reply(
            round=round_seconds, update=update, record=0.0, peak_mib=memory_mib(), prompt_tokens=prompt_tokens, **seen
        )
        seen.clear()
        self._wait(control)

    def _wait(self, control: Any) -> None:
        assert self.trainer is not None
        command = self.turns.next()
        while command["do"] == "save":
            self.trainer.model.save_pretrained(command["folder"])  # type: ignore[union-attr, operator]
            self.turns.reply(saved=True)
            command = self.turns.next()
        control.should_training_stop = command["do"] == "end"


class TrlReward:
    """The workload's reward, as TRL calls one."""

    __name__ = "reward"

    def __init__(self, work: Work) -> None:
        self.check = REWARDS[work.reward]

    def __call__(self, completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
        pairs = zip(completions, answer, strict=True)
        return [self.check(Problem("", "", gold, ""), text).value for text, gold in pairs]


def prompts_in_order(work: Work) -> Dataset:
    """The prompts of every round, those and in the order that this project's trainer takes them."""
    data = make_data(work)
    data.setup("fit")
    groups = [group for batch in data.train_rounds for group in batch.groups]
    return Dataset.from_dict(
        {"prompt": [group.prompt_text for group in groups], "answer": [group.problem.answer for group in groups]}
    )


def make_config(work: Work, tuning: Tuning, folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        per_device_train_batch_size=tuning.micro_batch,
        gradient_accumulation_steps=work.rows // tuning.micro_batch,
        num_generations=work.group_size,
        max_completion_length=work.max_new_tokens,
        max_steps=work.rounds,
        temperature=1.0,
        loss_type="grpo",
        beta=work.kl_beta,
        use_bias_correction_kl=False,
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        seed=work.seed,
        model_init_kwargs={"dtype": "float32"},
    )


def serve(work: Work, tuning: Tuning, folder: str) -> None:
    """Train round by round, as told."""
    turns = Turns()
    torch.set_num_threads(tuning.threads)
    tokenizer, _ = load_tokenizer(Path(work.policy))
    told = Told(turns)
    trainer = TimedTrainer(
        model=work.policy,
        reward_funcs=TrlReward(work),
        args=make_config(work, tuning, folder),
        train_dataset=prompts_in_order(work),
        processing_class=tokenizer,
        callbacks=[told],
    )
    told.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        serve(Work.loads(sys.argv[1]), Tuning(**json.loads(sys.argv[2])), scratch)
