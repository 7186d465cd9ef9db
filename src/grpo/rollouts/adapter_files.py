"""An adapter apart from its model: its settings, its weights, and the folder in PEFT's format that holds both."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo.run_identity import policy_digest

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Which policy the weights stand beside. A file of its own: PEFT warns of what it does not know in its own, and two
# entries in the weights' metadata come in no fixed order.
BASE = "base_policy.json"
# What a folder's configuration may have otherwise: it says where the adapter came from, how it was trained, or which
# layers it stands on, which its weights say too.
_OF_NO_MATTER = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "layers_pattern",
        "layers_to_transform", "lora_dropout", "megatron_core", "peft_version", "revision", "runtime_config",
        "target_modules", "task_type",
    }
)  # fmt: skip
# Other beginnings change the frozen weights as well.
_PLAIN_STARTS = (True, False, "gaussian")


@dataclass(frozen=True)
class AdapterSettings:
    """Train an adapter of low rank beside the frozen weights (LoRA, arXiv:2106.09685).

    It has no dropout: that would draw another adapter at every pass, and the ratio would compare two of them.

    Args:
        rank: of the two factors whose product stands beside a layer's weights.
        alpha: the product counts alpha / rank.
        target_modules: the linear layers that get one, by the last part of their names (``q_proj``) or more of it;
            null for all but the output layer.
        start: folder of an adapter of this form, in PEFT's format, to begin with; it is the reference then. null
            begins with one that changes nothing, and the reference is the policy without it.
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] | None = None
    start: Path | None = None

    def check(self) -> None:
        """Refuse what cannot work. Not when it is made: where null may stand, the parser hides what is raised then.

        Raises:
            ValueError: naming the key, its value and what to do.
        """
        for name in ("rank", "alpha"):  # the parser lets null through
            if getattr(self, name) is None:
                raise ValueError(f"adapter.{name} is null: give a number, or leave the key out for the default")
        if self.rank < 1:
            raise ValueError(f"adapter.rank is {self.rank}: it must be at least 1 (8 to 64 is usual)")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"adapter.alpha is {self.alpha}: it must be positive and finite (twice the rank is usual)")
        if self.target_modules is not None and not self.target_modules:
            raise ValueError("adapter.target_modules is []: name a layer, or give null for all but the output layer")
        if self.start is not None:
            _require_form(self.start, self)

    def form(self) -> dict[str, Any]:
        """What an adapter's weights mean something with, in plain values; :meth:`of_form` takes it."""
        targets = None if self.target_modules is None else list(self.target_modules)
        return {"rank": self.rank, "alpha": self.alpha, "target_modules": targets}

    @classmethod
    def of_form(cls, form: Mapping[str, Any]) -> AdapterSettings:
        targets = form["target_modules"]
        return cls(form["rank"], form["alpha"], None if targets is None else tuple(targets))


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter's numbers.

    Args:
        settings: its form.
        factors: of each layer by its full name: ``A [rank, in]`` and ``B [out, rank]``, float32.
        base: the policy folder that it was trained beside, where that is known.
    """

    settings: AdapterSettings
    factors: dict[str, tuple[Tensor, Tensor]]
    base: Path | None = None

    def product(self, layer: str) -> Tensor:
        """What the adapter adds to a layer's weights, ``[out, in]``."""
        first, second = self.factors[layer]
        return (second @ first) * (self.settings.alpha / self.settings.rank)

    def require_shapes(self, expected: Mapping[str, tuple[torch.Size, torch.Size]], what: str, remedy: str) -> None:
        """Refuse an adapter of other layers, or of layers of other widths.

        Args:
            expected: shapes of the factors by layer.
            what: begins the message.
            remedy: ends it.

        Raises:
            ValueError: naming layers.
        """
        found = {name: (first.shape, second.shape) for name, (first, second) in self.factors.items()}
        if found != expected:
            missing, beyond = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
            other = [name for name in sorted(expected.keys() & found.keys()) if found[name] != expected[name]]
            raise ValueError(
                f"{what}: it lacks {missing[:2]}, has {beyond[:2]} besides, and {other[:2]} are of other shapes; "
                f"{remedy}"
            )

    def save(self, folder: Path) -> None:
        """Write a folder that PEFT and transformers load.

        Args:
            folder: is made.
        """
        folder.mkdir()
        layers = sorted(self.settings.target_modules or {name.rpartition(".")[2] for name in self.factors})
        config = lora_config(self.settings, layers)
        config.base_model_name_or_path = None if self.base is None else str(self.base)
        config.inference_mode = True
        config.task_type = "CAUSAL_LM"
        config.target_modules = layers  # PEFT keeps a set, which it would write in another order each time
        config.save_pretrained(str(folder))
        tensors = {
            f"{_PREFIX}{name}.lora_{factor}.weight": weight.contiguous()
            for name, pair in self.factors.items()
            for factor, weight in zip("AB", pair, strict=True)
        }
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        if self.base is not None:
            (folder / BASE).write_text(json.dumps({"sha256": policy_digest(self.base)}) + "\n", encoding="utf-8")


def lora_config(settings: AdapterSettings, layers: Sequence[str]) -> LoraConfig:
    """PEFT's words for an adapter on these layers."""
    from peft import LoraConfig

    alpha: object = settings.alpha  # PEFT says int, and divides it by the rank
    return LoraConfig(r=settings.rank, lora_alpha=alpha, target_modules=list(layers), lora_dropout=0.0)  # type: ignore[arg-type]


def read_adapter(settings: AdapterSettings) -> AdapterWeights | None:
    """The adapter to begin with, None without one.

    Raises:
        ValueError: the folder's files cannot be read, or are of an adapter of another kind.
    """
    if settings.start is None:
        return None
    _require_kind(settings.start, settings)
    path = settings.start / WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"adapter.start is {settings.start}, whose {WEIGHTS} cannot be read ({error})") from error
    broken = [name for name, w in tensors.items() if not (w.is_floating_point() and bool(w.isfinite().all()))]
    names = {name.removeprefix(_PREFIX).rsplit(".lora_", 1)[0] for name in tensors}
    pairs = {name: tuple(f"{_PREFIX}{name}.lora_{factor}.weight" for factor in "AB") for name in names}
    if broken or {name for pair in pairs.values() for name in pair} != tensors.keys():
        raise ValueError(
            f"adapter.start is {settings.start}, whose {WEIGHTS} holds other weights than pairs of finite factors: "
            "name an adapter of linear layers alone"
        )
    return AdapterWeights(settings, {name: (tensors[a].float(), tensors[b].float()) for name, (a, b) in pairs.items()})


def require_beside(settings: AdapterSettings, policy: Path) -> None:
    """Refuse an adapter to begin with that was published beside another policy; PEFT's own say nothing of theirs.

    A policy that holds the adapter already is another one: it would have it twice.

    Args:
        settings: of the adapter.
        policy: folder of the policy that it is put into.

    Raises:
        ValueError: naming both.
    """
    if settings.start is None or not (settings.start / BASE).is_file():
        return
    beside = json.loads((settings.start / BASE).read_text(encoding="utf-8"))["sha256"]
    if beside != policy_digest(policy):
        config = json.loads((settings.start / CONFIG).read_text(encoding="utf-8"))
        raise ValueError(
            f"adapter.start is {settings.start}, which was trained beside another policy than data.policy = {policy} "
            f"(beside {config.get('base_model_name_or_path')}; the policy published with an adapter holds it already): "
            "name that policy as data.policy, or set adapter.start to null"
        )


def _require_form(folder: Path, settings: AdapterSettings) -> None:
    """What can be told without PEFT: the files are there, and of this rank and alpha."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"adapter.start is {folder}, which has no {name}: name an adapter's folder, PEFT's format")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        theirs = {"rank": config["r"], "alpha": config["lora_alpha"]}
        if not all(isinstance(value, int | float) for value in theirs.values()):
            raise TypeError(f"no numbers: {theirs}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"adapter.start is {folder}, whose {CONFIG} describes no LoRA adapter ({error!r})") from error
    for name, value in theirs.items():
        if value != getattr(settings, name):
            raise ValueError(
                f"adapter.{name} is {getattr(settings, name)}, and that of adapter.start = {folder} is {value}: set "
                f"adapter.{name} to {value}"
            )


def _require_kind(folder: Path, settings: AdapterSettings) -> None:
    """Plain LoRA, as it is trained here, by everything that its configuration says."""
    from peft import PeftConfig

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Unexpected keyword arguments")  # they are looked at below
            theirs = PeftConfig.from_pretrained(str(folder)).to_dict()
        written = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"adapter.start is {folder}, whose configuration PEFT does not read ({error!r})") from error
    # What this version of PEFT does not know it leaves out, and what is off does not matter.
    theirs |= {name: value for name, value in written.items() if name not in theirs and value}
    plain = lora_config(settings, ()).to_dict()
    beginning = theirs.pop("init_lora_weights", True)
    other = [n for n in theirs if n not in _OF_NO_MATTER and (n not in plain or theirs[n] != plain[n])]
    if other or beginning not in _PLAIN_STARTS:
        named = {n: theirs[n] for n in other} if other else {"init_lora_weights": beginning}
        raise ValueError(f"adapter.start is {folder}, an adapter of another kind than plain LoRA: it has {named}")
