"""What a program in a sandbox may use, and whether there is a sandbox at all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from grpo.rewards import sandbox_bubblewrap as bubblewrap

Isolation = Literal["bubblewrap", "none_i_accept_that_completions_run_as_me"]


@dataclass(frozen=True)
class Limits:
    """What one program may use; its memory in all is at most processes × memory + scratch."""

    seconds: float = 5.0
    """Wall-clock time from the moment the sandbox is up, however many processes there are."""
    memory_mb: int = 256
    """Address space of each process."""
    processes: int = 8
    """Processes and threads at one time."""
    scratch_mb: int = 16
    """Size of the scratch folder."""
    answer_kb: int = 1024
    """Longest output of a script, and longest answer of a function."""

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            if not 0 < number < math.inf:
                raise ValueError(f"the sandbox's {name} is {number}: give a number above 0")

    def as_arguments(self, *, isolated: bool, trusted: bool = False) -> list[str]:
        """The limits as the guest and the judge take them, who set them for themselves before anything else runs.

        A trusted program's time and processes are left as they are.
        """
        # Without a user of its own the count would take in whatever else that user runs. In a namespace of its
        # own it also counts the sandbox's first process.
        processes = self.processes + bubblewrap.in_user_namespace()
        numbers = {
            "user": bubblewrap.isolated_user() if isolated else 0,
            "address_space": self.memory_mb << 20,
            "cpu": 0 if trusted else math.ceil(self.seconds) + 1,
            "processes": processes if isolated and not trusted else 0,
            "file": self.scratch_mb << 20,
            "open_files": 64,
            "signals": 64,
            "answer": self.answer_kb << 10,
        }
        return [f"{name}={number}" for name, number in numbers.items()]


DEFAULT_LIMITS = Limits()
