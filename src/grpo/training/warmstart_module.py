"""A tiny policy from nothing: a few seconds of supervised learning on worked examples.

It gives GRPO something to start from (the right form, some right answers) where a pre-trained model
would be too slow: tests, CI and benchmarks.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

IGNORED = -100


class WarmstartModule(L.LightningModule):
    """Next-token learning of the answers.

    Args:
        model: what is trained.
        learning_rate: at the start; it falls linearly to 0.
        steps: of the whole run.
    """

    def __init__(self, model: LlamaForCausalLM, learning_rate: float, steps: int) -> None:
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate
        self.steps = steps

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy of the answer tokens.

        Args:
            batch: tokens and labels, ``[rows, longest]`` each.
            batch_idx: unused.
        """
        tokens, labels = batch
        logits = self.model(input_ids=tokens).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def warmstart(
    config: LlamaConfig,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[tuple[str, str]],
    steps: int,
    rows: int,
    learning_rate: float,
    seed: int,
) -> LlamaForCausalLM:
    """Train a new model on (prompt, completion) pairs.

    Args:
        config: the architecture.
        tokenizer: its end token closes each completion.
        examples: prompts and what should follow.
        steps: updates.
        rows: examples an update.
        learning_rate: at the start.
        seed: of the weights and of the order.
    """
    with torch.random.fork_rng(devices=[]):  # the caller's own random numbers go on undisturbed
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        gradient_clip_val=1.0,
    )
    batches = ExampleBatches(tokenizer, examples, steps, rows, seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)")  # Lightning's use of torch
        trainer.fit(WarmstartModule(model, learning_rate, steps), batches)
    model.eval()
    return model


class ExampleBatches:
    """Tokens and labels ``[rows, longest]`` of each step; each row's example is drawn by a key of its own.

    Args:
        tokenizer: its end token closes each completion, and pads.
        examples: prompts and what should follow.
        steps: batches.
        rows: examples a batch.
        seed: of the choice.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, examples: Sequence[tuple[str, str]], steps: int, rows: int, seed: int
    ) -> None:
        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False).input_ids)

        self.end = int(tokenizer.eos_token_id)
        self.examples = [(encode(prompt), [*encode(answer), self.end]) for prompt, answer in examples]
        self.steps = steps
        self.rows = rows
        self.seed = seed

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(self.steps):
            yield self._batch([self.examples[self._choice(step, row)] for row in range(self.rows)])

    def _batch(self, chosen: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
        width = max(len(prompt) + len(answer) for prompt, answer in chosen)
        tokens = torch.full((len(chosen), width), self.end)
        labels = torch.full((len(chosen), width), IGNORED)
        for row, (prompt, answer) in enumerate(chosen):
            length = len(prompt) + len(answer)
            tokens[row, :length] = torch.tensor([*prompt, *answer])
            labels[row, len(prompt) : length] = torch.tensor(answer)
        return tokens, labels

    def _choice(self, step: int, row: int) -> int:
        digest = hashlib.blake2b(f"{self.seed}/{step}/{row}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % len(self.examples)
