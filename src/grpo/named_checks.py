"""Rewards and scorers by the names one types."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, cast

from grpo import rewards, scorers
from grpo.rewards import Reward
from grpo.scorers import Scorer, load_scorer


class UnknownCheck(ValueError):
    """There is no reward or scorer of this name; the message lists those that there are."""


def load_reward(name: str) -> Reward:
    """The reward at a dotted path, or of a module of ``grpo.rewards``, such as ``math_answer`` or ``code_tests``.

    A class is made with its defaults; with others it belongs into a config of components.

    Raises:
        UnknownCheck: there is none.
    """
    try:
        found = resolve_name(name) if "." in name else _of_module(name)
    except (ValueError, ImportError, AttributeError) as error:
        raise UnknownCheck(
            f"reward is {name!r}, which is not there ({error}): choose one of {', '.join(reward_names())}, or give "
            "the dotted path of a function (problem, completion) -> Score"
        ) from error
    if inspect.isclass(found):
        try:
            found = found()
        except TypeError as error:
            raise UnknownCheck(f"reward is {name!r}, a class that needs arguments ({error}): give --config") from error
    if not callable(found):
        raise UnknownCheck(f"reward is {name!r}, which is no function: name one, (problem, completion) -> Score")
    return cast(Reward, found)


def named_scorer(name: str) -> Scorer:
    """The scorer at a dotted path, or of this name in ``grpo.scorers``.

    Raises:
        UnknownCheck: there is none.
    """
    if "." in name:
        return load_scorer(name)
    if name not in scorer_names():
        raise UnknownCheck(
            f"scorer is {name!r}, which is not there: choose one of {', '.join(scorer_names())}, or give the dotted "
            "path of a function (problem, answer) -> Score"
        )
    return cast(Scorer, getattr(scorers, name))


def reward_names() -> list[str]:
    """The modules of ``grpo.rewards`` that hold a reward under their own name."""
    return sorted(each.name for each in pkgutil.iter_modules(rewards.__path__) if _is_reward(each.name))


def scorer_names() -> list[str]:
    """The functions of ``grpo.scorers`` that take a problem and an answer."""
    functions = inspect.getmembers(scorers, inspect.isfunction)
    return sorted(name for name, each in functions if _parameters(each) == ["problem", "answer"])


def _of_module(name: str) -> Any:
    """What a module of ``grpo.rewards`` holds under its own name, or as a class: ``CodeTests`` of ``code_tests``."""
    module = import_module(f"{rewards.__name__}.{name}")
    own = getattr(module, name, None)
    return own if own is not None else getattr(module, "".join(map(str.capitalize, name.split("_"))))


def _is_reward(name: str) -> bool:
    try:
        found = _of_module(name)
    except (ImportError, AttributeError):  # no such thing in it, or it needs a package that is not installed
        return False
    call = vars(found).get("__call__") if inspect.isclass(found) else found
    return [each for each in _parameters(call) if each != "self"] == ["problem", "completion"]


def _parameters(check: object) -> list[str]:
    if not callable(check) or inspect.isclass(check):
        return []
    return list(inspect.signature(cast(Callable[..., Any], check)).parameters)
