"""Trainings one after the other, each as ``grpo train`` makes it: starting Python takes longer than most of them."""

from __future__ import annotations

import sys

import wandb

from grpo import train


def train_each(configs: list[str]) -> None:
    for config in configs:
        train.main(["--config", config])
        wandb.finish()  # or the next training would go on with this one's run


if __name__ == "__main__":
    train_each(sys.argv[1:])
