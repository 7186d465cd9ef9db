"""Where a round's time goes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """Wall-clock seconds of the phases of a round."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._inside: str | None = None
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside as ``name``, on top of what is counted already."""
        assert self._inside is None, f"phase {name} starts inside {self._inside}: its seconds would count twice"
        self._inside = name
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self._inside = None

    def metrics(self) -> dict[str, float]:
        """Seconds of each phase, of the round since the clock was made, and of ``other``: the round less the phases."""
        whole = time.perf_counter() - self._start
        seconds = {**self.seconds, "other": whole - math.fsum(self.seconds.values()), "round": whole}
        return {f"seconds/{name}": value for name, value in seconds.items()}
