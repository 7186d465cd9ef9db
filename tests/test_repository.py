"""The habits of the repository itself: pins, telemetry, workflows, file sizes, what must not stand in it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from import_graph import REPOSITORY
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LARGEST_BYTES = 5_000_000
# Joined here, so that this file does not hold what it looks for.
REGISTRY_HOSTS = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("files", "pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("registry", "npmjs", "org"),
        ("deb", "debian", "org"),
    )
]
# Switches for what the tools would send or fetch by themselves.
TELEMETRY = {
    "DO_NOT_TRACK",
    "DVC_NO_ANALYTICS",
    "DVC_STUDIO_OFFLINE",
    "HF_HUB_DISABLE_TELEMETRY",
    "HF_HUB_DISABLE_UPDATE_CHECK",
    "HF_HUB_OFFLINE",
    "ITERATIVE_DO_NOT_TRACK",
    "OTEL_SDK_DISABLED",
    "WANDB_ERROR_REPORTING",
    "WANDB_MODE",
}


def text(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def repository_files() -> list[Path]:
    """What git holds or would take in, so that a new file counts before it is committed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, check=True, text=True,
    )  # fmt: skip
    files = (REPOSITORY / name for name in listed.stdout.split("\0") if name)
    return [path for path in files if path.is_file()]


def readable_files() -> list[tuple[Path, str]]:
    found = []
    for path in repository_files():
        data = path.read_bytes()
        if b"\0" not in data and path.suffix != ".svg":
            found.append((path, data.decode("utf-8")))
    return found


def pins() -> dict[str, str]:
    lines = [line for line in text("constraints.txt").splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def hashes() -> dict[str, list[str]]:
    """The lines below each pin of constraints-hashes.txt."""
    joined = text("constraints-hashes.txt").replace("\\\n", "").splitlines()
    words = [line.split() for line in joined if not line.startswith("#")]
    assert len({pin for pin, *_ in words}) == len(words)
    return {pin: found for pin, *found in words}


def requirements() -> list[Requirement]:
    project = tomllib.loads(text("pyproject.toml"))["project"]
    extras = project["optional-dependencies"].values()
    return [Requirement(line) for group in (project["dependencies"], *extras) for line in group]


def workflow_files() -> list[Path]:
    return sorted((REPOSITORY / ".github/workflows").glob("*.yml"))


def exported() -> dict[str, str]:
    return dict(re.findall(r"^export (\w+) [:?]= (\S+)$", text("Makefile"), flags=re.MULTILINE))


def test_no_registry_is_named() -> None:
    named = [(path.name, host) for path, content in readable_files() for host in REGISTRY_HOSTS if host in content]
    assert named == []


def test_no_path_of_this_machine_is_named() -> None:
    # Folders that every such system has are named for other reasons; a clone right below one is told by its own path.
    common = REPOSITORY.parent in map(Path, ("/home", "/mnt", "/opt", "/root", "/srv", "/tmp", "/usr", "/var"))
    here = f"{REPOSITORY}/" if common else f"{REPOSITORY.parent}/"
    if len(REPOSITORY.parts) <= 2:
        pytest.skip(f"{here} is too short to tell a path of this machine from any other text")
    assert [path.name for path, content in readable_files() if here in content] == []


def test_no_large_file_outside_the_datastore() -> None:
    large = [
        (path.relative_to(REPOSITORY).as_posix(), path.stat().st_size)
        for path in repository_files()
        if path.stat().st_size > LARGEST_BYTES and "datastore" not in path.relative_to(REPOSITORY).parts
    ]
    assert large == []


def test_constraints_are_plain_pins() -> None:
    """One version a line and nothing else: no address, hash, marker, or local version such as +cpu."""
    lines = [line for line in text("constraints.txt").splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9A-Za-z.!]+", line)] == []
    assert len({canonicalize_name(line.partition("==")[0]) for line in lines}) == len(lines)


def test_every_pin_but_torch_has_its_hashes() -> None:
    pinned = {f"{name}=={version}" for name, version in pins().items() if name != "torch"}
    assert hashes().keys() == pinned, "constraints-hashes.txt and constraints.txt disagree: run `make constraints`"
    assert [pin for pin, found in hashes().items() if not found] == []
    words = [word for found in hashes().values() for word in found]
    assert [word for word in words if not re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", word)] == []


@pytest.mark.parametrize(
    ("constraint", "refusal"),
    [
        ("example==1.0 --hash=sha256:{own}", None),
        ("example==1.0 --hash=sha256:{other}", "DO NOT MATCH THE HASHES"),
        ("another==1.0 --hash=sha256:{other}", "--require-hashes"),
    ],
    ids=["own", "other", "none"],
)
def test_pip_holds_files_to_the_hashes_of_constraints(constraint: str, refusal: str | None, tmp_path: Path) -> None:
    """The Makefile relies on it, and pip before 26.1 did not."""
    wheel = tmp_path / "example-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("example-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: example\nVersion: 1.0\n")
        archive.writestr("example-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("example-1.0.dist-info/RECORD", "")
    digests = {"own": sha256(wheel.read_bytes()).hexdigest(), "other": "0" * 64}
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(constraint.format(**digests), encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--find-links", str(tmp_path)]
    ran = subprocess.run(
        [*pip, "--constraint", str(constraints), "example>=0.5"],
        env={"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"},
        capture_output=True,
        check=False,
        text=True,
    )
    assert (ran.returncode == 0) == (refusal is None), ran.stderr
    assert (refusal or "") in ran.stderr


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_every_dependency_is_pinned_in_its_range(requirement: Requirement) -> None:
    version = pins().get(canonicalize_name(requirement.name))
    assert version is not None, f"{requirement.name} has no pin: run `make constraints`"
    assert requirement.specifier.contains(version), f"{requirement} and {version} disagree: run `make constraints`"


def test_the_cuda_build_is_pinned_too() -> None:
    """Pins frozen on a machine without a GPU would let these float on one with it."""
    assert {"triton", "cuda-toolkit", "nvidia-nccl-cu13", "nvidia-cudnn-cu13"} <= pins().keys()


def test_installed_versions_are_the_pinned_ones() -> None:
    from importlib.metadata import distributions

    pinned = pins()
    installed = {canonicalize_name(dist.metadata["Name"]): dist.version.partition("+")[0] for dist in distributions()}
    differing = {n: (v, pinned[n]) for n, v in installed.items() if n in pinned and v != pinned[n]}
    assert differing == {}, "installed and pinned versions differ: run `make setup`"
    assert installed.keys() - pinned.keys() - {"grpo"} == set(), "installed and not pinned: run `make constraints`"


def test_the_makefile_keeps_the_tools_quiet() -> None:
    assert exported().keys() >= TELEMETRY


def test_the_switches_are_the_same_everywhere() -> None:
    """`make`, a bare `pytest` and a bare command in the image run under the same environment."""
    from conftest import SWITCHES

    made = exported()
    differing = {name: (value, made.get(name)) for name, value in SWITCHES.items() if made.get(name) != value}
    assert differing == {}, "conftest.py and Makefile disagree"
    image = dict(re.findall(r"^ +(\w+)=(\S+)(?: \\)?$", text("Dockerfile"), flags=re.MULTILINE))
    absent = {
        name: (value, image.get(name)) for name, value in made.items() if name != "PATH" and image.get(name) != value
    }
    assert absent == {}, "Dockerfile and Makefile disagree"


def test_dvc_keeps_quiet_and_has_its_remote() -> None:
    import configparser

    config = configparser.ConfigParser()
    config.read_string("\n".join(line.strip() for line in text(".dvc/config").splitlines()))
    assert config["core"]["analytics"] == "false"
    assert config["core"]["check_update"] == "false"
    assert config[f"'remote \"{config['core']['remote']}\"'"]["url"] == "../datastore"


def test_dvc_ignores_what_running_leaves_behind() -> None:
    assert {"__pycache__", "*.egg-info"} <= set(text(".dvcignore").splitlines())


@pytest.mark.parametrize("path", workflow_files(), ids=lambda path: path.stem)
def test_workflows_pin_their_actions_and_ask_for_little(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    used = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert [action for action in used if not re.fullmatch(r"[\w./-]+@v\d+", action)] == []


def commands_of(name: str) -> list[str]:
    jobs: dict[str, Any] = yaml.safe_load(text(f".github/workflows/{name}.yml"))["jobs"]
    return [line.strip() for job in jobs.values() for step in job["steps"] for line in step.get("run", "").splitlines()]


def test_the_check_workflow_runs_what_a_contributor_runs() -> None:
    assert commands_of("check") == ["bash .ci/run"]


def test_the_gpu_workflow_is_started_by_hand() -> None:
    # YAML reads the bare key `on` as true.
    assert list(yaml.safe_load(text(".github/workflows/gpu.yml"))[True]) == ["workflow_dispatch"]
    assert "make test-gpu" in commands_of("gpu")


def test_every_make_target_that_is_named_exists() -> None:
    """In .ci/run, the workflows and the documents: a renamed target leaves no stale command behind."""
    targets = set(re.findall(r"^([a-z][a-z-]*):", text("Makefile"), flags=re.MULTILINE))
    # Inline code, or a line that is a command and nothing else (a variable or a comment may follow).
    command = re.compile(
        r"`make ([a-z-]+)|^ *(?:- run: |\$ )?make ([a-z-]+)(?: +(?:[A-Z_]+=|#).*)?$", flags=re.MULTILINE
    )
    named = {
        (path.name, target)
        for path, content in readable_files()
        if path.suffix in {".md", ".yml"} or path.name == "run"
        for target in (inline or line for inline, line in command.findall(content))
    }
    assert {("run", "test"), ("run", "lint"), ("run", "types"), ("run", "repro-tiny")} <= named
    assert sorted(pair for pair in named if pair[1] not in targets) == []


def test_ci_stops_at_the_first_failure() -> None:
    assert "set -euo pipefail" in text(".ci/run")
    assert "|| true" not in text(".ci/run")


def test_every_marker_is_declared() -> None:
    """Those of tests that are deselected by default too, which pytest itself only sees on collection."""
    declared = {
        line.partition(":")[0]
        for line in tomllib.loads(text("pyproject.toml"))["tool"]["pytest"]["ini_options"]["markers"]
    }
    builtin = {"parametrize", "skip", "skipif", "xfail", "usefixtures", "filterwarnings", "timeout"}
    used = {
        node.attr
        for path in (REPOSITORY / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "mark"
    }
    assert used - builtin <= declared


def image_stages() -> dict[str, str]:
    """The Dockerfile by stage; the last one has no name."""
    parts = re.split(r"^FROM (.+)$", text("Dockerfile"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_base_image_is_named_by_its_digest() -> None:
    """A tag moves and can vanish."""
    [base] = re.findall(r"^ARG BASE_IMAGE=(.+)$", text("Dockerfile"), flags=re.MULTILINE)
    assert re.fullmatch(r"[\w./:-]+@sha256:[0-9a-f]{64}", base)
    assert not [stage for stage in image_stages() if not re.match(r"\$\{BASE_IMAGE\}|runtime", stage)]


def test_the_image_is_built_from_the_pins_and_runs_without_root() -> None:
    stages = image_stages()
    assert list(stages) == [
        "${BASE_IMAGE} AS build",
        "${BASE_IMAGE} AS runtime",
        "runtime AS development",
        "runtime",
    ]
    build, runtime, development, default = stages.values()
    assert "make setup" in build
    assert "make extras EXTRAS=test,dev,peers" in development
    # Compiled files that go by times are stale once a layer has rounded these.
    assert "SOURCE_DATE_EPOCH=" in build
    assert "SOURCE_DATE_EPOCH=" in development
    assert re.findall(r"^USER (.+)$", runtime, flags=re.MULTILINE) == ["grpo"]
    assert re.findall(r"^USER (.+)$", development, flags=re.MULTILINE)[-1] == "grpo"
    assert default.strip() == ""
    compiler = r"\bgcc\b|\bg\+\+|\bclang|\bbuild-essential|-dev\b"
    assert not re.search(compiler, "\n".join(re.findall(r"apt-get install.*", runtime)))
    assert re.search(compiler, development)


def test_the_image_leaves_out_what_git_keeps_of_its_own() -> None:
    """A checkout's .git can hold a token, and commits that are not to be published."""
    assert {".git", ".venv", "data", "runs", "build"} <= set(text(".dockerignore").splitlines())


def entered(command: list[str], shared_mb: int, folder: Path) -> str:
    """What the image's entry says, and what its command prints, where /dev/shm has that size."""
    shown = folder / "df"
    shown.write_text(f"#!/bin/sh\necho Filesystem\necho shm {shared_mb} 0 {shared_mb} 0% /dev/shm\n", encoding="utf-8")
    shown.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    entry = REPOSITORY / "docker/entry.sh"
    ran = subprocess.run(
        ["sh", str(entry), *command], cwd=REPOSITORY, env=environment, capture_output=True, check=True, text=True
    )
    assert ran.stdout.strip() == " ".join(command[1:])
    return ran.stderr


@pytest.mark.parametrize(
    ("command", "shared_mb", "expected"),
    [
        (["echo", "profile=one_cpu"], 64, ""),
        (["echo", "profile=one_gpu"], 64, ""),
        (["echo", "profile=eight_gpu_zero2"], 64, "--shm-size=8g or --ipc=host"),
        (["echo", "--config", "configs/profiles/eight_gpu_zero2.yaml"], 64, "--shm-size=8g or --ipc=host"),
        (["echo", "profile=eight_gpu_zero2"], 8192, ""),
        (["echo", "profile=one_cpu"], 0, "--shm-size=64m or more"),
    ],
)
def test_the_image_says_when_shared_memory_is_too_small(
    command: list[str], shared_mb: int, expected: str, tmp_path: Path
) -> None:
    if list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("several GPUs of this machine would count as asked for")
    said = entered(command, shared_mb, tmp_path)
    assert expected in said
    assert bool(said) == bool(expected)


def test_no_regular_expression_relies_on_what_some_pythons_get_wrong() -> None:
    """Possessive and atomic groups match wrongly in Python 3.11 up to 3.11.4, which Debian 12 packages."""
    possessive_group = re.compile(r"\)(?:[*+?]|\{[\d,]+\})\+|\(\?>")
    sources = (REPOSITORY / "src").rglob("*.py")
    literals = [
        (path, node.value)
        for path in sources
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert literals
    assert [(path.name, text) for path, text in literals if possessive_group.search(text)] == []
    assert possessive_group.search(r"(?:a|ab)*+")
    assert possessive_group.search(r"(?>a)")
