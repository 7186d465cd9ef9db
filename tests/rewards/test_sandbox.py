"""The sandbox by itself; what attacks it stands in test_code_attacks.py."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from grpo.rewards import sandbox_bubblewrap
from grpo.rewards.sandbox import Limits, SandboxUnavailable, require, run_script
from grpo.rewards.sandbox_seccomp import filter_bytes

SOURCE = Path(sandbox_bubblewrap.__file__).parents[2]
SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module", autouse=True)
def bubblewrap_works() -> None:
    try:
        require("bubblewrap")
    except SandboxUnavailable as error:
        pytest.skip(f"programs cannot be isolated on this machine: {error}")


def output(source: str, **limits: float) -> str:
    return run_script(source, limits=Limits(**limits)).output  # type: ignore[arg-type]


def test_a_script_gets_its_input_and_gives_its_output() -> None:
    run = run_script("print(6 * int(input()))", "7")
    assert (run.output, run.ended, run.exit_code) == ("42\n", "exit", 0)


@pytest.mark.parametrize(
    ("source", "code"),
    [("", 0), ("raise SystemExit(7)", 7), ("1 / 0", 1), ("import os; os.kill(os.getpid(), 9)", 137), ("def", 1)],
)
def test_the_exit_code_is_told(source: str, code: int) -> None:
    run = run_script(source)
    assert (run.ended, run.exit_code) == ("exit", code)


def test_long_input_arrives_whole() -> None:
    assert output("import sys; print(len(sys.stdin.read()))") == "0\n"
    assert run_script("import sys; print(len(sys.stdin.read()))", "x" * 5_000_000).output == "5000000\n"


def test_endless_output_is_cut_not_kept() -> None:
    run = run_script("while True: print('x' * 1000)", limits=Limits(answer_kb=64))
    assert (run.ended, len(run.output)) == ("output", 64 << 10)


def test_what_was_printed_before_the_end_of_time_is_kept() -> None:
    start = time.monotonic()
    run = run_script("print('a', flush=True)\nwhile True: pass", limits=Limits(seconds=0.3))
    assert (run.output, run.ended) == ("a\n", "time")
    assert time.monotonic() - start < 2.3


def test_only_a_few_folders_exist() -> None:
    assert output("import os; print(*sorted(os.listdir('/')))").split() == sorted(
        ["dev", "program", "python", "tmp", "usr", *(name for name in ("lib", "lib64") if Path("/", name).exists())]
    )


def test_the_environment_is_empty_but_for_what_python_needs() -> None:
    names = output("import os; print(*sorted(os.environ))").split()
    assert names == [
        "HOME",
        "LANG",
        "LD_LIBRARY_PATH",
        "MALLOC_ARENA_MAX",
        "PWD",
        "PYTHONHASHSEED",
        "PYTHONPATH",
        "PYTHONUTF8",
    ]


def test_nothing_stays_between_programs() -> None:
    output("open('/tmp/note', 'w').write('x')")
    assert output("import os; print(os.listdir('/tmp'))") == "[]\n"


def test_a_program_is_no_one() -> None:
    identity = output("import os; print(os.getuid(), os.getgid(), os.getgroups(), os.getpid())").split()
    assert identity[0] != "0"  # the number may be ours by chance: it is one of a user namespace of its own
    assert int(identity[-1]) < 10
    capabilities = "import ctypes; print([ctypes.CDLL(None).prctl(23, n, 0, 0, 0) for n in range(8)])"
    if os.geteuid():  # root's sandbox keeps the two that it takes to become no one, out of reach afterwards
        assert output(capabilities) == f"{[0] * 8}\n"
    assert output("import ctypes; print(ctypes.CDLL(None).prctl(39, 0, 0, 0, 0))") == "1\n"  # no new privileges


@pytest.mark.parametrize(
    ("source", "limits", "expected"),
    [
        ("import os\nn = 1\ntry:\n    while os.fork(): n += 1\nexcept OSError: print(n)", {"processes": 3}, "3"),
        ("try: bytearray(100 << 20)\nexcept MemoryError: print('no')", {"memory_mb": 64}, "no"),
        ("try: open('f', 'wb').write(b'x' * (3 << 20))\nexcept OSError as e: print(e.errno in (27, 28))",
         {"scratch_mb": 2}, "True"),
    ],
)  # fmt: skip
def test_limits_hold(source: str, limits: dict[str, float], expected: str) -> None:
    assert output(source + "\nimport os, sys, time\nsys.stdout.flush()\nos._exit(0)", **limits).split()[:1] == [
        expected
    ]


def test_equal_runs_see_equal_orders_of_sets() -> None:
    assert output("print({'a', 'b', 'c', 'd'})") == output("print({'a', 'b', 'c', 'd'})")


@pytest.fixture
def trainer() -> Iterator[subprocess.Popen[str]]:
    """A process that runs a program which never ends, and that says so."""
    program = "import os, time\nif os.fork() == 0: os.setsid()\nwhile True: time.sleep(1)"
    code = (
        f"from grpo.rewards.sandbox import *; print('up', flush=True); run_script({program!r}, limits=Limits(99, 111))"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as process:
        yield process
        process.kill()


def sandboxed(mark: str) -> list[str]:
    """Command lines of live processes that hold ``mark``."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # a process may end between the two looks
            lines.append(path.read_bytes())
    return [line.decode(errors="replace") for line in lines if mark.encode() in line]


def wait_until(count: int, mark: str) -> None:
    deadline = time.monotonic() + 10
    while len(sandboxed(mark)) != count and time.monotonic() < deadline:
        time.sleep(0.05)


def test_a_trainer_that_is_killed_takes_its_sandboxes_with_it(trainer: subprocess.Popen[str]) -> None:
    mark = f"address_space={111 << 20}"
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "up\n"
    wait_until(4, mark)  # bubblewrap, the first process inside, the program and its child
    assert len(sandboxed(mark)) == 4
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    wait_until(0, mark)
    assert sandboxed(mark) == []


def killed_at_a_start(memory_mb: int) -> None:
    """A process that is killed as soon as it has started bubblewrap, when that has yet to start its own child."""
    code = f"""
import os, signal, subprocess
from grpo.rewards.sandbox import Limits, run_script
start = subprocess.Popen
def started(*given, **named):
    start(*given, **named)
    os.kill(os.getpid(), signal.SIGKILL)
subprocess.Popen = started
run_script("", limits=Limits(99, {memory_mb}))
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == -signal.SIGKILL


def test_a_trainer_that_is_killed_at_a_start_leaves_no_sandbox() -> None:
    killed_at_a_start(113)
    wait_until(0, f"address_space={113 << 20}")
    assert sandboxed(f"address_space={113 << 20}") == []


@pytest.mark.slow
def test_a_trainer_that_is_killed_at_any_time_leaves_no_sandbox() -> None:
    """Twenty times, in the midst of many starts: of judges and of programs, on several threads."""
    code = r"""
from grpo.records import Problem
from grpo.rewards.code_tests import CodeTests
problem = Problem("p", "q", "gold", "s", {"tests": ["assert add(1, 2) == 3"]})
texts = ["```\ndef add(a, b):\n    return a + b\n```", "```\nwhile True: pass\n```"]
check = CodeTests(limit_seconds=20, memory_mb=117, workers=4)
print("up", flush=True)
check.score_batch([(problem, texts[n % 9 == 8]) for n in range(1000)])
"""
    mark, environment = f"address_space={117 << 20}", {**os.environ, "PYTHONPATH": str(SOURCE)}
    before = orphans_of_bubblewrap()
    for number in range(20):
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            time.sleep(0.05 + 0.037 * number)
            process.kill()
        wait_until(0, mark)
        assert sandboxed(mark) == []
    # The judges' mark is no one's own.
    deadline = time.monotonic() + 10
    while orphans_of_bubblewrap() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert orphans_of_bubblewrap() - before == set()


def orphans_of_bubblewrap() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = path.read_text().rpartition(")")
            if name.endswith("(bwrap") and rest.split()[1] == "1":
                found.add(path.parent.name)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user to try it")
@pytest.mark.skipif(not Path(SYSTEM_PYTHON).exists(), reason="needs an interpreter that every user may run")
def test_an_ordinary_user_is_as_safe() -> None:
    version = subprocess.run(
        [SYSTEM_PYTHON, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True
    )
    if version.stdout != b"True\n":
        pytest.skip("needs a system Python 3.11 or newer")
    forks = "import os, time\nn = 1\ntry:\n    while os.fork(): n += 1\n    time.sleep(9)\nexcept OSError: print(n)"
    code = f"""
import os
from grpo.rewards.sandbox import Limits, run_script
run = run_script({forks!r}, limits=Limits(seconds=2, processes=5))
assert run.output == "5\\n", run
run = run_script("import os; print(os.getuid(), os.path.exists('/etc'))")
assert run.output == "1000 False\\n", run
if os.fork() == 0: os._exit(0)
assert os.wait()[1] == 0
"""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        shutil.copytree(SOURCE / "grpo", Path(folder, "grpo"), ignore=shutil.ignore_patterns("__pycache__"))
        ran = subprocess.run(
            [SYSTEM_PYTHON, "-c", code],
            env={"PYTHONPATH": folder, "PATH": os.environ["PATH"]},
            cwd="/",
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
            text=True,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr


def test_the_filter_is_whole_steps_and_ends_by_allowing() -> None:
    for machine in ("x86_64", "aarch64"):
        program = filter_bytes(machine)
        assert program is not None
        steps = list(struct.iter_unpack("<HBBI", program))
        assert steps[-1] == (0x06, 0, 0, 0x7FFF0000)
        assert all(at + 1 + max(yes, no) < len(steps) for at, (code, yes, no, _) in enumerate(steps) if code & 7 == 5)
    assert filter_bytes("abacus") is None
    assert filter_bytes(platform.machine()) == filter_bytes()


def test_no_package_of_the_system_is_visible() -> None:
    found = output(
        "import pathlib\n"
        "for place in ('/usr/lib', '/usr/lib64', '/lib', '/lib64', '/python/lib'):\n"
        "    for folder in pathlib.Path(place).glob('python*/*-packages'): print(folder, *folder.iterdir())"
    )
    assert all(len(line.split()) == 1 for line in found.splitlines()), found
