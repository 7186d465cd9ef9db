"""Imports go downward through the layers of docs/architecture.md, and each library stays in its rooms."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from import_graph import ImportGraph, read_imports

GRAPH = read_imports()

# The layer of a room. What is not listed is L5: the stages and commands, and what only they use.
LAYERS = {
    "grpo.records": 0,
    "grpo.problem_files": 0,
    "grpo.run_identity": 0,
    "grpo.whole_files": 0,
    "grpo.output_folders": 0,
    "grpo.described": 0,
    "grpo.maths": 1,
    "grpo.answer_intervals": 1,
    "grpo.answer_metrics": 1,
    "grpo.rewards": 2,
    "grpo.answer_readings": 2,
    "grpo.code_scorer": 2,
    "grpo.scorers": 2,
    "grpo.loophole_probes": 2,
    "grpo.rollouts": 3,
    "grpo.training": 4,
}
# The lowest layer in which a library may be imported.
LOWEST = {
    "torch": 1,
    "transformers": 3,
    "tokenizers": 3,
    "gguf": 3,
    "peft": 3,
    "lightning": 4,
    "pytorch_lightning": 4,
    "deepspeed": 4,
    "vllm": 3,
    "wandb": 4,
    "dvc": 4,
}
# A library in a room below its layer, with the reason.
EXCEPTIONS = {
    ("grpo.rewards.reward_model", "transformers"): "a learned reward is a model; nothing else of rewards/ needs one",
}


def layer(module: str) -> int:
    return next((LAYERS[room] for room in LAYERS if module == room or module.startswith(f"{room}.")), 5)


def is_package_root(module: str) -> bool:
    """``grpo`` itself is above no layer and below none; it must import nothing (tested below)."""
    return module == "grpo"


def is_command(path: Path) -> bool:
    """A stage or command: a module that defines ``main``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)


def upward_imports(graph: ImportGraph) -> list[str]:
    return [
        f"{module} (L{layer(module)}) imports {target} (L{layer(target)})"
        for module in graph.files
        if not is_package_root(module)
        for target in graph.internal(module)
        if not is_package_root(target) and layer(target) > layer(module)
    ]


def misplaced_libraries(graph: ImportGraph) -> list[str]:
    return [
        f"{module} (L{layer(module)}) imports {library}, which belongs in L{LOWEST[library]} and above"
        for module in graph.files
        for library in graph.external(module)
        if layer(module) < LOWEST.get(library, 0) and (module, library) not in EXCEPTIONS
    ]


def test_imports_go_downward() -> None:
    assert upward_imports(GRAPH) == []


def test_libraries_stay_in_their_layers() -> None:
    assert misplaced_libraries(GRAPH) == []


def test_every_exception_is_needed() -> None:
    """And only where it is named: a room that imports the exception's would run its library unawares."""
    for module, library in EXCEPTIONS:
        assert library in GRAPH.external(module)
        assert [room for room in GRAPH.files if module in GRAPH.internal(room)] == []


def test_commands_do_not_import_each_other() -> None:
    commands = {module for module, path in GRAPH.files.items() if is_command(path) and module != "grpo.__main__"}
    crossings = {module: GRAPH.internal(module) & commands for module in commands}
    assert {module: targets for module, targets in crossings.items() if targets} == {}


def test_the_package_root_imports_nothing() -> None:
    """Whatever it imported would run before every room, and under every stage."""
    assert GRAPH.internal("grpo") == set()
    assert GRAPH.external("grpo") <= {"__future__"}


def test_every_listed_room_exists() -> None:
    missing = [room for room in LAYERS if room not in GRAPH.files]
    assert missing == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("maths/loss.py", "from grpo.rollouts import sampling", "grpo.maths.loss (L1) imports grpo.rollouts"),
        ("maths/loss.py", "def f():\n    from ..training import module", "grpo.maths.loss (L1) imports grpo.training"),
        ("records.py", "import torch.nn as nn", "grpo.records (L0) imports torch"),
        ("rewards/answer.py", "from transformers import AutoModel", "grpo.rewards.answer (L2) imports transformers"),
    ],
)
def test_a_breach_is_seen(tmp_path: Path, file: str, text: str, complaint: str) -> None:
    for folder in ("", "maths", "rewards", "rollouts", "training"):
        (tmp_path / "grpo" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "grpo" / folder / "__init__.py").write_text("")
    (tmp_path / "grpo" / file).write_text(text)
    graph = read_imports(tmp_path)
    found = upward_imports(graph) + misplaced_libraries(graph)
    assert len(found) == 1
    assert found[0].startswith(complaint)
