"""What the benchmarks share: the work, the two trainers as processes that take turns, tables.

Threads that wait for the next piece of work leave their loop within microseconds and sleep, here and in every process
that is started from here: one that idles must not take the other's processor. OpenMP reads this when torch is loaded.
Everything runs on the processor: DeepSpeed, which Lightning loads, need not look for another device and say so.
"""

import os

WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
QUIET = {"DS_ACCELERATOR": "cpu", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
os.environ.update(WAITING | QUIET)
