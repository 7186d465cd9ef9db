"""The files of a policy folder, read so that a damaged one is an error that names it.

transformers fills a gap where it can: weights that are missing with random numbers, end tokens that are
missing with a guess. A run from such a policy looks like any other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from grpo.output_folders import require_writable
from grpo.rollouts.prompts import TEMPLATE_FILE, PromptTemplate
from grpo.run_identity import PROVENANCE_FILE

MODEL_FILE = "config.json"
ENDS_FILE = "generation_config.json"
MAKE_AGAIN = "make it again with `dvc repro policy` or `grpo policy` (`dvc repro train` where a training made it)"

# What transformers raises for files that it cannot read, or whose values make no model.
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError, StrictDataclassError)
# Names in a message; a folder of another model has hundreds that do not fit.
_SHOWN = 4


class DamagedPolicy(ValueError):
    """Files of a policy folder are missing, broken, or do not belong together."""


class NonFiniteWeights(ValueError):
    """Weights are not finite: nothing can be sampled with them, and nothing is published."""


def require_policy_files(folder: Path) -> None:
    """Refuse a damaged policy folder as far as can be told without loading its weights.

    Raises:
        DamagedPolicy: naming the file and what to do.
    """
    if not (folder / MODEL_FILE).is_file():
        raise DamagedPolicy(f"{folder} is not a policy folder (it has no {MODEL_FILE}): make it with `grpo policy`")
    _require_weight_files(folder)
    read_end_tokens(folder)


def read_template(folder: Path) -> PromptTemplate:
    """The prompt template of a policy folder."""
    path = folder / TEMPLATE_FILE
    if path.is_file():
        fields = _read_object(path)
        if not all(isinstance(value, str) for value in fields.values()):
            raise DamagedPolicy(f"{path} holds {fields}: id and text must be text; {MAKE_AGAIN}")
    return PromptTemplate.load(folder)


def read_end_tokens(folder: Path) -> tuple[int, ...]:
    """The ids that end a completion, as the folder's generation settings declare them."""
    path = folder / ENDS_FILE
    if not path.is_file():
        raise DamagedPolicy(f"{folder} has no {ENDS_FILE}, which declares the end tokens: {MAKE_AGAIN}")
    declared = _read_object(path).get("eos_token_id")
    if declared is None:
        raise DamagedPolicy(f"{path} names no eos_token_id: completions could not end; {MAKE_AGAIN}")
    ids = declared if isinstance(declared, list) else [declared]
    size = getattr(_read_config(folder), "vocab_size", None)
    for token in ids:
        if type(token) is not int or token < 0 or (size is not None and token >= size):
            raise DamagedPolicy(
                f"{path} has the eos_token_id {token!r}: it must be a token of the vocabulary, 0 to "
                f"{'its size' if size is None else size - 1}; {MAKE_AGAIN}"
            )
    return tuple(ids)


def context_length(folder: Path) -> int | None:
    """How many tokens, prompt and completion together, the model has places for; None where it has no such limit.

    Where the positions of a batch are scaled by its longest row (``dynamic``, ``longrope``), what a row gives hangs
    on its neighbours from the original length on: the limit then is that.
    """
    config = _read_config(folder)
    length: int | None = getattr(config, "max_position_embeddings", None)
    rotary = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in (rotary, *rotary.values()) if isinstance(kind, dict)]  # one, or one a kind of layer
    scaled = [kind for kind in kinds if kind.get("rope_type") in ("dynamic", "longrope")]
    lengths = [length, *(kind.get("original_max_position_embeddings") for kind in scaled)]
    return min((one for one in lengths if one is not None), default=None)


def load_whole_tokenizer(folder: Path, remedy: str = MAKE_AGAIN) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder.

    Raises:
        DamagedPolicy: its files are missing or broken.
    """
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():  # a model of the hub may have a tokenizer of another form
            _read_object(folder / name, remedy)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except _UNREADABLE as error:
        raise DamagedPolicy(f"{folder} has no tokenizer that can be read ({_first_line(error)}): {remedy}") from error


def load_whole_model(folder: Path, remedy: str = MAKE_AGAIN) -> PreTrainedModel:
    """The model of a folder in float32, every weight of it from the folder's files, and finite.

    Raises:
        DamagedPolicy: a file is missing or broken, or the weights are not those of config.json's model.
        NonFiniteWeights: naming them.
    """
    _read_object(folder / MODEL_FILE, remedy)
    _require_weight_files(folder, remedy)
    if (folder / ENDS_FILE).is_file():
        _read_object(folder / ENDS_FILE, remedy)
    try:
        # Let through here, to be refused by name: transformers' own error points to a table that it logged.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except _UNREADABLE as error:
        raise DamagedPolicy(f"{folder} holds no model that can be read ({_first_line(error)}): {remedy}") from error
    model: PreTrainedModel
    model, found = loaded
    require_all_weights(found, str(folder), remedy)
    require_finite(model, f"{folder} holds weights that are not finite", remedy)
    return model


def require_all_weights(found: dict[str, Any], place: str, remedy: str) -> None:
    """Refuse a model that transformers had to fill in or leave parts out of.

    Args:
        found: the loading information of ``from_pretrained``; tied weights are not missing there.
        place: where the model came from.
        remedy: what to do about it.
    """
    misfits = [
        f"{label} {_names(names)}"
        for label, names in (
            ("missing are", found["missing_keys"]),
            ("not of this model are", found["unexpected_keys"]),
            ("of another shape are", [name for name, *_ in found["mismatched_keys"]]),
        )
        if names
    ]
    if misfits:
        raise DamagedPolicy(f"the weights of {place} do not fit its {MODEL_FILE}: {'; '.join(misfits)}. {remedy}")


def require_finite(model: PreTrainedModel, what: str, remedy: str) -> None:
    """Refuse weights that are not finite.

    Raises:
        NonFiniteWeights: naming them.
    """
    broken = [name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())]
    if broken:
        raise NonFiniteWeights(f"{what}: {_names(broken)}. {remedy}")


def require_replaceable(folder: Path, key: str) -> None:
    """Refuse to put a policy folder where something else stands, which would be deleted.

    Args:
        folder: where the policy folder will be written.
        key: the setting that names it.

    Raises:
        ValueError: it is a file, a link, a working folder, or holds anything but an earlier policy; or nothing can
            be written there.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"{key} is {folder}, which is a file or a link: name a folder that a policy may be written to")
    if Path.cwd().is_relative_to(folder.resolve()):
        raise ValueError(f"{key} is {folder}, which the command runs in: name a folder of its own for the policy")
    require_writable(folder.parent, key)
    if not folder.is_dir():
        return
    if any(folder.iterdir()) and not all((folder / name).is_file() for name in (TEMPLATE_FILE, PROVENANCE_FILE)):
        raise ValueError(
            f"{key} is {folder}, which holds something else than an earlier policy and would be replaced: "
            "name another folder, or move that away"
        )
    require_writable(folder, key)


def _read_config(folder: Path) -> Any:
    """What config.json says of the language model."""
    _read_object(folder / MODEL_FILE)
    try:
        return AutoConfig.from_pretrained(folder).get_text_config()
    except _UNREADABLE as error:
        message = f"{folder / MODEL_FILE} describes no model ({_first_line(error)}): {MAKE_AGAIN}"
        raise DamagedPolicy(message) from error


def _require_weight_files(folder: Path, remedy: str = MAKE_AGAIN) -> None:
    """Each file of weights is as long as its header says; none of them is read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DamagedPolicy(f"{folder} has no weights (no *.safetensors file): {remedy}")
    for path in files:
        try:
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise DamagedPolicy(f"{path} is cut off or damaged ({_first_line(error)}): {remedy}") from error


def _read_object(path: Path, remedy: str = MAKE_AGAIN) -> dict[str, Any]:
    try:
        parsed: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no UTF-8, or no JSON
        raise DamagedPolicy(f"{path} is damaged ({_first_line(error)}): {remedy}") from error
    if not isinstance(parsed, dict):
        raise DamagedPolicy(f"{path} holds {str(parsed)[:40]}: it must be a JSON object; {remedy}")
    return parsed


def _names(names: Iterable[str]) -> str:
    """The first names in order, and how many more there are."""
    ordered = sorted(names)
    more = len(ordered) - _SHOWN
    return ", ".join(ordered[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
