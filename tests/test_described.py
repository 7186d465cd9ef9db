"""Settings in the record: every argument of every shipped check can be told from it, and nothing else."""

from __future__ import annotations

import inspect
import json
import pkgutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from grpo import rewards
from grpo.code_scorer import CodePassesTests
from grpo.described import described, settings_of
from grpo.problem_sources import prepared_files
from grpo.rewards import RewardComponent, code_tests
from grpo.rewards.exact_answer import exact_answer
from grpo.rewards.length import Length
from grpo.rewards.tagged_format import InTags, TaggedFormat

NO_ISOLATION = "none_i_accept_that_completions_run_as_me"
# For each argument two values, of which the first goes with the first of the others.
VALUES: dict[str, dict[str, tuple[Any, Any]]] = {
    "CodePassesTests": {
        "limit_seconds": (1.0, 2.0),
        "memory_mb": (64, 128),
        "processes": (2, 3),
        "isolation": (NO_ISOLATION, "bubblewrap"),
    },
    "CodeTests": {
        "limit_seconds": (1.0, 2.0),
        "memory_mb": (64, 128),
        "partial_credit": (False, True),
        "isolation": (NO_ISOLATION, "bubblewrap"),
        "processes": (2, 3),
    },
    "CoinFlip": {"seed": (1, 2), "chance": (0.5, 0.25)},
    "InTags": {
        "check": (exact_answer, Length([(1, 1)])),
        "think": ("think", "plan"),
        "answer": ("answer", "result"),
        "thought_begun": (False, True),
        "malformed": (0.0, 1.0),
    },
    "LanguageModelJudge": {
        "url": ("http://localhost:1/v1", "http://localhost:2/v1"),
        "model": ("one", "two"),
        "cache": (Path("one"), Path("two")),
        "key_variable": (None, "KEY"),
        "instructions": ("Be kind.", "Be strict."),
        "seed": (0, 1),
        "max_tokens": (None, 9),
        "time_limit": (1.0, 2.0),
        "retries": (1, 2),
        "concurrency": (1, 2),
        "settings": (None, {"top_p": 0.5}),
    },
    "Length": {"shape": ([(1, 0.5)], [(1, 0.25)]), "unit": ("words", "characters")},
    "MathAnswer": {"limit_seconds": (1.0, 2.0), "style": ("any", "boxed")},
    "NumericAnswer": {"absolute_tolerance": (0.1, 0.2), "relative_tolerance": (0.1, 0.2)},
    "ReasoningGymGrader": {
        "task": (None, "chain_sum"),
        "strict_form": (True, False),
        "partial_marks": (False, True),
        "evaluate_answers": (False, True),
    },
    "RewardModel": {
        "model": ("one", "two"),
        "template": ("chat", "{question} {completion}"),
        "revision": ("1" * 40, "2" * 40),
        "label": (None, 1),
        "max_tokens": (None, 9),
        "batch_size": (1, 2),
        "device": ("cpu", "cuda"),
        "dtype": ("float32", "bfloat16"),
    },
    "TaggedFormat": {"think": ("think", "plan"), "answer": ("answer", "result"), "thought_begun": (False, True)},
}


def checks() -> dict[str, type]:
    """Every shipped class whose objects judge completions or answers."""
    modules = [import_module(f"{rewards.__name__}.{each.name}") for each in pkgutil.iter_modules(rewards.__path__)]
    found: dict[str, type] = {"CodePassesTests": CodePassesTests}
    for module in modules:
        for name, kind in inspect.getmembers(module, inspect.isclass):
            call = vars(kind).get("__call__")
            parameters = list(inspect.signature(call).parameters) if call is not None else []
            if kind.__module__ == module.__name__ and parameters == ["self", "problem", "completion"]:
                found[name] = kind
    return found


CHECKS = checks()
ARGUMENTS = [(name, argument) for name, values in VALUES.items() for argument in values]


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of programs is described on machines that could not run one, too."""
    monkeypatch.setattr(code_tests, "require", lambda _: None)


def test_every_argument_of_every_check_is_tried() -> None:
    arguments = {name: set(inspect.signature(kind).parameters) - {"workers"} for name, kind in CHECKS.items()}
    assert arguments == {name: set(values) for name, values in VALUES.items()}


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_an_argument_is_in_the_record(name: str, argument: str) -> None:
    usual = {each: first for each, (first, _) in VALUES[name].items()}
    other = usual | {argument: VALUES[name][argument][1]}
    texts = [
        json.dumps(prepared_files.described(RewardComponent(CHECKS[name](**each)))) for each in (usual, usual, other)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert not any(word in text for text in texts for word in (" at 0x", "object at", "_pool", "_replies"))


def test_how_settings_are_said() -> None:
    assert settings_of(Length([(200, 1), (400, 0)])) == {
        "init_args": {"unit": "words"},
        "kept": {"lengths": [200, 400], "values": [1, 0]},
    }
    tags = {
        "class_path": "grpo.rewards.tagged_format.Tags",
        "think": "plan",
        "answer": "answer",
        "thought_begun": False,
    }
    assert settings_of(TaggedFormat("plan")) == {"kept": {"tags": tags}}
    inner = InTags(Length([(1, 1)]), "plan")
    assert settings_of(inner) == {
        "init_args": {
            "check": {
                "class_path": "grpo.rewards.length.Length",
                "init_args": {"unit": "words"},
                "kept": {"lengths": [1], "values": [1]},
            },
            "malformed": 0.0,
        },
        "kept": {"tags": tags},
    }
    assert settings_of(exact_answer) == {}


class Kept:
    """An object without a constructor of its own, and with state for its own use."""

    __slots__ = ("_cache", "limit")

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._cache = object()


def test_objects_of_a_fork() -> None:
    assert described(Kept(2.0)) == {"class_path": f"{__name__}.Kept", "init_args": {"limit": 2.0}}
    assert described({"a": {3, 1}, "b": Path("x/y"), "c": object}) == {
        "a": [1, 3],
        "b": "x/y",
        "c": "builtins.object",
    }
    assert described(object()) == "builtins.object"
