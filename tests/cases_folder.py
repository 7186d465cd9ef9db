"""Published data and collected cases that are no part of this repository: found by a variable, or skipped.

``GRPO_CASES`` names their folder; by default it lies beside the repository, under the name ``shared``.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from import_graph import REPOSITORY


def cases_file(name: str) -> Path:
    """The file, or a skip that says where it was looked for."""
    path = Path(os.environ.get("GRPO_CASES", REPOSITORY.parent / "shared")) / name
    if not path.is_file():
        pytest.skip(f"{name} is not there: set GRPO_CASES to the folder that holds it")
    return path


def cases(name: str) -> list[dict[str, Any]]:
    """The rows of a JSONL file, packed or not."""
    path = cases_file(name)
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in text.decode("utf-8").splitlines()]
