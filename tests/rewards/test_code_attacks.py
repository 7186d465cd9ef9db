"""Programs that attack the machine, the tests or the verdict: contained, judged 0, in time, and nothing is left.

Each program defines ``solve``, which is asked for ``3 * x + 1``. Where an attack could succeed in a way that the
program itself would notice, it answers rightly exactly if it did, so that a value of 0 says it did not.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo.records import Problem, Score
from grpo.rewards.code_tests import CodeTests
from grpo.rewards.sandbox import SandboxUnavailable, require

LIMIT = 0.5
MEMORY_MB = 192 + os.getpid() % 61
# Stands in the command line of every process of this module's sandboxes, forked ones too.
MARK = f"address_space={MEMORY_MB << 20}"
PROBLEM = Problem("p", "q", "", "s", {"tests": [f"assert solve({x}) == {3 * x + 1}" for x in (4, 17, 230)]})
SECRET = "token-of-the-trainer"


@pytest.fixture(scope="module")
def check() -> Iterator[CodeTests]:
    try:
        require("bubblewrap")
    except SandboxUnavailable as error:
        pytest.skip(f"programs cannot be isolated on this machine: {error}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_API_KEY", SECRET)
        check = CodeTests(limit_seconds=LIMIT, memory_mb=MEMORY_MB, workers=1)
        # The judge is up, and what Python itself loads on the way is loaded.
        assert judged(check, "def solve(x): return 3 * x + 1").value == 1.0
        yield check
        check.close()


def judged(check: CodeTests, program: str) -> Score:
    return check(PROBLEM, f"```python\n{program}\n```")


def left_over() -> list[str]:
    """The sandboxed processes on this machine that belong to this module, zombies of ours included."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        zombie_of_ours = fields[0] == "Z" and int(fields[1]) == os.getpid()
        if MARK in command or zombie_of_ours:
            found.append(f"{folder.name} {command}")
    return found


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def attack(check: CodeTests, program: str) -> Score:
    """Run an attack, and see that it is over in time and that this process is as it was."""
    memory, start = resident_mb(), time.monotonic()
    score = judged(check, program)
    assert time.monotonic() - start < LIMIT + 2
    assert left_over() == []
    assert resident_mb() - memory < 30
    assert subprocess.run(["true"], check=False).returncode == 0
    return score


def deed(body: str) -> str:
    """A program that answers rightly if ``body``, which returns a value, succeeds."""
    lines = "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    return f"""
import os, sys
def deed():
{lines}
def solve(x):
    try:
        done = deed()
    except BaseException:
        done = False
    return 3 * x + 1 if done else None
"""


USES_UP = {
    "endless loop": "def solve(x):\n    while True: pass",
    "endless loop at once": "while True: pass",
    "sleep": "import time\ntime.sleep(1000)",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "fork bomb of sleepers": """
import os, time
def solve(x):
    while True:
        try:
            if os.fork() == 0: time.sleep(1000)
        except OSError: time.sleep(0.01)
""",
    "thread bomb": """
import threading, time
def solve(x):
    while True:
        try: threading.Thread(target=time.sleep, args=(1000,)).start()
        except RuntimeError: time.sleep(0.01)
""",
    "memory bomb": "hold = []\ndef solve(x):\n    while True: hold.append(bytearray(1 << 24))",
    "memory bomb that goes on": """
hold = []
def solve(x):
    while True:
        try: hold.append(bytearray(1 << 20))
        except MemoryError: pass
""",
    "memory bomb in children": """
import os
for _ in range(3): os.fork()
hold = []
while True:
    try: hold.append(b"x" * (1 << 20))
    except MemoryError: pass
""",
    "one huge list": "def solve(x): return [0] * 10**12",
    "endless output": "while True: print('x' * 10000)",
    "endless errors": "import sys\nwhile True: sys.stderr.write('x' * 10000)",
    "endless output by descriptor": "import os\nwhile True: os.write(1, b'x' * 10000); os.write(2, b'x' * 10000)",
    "huge file": "with open('/tmp/f', 'wb') as f:\n    while True: f.write(b'x' * (1 << 20))",
    "many files": """
import itertools
for n in itertools.count():
    try: open(f'/tmp/{n}', 'wb').write(b'x' * 4096)
    except OSError: pass
""",
    "deep folders": "import os\nwhile True:\n    os.mkdir('d'); os.chdir('d')",
    "open files": "import os\nhold = []\nwhile True:\n    hold.append(os.open('/dev/null', os.O_RDONLY))",
    "full pipes": """
import os
while True:
    try:
        _, end = os.pipe(); os.set_blocking(end, False); os.write(end, b'x' * (1 << 16))
    except OSError: pass
""",
    "recursion": "def solve(x): return solve(x)",
    "recursion without limit": "import sys\nsys.setrecursionlimit(10**9)\ndef solve(x): return solve(x)",
    "endless generator": "def solve(x):\n    while True: yield x",
    "endless values": "import itertools\ndef solve(x): return itertools.count()",
    "huge number": "def solve(x): return 7 ** (10 ** 10)",
    "long number": "def solve(x): return 1 << (1 << 26)",
    "long text": "def solve(x): return 'x' * (1 << 26)",
    "long error": "def solve(x): raise ValueError('x' * (1 << 26))",
    "deep nesting": "def solve(x):\n    v = []\n    for _ in range(10**6): v = [v]\n    return v",
    "value that contains itself": "def solve(x):\n    v = []\n    v.append(v)\n    return v",
    "value that repeats itself": "def solve(x):\n    v = ['x']\n    for _ in range(60): v = [v, v]\n    return v",
    "keys that collide": "def solve(x): return {n * (2**61 - 1): 0 for n in range(40_000)}",
    "set that collides": "def solve(x): return {n * (2**61 - 1) for n in range(40_000)}",
    "slow pattern": "import re\ndef solve(x): return re.match('(a+)+$', 'a' * 40 + 'b')",
    "archive bomb": """
import io, zlib
def solve(x):
    packed = zlib.compressobj()
    parts = [packed.compress(b'0' * (1 << 20)) for _ in range(2000)]
    return zlib.decompress(b''.join(parts) + packed.flush())
""",
    "source that takes for ever": "x = " + "-" * 50_000 + "1",
    "catches everything": """
def solve(x):
    while True:
        try:
            while True: pass
        except BaseException: pass
""",
    "ignores signals": """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
def solve(x):
    while True: time.sleep(1)
""",
    "handles the processor limit": """
import signal
signal.signal(signal.SIGXCPU, lambda *a: None)
def solve(x):
    while True: pass
""",
    "child that holds the channel": """
import os, time
if os.fork() == 0: time.sleep(1000)
os._exit(0)
""",
    "daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(64):
            try: os.close(fd)
            except OSError: pass
        time.sleep(1000)
    os._exit(0)
""",
    "daemon that works on": """
import os
if os.fork() == 0:
    os.setsid()
    while True: pass
def solve(x): return 0
""",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "crash": "import ctypes\ndef solve(x): ctypes.string_at(0)",
}

READS = {
    "password hashes": "return open('/etc/shadow').read()",
    "users": "return open('/etc/passwd').read()",
    "home": f"return os.listdir({str(Path.home())!r})",
    "home of root": "return os.listdir('/root')",
    "repository": f"return os.listdir({str(Path(__file__).parents[2])!r})",
    "tests of this repository": f"return open({__file__!r}).read()",
    "tests of the problem": """
places = [entry for top in ('/program', '/tmp', '/dev') for entry in os.walk(top)]
for folder, _, files in places:
    for name in files:
        try: text = open(os.path.join(folder, name), errors='replace').read(1 << 16)
        except OSError: continue
        if 'assert ' + 'solve(' in text: return True
""",
    "judge": "return os.path.exists('/program/grpo/rewards/code_judge.py')",
    "installed packages": """
import importlib.util
return any(importlib.util.find_spec(name) for name in ('torch', 'yaml', 'pip', 'grpo.records'))
""",
    "environment of the first process": "return open('/proc/1/environ').read()",
    "own environment in /proc": "return open('/proc/self/environ').read()",
    "process table": "return os.listdir('/proc')",
    "memory of a process": "return open('/proc/self/mem', 'rb')",
    "secret in the environment": f"return {SECRET!r} in str(os.environ) or 'WANDB_API_KEY' in os.environ",
    "kernel settings": "return os.listdir('/sys') or os.listdir('/proc/sys')",
    "host name": f"return os.uname().nodename == {os.uname().nodename!r}",
    "link out of the scratch folder": "os.symlink('/etc/shadow', '/tmp/l')\nreturn open('/tmp/l').read()",
    "link to the root of a process": "os.symlink('/proc/1/' + 'root', '/tmp/l')\nreturn os.listdir('/tmp/l/etc')",
    "climbing out": "os.chdir('/tmp')\nreturn os.listdir('../' * 20 + 'etc')",
    "disks": "return [d for d in os.listdir('/dev') if d != 'null']",
    "kernel log": "import ctypes\nreturn ctypes.CDLL(None).klogctl(3, ctypes.create_string_buffer(100), 100) >= 0",
    "a shell": "return os.system('true') == 0",
    "a folder with programs": "return os.listdir('/usr/bin')",
}

WRITES = {
    "root": "return open('/owned', 'w')",
    "libraries": "return open('/usr/lib/owned', 'w')",
    "standard library": "return open(os.path.join(os.path.dirname(os.__file__), 'owned.py'), 'w')",
    "guest": "return open('/program/grpo/rewards/sandbox_guest.py', 'a')",
    "devices": "return open('/dev/owned', 'w')",
    "shared memory": "return open('/dev/shm/owned', 'w')",
    "device node": """
import stat
os.mknod('/tmp/disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0))
return open('/tmp/disk', 'rb')
""",
    "other mode": "os.chmod('/usr', 0o777)\nreturn True",
    "memory file": "return os.memfd_create('x')",
    "shared segment": "import ctypes\nreturn ctypes.CDLL(None).shmget(0, 1 << 20, 0o1666) >= 0",
    "message queue": "import ctypes\nreturn ctypes.CDLL(None).msgget(0, 0o1666) >= 0",
    "file past the limit": "os.truncate(os.open('/tmp/f', os.O_CREAT | os.O_RDWR), 1 << 30)\nreturn True",
    "scratch past its size": """
for n in range(64):
    with open(f'/tmp/{n}', 'wb') as f: f.write(b'x' * (1 << 20))
return True
""",
}

CALL = "import ctypes\nlib = ctypes.CDLL(None, use_errno=True)\n"
RIGHTS = {
    "root": "os.setuid(0)\nreturn True",
    "group of root": "os.setgid(0)\nreturn os.getgid() == 0 and os.getuid() == 0",
    "signal to the first process": "os.kill(1, 9)\nimport time; time.sleep(0.2)\nreturn False",
    "signal to the parent": "os.kill(os.getppid(), 9)\nreturn False",
    "signal to everyone": "os.kill(-1, 9)\nreturn False",
    "signal to the group": "os.killpg(0, 9)\nreturn False",
    "signal to the trainer": f"os.kill({os.getpid()}, 0)\nreturn True",
    "trace": CALL + "return lib.ptrace(16, 1, 0, 0) == 0 or lib.ptrace(0, 0, 0, 0) == 0",
    "read another's memory": CALL + "return lib.process_vm_readv(1, 0, 0, 0, 0, 0) == 0",
    "user namespace": CALL + "return lib.unshare(0x10000000) == 0",
    "mount namespace": CALL + "return lib.unshare(0x00020000) == 0",
    "user namespace by clone": CALL + "return lib.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0",
    "namespace by clone3": CALL + "return lib.syscall(435, ctypes.create_string_buffer(88), 88) >= 0",
    "enter a namespace": CALL + "return lib.setns(0, 0) == 0",
    "mount": CALL + "return lib.mount(b'none', b'/tmp', b'tmpfs', 0, b'') == 0",
    "mount by descriptor": CALL + "return lib.syscall(430, b'tmpfs', 0) >= 0",
    "unmount": CALL + "return lib.umount2(b'/tmp', 2) == 0",
    "remount": CALL + "return lib.mount(b'none', b'/', b'', 32 | 4096, b'') == 0",
    "other root": "os.chroot('/tmp')\nreturn True",
    "nested sandbox": "os.execv('/usr/bin/bwrap', ['bwrap', '--dev-bind', '/', '/', 'true'])",
    "more memory": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nreturn True",
    "more processes": "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (999, 999))\nreturn True",
    "more files": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (9999, 9999))\nreturn True",
    "priority": "os.nice(-10)\nreturn True",
    "real-time priority": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))\nreturn True",
    "programs in the kernel": CALL + "return lib.syscall(321, 0, ctypes.create_string_buffer(128), 128) >= 0",
    "rings of the kernel": CALL + "return lib.syscall(425, 8, ctypes.create_string_buffer(256)) >= 0",
    "faults by hand": CALL + "return lib.syscall(323, 1) >= 0",
    "keys": CALL + "return lib.syscall(248, b'user', b'k', b'v', 1, -3) >= 0",
    "calls of another kind": CALL + "return lib.syscall(0x40000000 | 39) >= 0",
    "host name": CALL + "return lib.sethostname(b'x', 1) == 0",
    "clock": "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)\nreturn True",
}

NETWORK = {
    "connection to this machine": "import socket\nreturn socket.create_connection(('127.0.0.1', {port}), 0.5)",
    "connection by other names": "import socket\nreturn socket.create_connection(('localhost', {port}), 0.5)",
    "connection to another machine": "import socket\nreturn socket.create_connection(('1.1.1.1', 53), 0.5)",
    "packet": "import socket\nreturn socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    "version 6": "import socket\nreturn socket.socket(socket.AF_INET6)",
    "names": "import socket\nreturn socket.getaddrinfo('example.org', 80)",
    "raw": "import socket\nreturn socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "link layer": "import socket\nreturn socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "kernel": "import socket\nreturn socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "host of a virtual machine": "import socket\nreturn socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)",
    "cipher": "import socket\nreturn socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
    "abstract name": "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0{name}')\nreturn True",
    "web": "import urllib.request\nreturn urllib.request.urlopen('http://127.0.0.1:{port}', timeout=0.5)",
}

FORGES = {
    "exit before the tests": "import os\nos._exit(0)",
    "orderly exit": "import sys\nsys.exit(0)",
    "exit in the function": "def solve(x): raise SystemExit(0)",
    "exit of the process in the function": "import os\ndef solve(x): os._exit(0)",
    "work at exit": "import atexit, os\natexit.register(print, 'passed')\natexit.register(os._exit, 0)\nexit()",
    "generator exit": "def solve(x): raise GeneratorExit",
    "interrupt": "def solve(x): raise KeyboardInterrupt",
    "error of the tests": "def solve(x): raise AssertionError",
    "error that stops iteration": "def solve(x): raise StopIteration(3 * 4 + 1)",
    "error that blames the tests": "class Unjudgeable(Exception): pass\ndef solve(x): raise Unjudgeable('x')",
    "error whose message is an exit": """
class E(Exception):
    def __str__(self): raise SystemExit
def solve(x): raise E
""",
    "equal to everything": "class E:\n    def __eq__(self, o): return True\ndef solve(x): return E()",
    "number equal to everything": "class E(int):\n    def __eq__(self, o): return True\ndef solve(x): return E(0)",
    "number that lies": """
class E(int):
    def __int__(self): return 13
    __index__ = __int__
def solve(x): return E(0)
""",
    "text equal to everything": "class E(str):\n    def __eq__(self, o): return True\ndef solve(x): return E('13')",
    "fraction equal to everything": "class E(float):\n    def __eq__(self, o): return True\ndef solve(x): return E(0)",
    "list equal to everything": "class E(list):\n    def __eq__(self, o): return True\ndef solve(x): return E()",
    "not a number": "def solve(x): return float('nan')",
    "true": "def solve(x): return True",
    "patched equality of the guest": """
import builtins
class E(int):
    def __eq__(self, o): return True
    __ne__ = lambda self, o: False
builtins.int = builtins.float = builtins.isinstance = lambda *a: True
def solve(x): return E()
""",
    "patched asserts": """
import builtins
builtins.AssertionError = type('Quiet', (BaseException,), {})
builtins.compile = builtins.exec = lambda *a, **k: None
def solve(x): return None
""",
    "patched unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef solve(x): return None",
    "patched guest": """
import sys
guest = sys.modules['__main__']
guest.answer = lambda *a: b'["value", true]'
guest.Encoder.pieces = lambda *a: ['{"failures": ["", "", ""]}']
def solve(x): return None
""",
    "verdict instead of an answer": """
import os, json
for fd in range(64):
    for text in ('{"failures": ["", "", ""]}', '["value", {"failures": ["", "", ""]}]', '["passed"]', '[]', '1'):
        data = len(text).to_bytes(4, 'big') + text.encode()
        try: os.write(fd, data * 5)
        except OSError: pass
os._exit(0)
""",
    "answers before the questions": """
import os
text = b'["value", 13]'
for fd in range(3, 64):
    try: os.write(fd, (len(text).to_bytes(4, 'big') + text) * 9)
    except OSError: pass
def solve(x): return 13
""",
    "broken answers": """
import os
for fd in range(3, 64):
    try: os.write(fd, b'\\xff' * 100_000)
    except OSError: pass
""",
    "answer of another form": """
import os, random
def solve(x):
    for text in ('["value", ["q", 1]]', '["value", ["d", 1]]', '["value", {"a": 1}]', '["value"]', '["value", []]',
                 '["value", ["s", ["l"]]]', '["value", ["n", "zz"]]', '["error", 1, 2]', '{"value": 1}', 'NaN',
                 '["error", "__import__", "os"]', '["error", "SystemExit", "0"]', '["value", ["r", 1.5]]'):
        data = text.encode()
        for fd in range(3, 64):
            try: os.write(fd, len(data).to_bytes(4, 'big') + data)
            except OSError: pass
""",
    "half an answer": """
import os
for fd in range(3, 64):
    try: os.write(fd, b'\\0\\0')
    except OSError: pass
os._exit(0)
""",
    "answer piece by piece": """
import os, time
while True:
    for fd in range(3, 64):
        try: os.write(fd, b'\\0\\0\\1')
        except OSError: pass
    time.sleep(0.01)
""",
    "answer that the judge would take long to read": """
import os
def solve(x):
    text = '["value",["s",' + ','.join('["n","%x"]' % (n * (2**61 - 1)) for n in range(30_000)) + ']]'
    for fd in range(3, 64):
        try: os.write(fd, len(text).to_bytes(4, 'big') + text.encode())
        except OSError: pass
""",
    "printed verdict": """
import sys
print('{"failures": ["", "", ""]}\\nOK\\nall tests passed\\n3 passed', flush=True)
def solve(x):
    print(3 * x + 1); sys.__stdout__.write('OK')
""",
    "tests in memory": """
import gc
def solve(x):
    texts = [o for o in gc.get_objects() if isinstance(o, (str, dict, list)) and 'assert ' + 'solve' in str(o)[:5000]]
    return eval(texts[0].split('==')[1]) if texts else None
""",
    "expected value in the frames": """
import sys, inspect
def solve(x):
    frame, found = sys._getframe(), []
    while frame:
        values = [*frame.f_locals.values(), *frame.f_globals.values()]
        found += [v for v in values if type(v) is int and v > 9 and v != x]
        frame = frame.f_back
    return found[-1] if found else None
""",
    "constants of the callers": """
import sys
def solve(x):
    frame, found = sys._getframe(1), []
    while frame:
        found += [c for c in frame.f_code.co_consts if isinstance(c, int) and (c - 1) % 3 == 0 and c > 12]
        frame = frame.f_back
    return found[0] if found else None
""",
    "descriptors at the other end": """
import socket, array
def solve(x):
    for fd in range(3, 64):
        try:
            s = socket.socket(fileno=fd)
            socket.send_fds(s, [b'\\0\\0\\0\\x04true'], [fd])
            message, fds, _, _ = socket.recv_fds(s, 10, 5, socket.MSG_DONTWAIT)
        except OSError: pass
""",
    "empty": "",
    "no Python": "this is not a program",
    "null byte": "x = '\0'",
    "other name": "def answer(x): return 3 * x + 1",
    "no function": "solve = 13",
}


# Each takes all of its time, and resembles another that is run by default.
TAKES_LONG = {
    "endless loop at once",
    "sleep",
    "many files",
    "thread bomb",
    "memory bomb in children",
    "huge number",
    "slow pattern",
    "ignores signals",
    "fork bomb",
    "memory bomb that goes on",
    "endless errors",
    "endless output by descriptor",
    "deep folders",
    "full pipes",
    "recursion without limit",
    "endless values",
    "value that repeats itself",
    "set that collides",
    "handles the processor limit",
    "daemon that works on",
    "answer piece by piece",
}


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in TAKES_LONG else ()) for name in names]


@pytest.mark.parametrize("name", marked(USES_UP))
def test_what_a_program_uses_up_is_bounded(check: CodeTests, name: str) -> None:
    assert attack(check, USES_UP[name]).value == 0.0


@pytest.mark.parametrize("name", READS)
def test_nothing_of_the_machine_can_be_read(check: CodeTests, name: str) -> None:
    assert attack(check, deed(READS[name])).value == 0.0


@pytest.mark.parametrize("name", WRITES)
def test_nothing_but_the_scratch_folder_can_be_written(check: CodeTests, name: str) -> None:
    assert attack(check, deed(WRITES[name])).value == 0.0


@pytest.mark.parametrize("name", RIGHTS)
def test_no_right_can_be_won(check: CodeTests, name: str) -> None:
    assert attack(check, deed(RIGHTS[name])).value == 0.0


@pytest.fixture
def listeners() -> Iterator[dict[str, object]]:
    """A server and an abstract socket of this machine, which would answer if they could be reached."""
    name = f"grpo-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0" + name)
        local.listen()
        yield {"port": server.getsockname()[1], "name": name}


@pytest.mark.parametrize("name", NETWORK)
def test_nobody_can_be_reached(check: CodeTests, listeners: dict[str, object], name: str) -> None:
    body = NETWORK[name]
    for key, value in listeners.items():
        body = body.replace(f"{{{key}}}", str(value))
    assert attack(check, deed(body)).value == 0.0


@pytest.mark.parametrize("name", marked(FORGES))
def test_no_verdict_can_be_forged(check: CodeTests, name: str) -> None:
    assert attack(check, FORGES[name]).value == 0.0


@pytest.mark.parametrize(
    "body", ["return True", "open('/tmp/f', 'w').write('x')\nreturn True", "return os.getpid() < 9"]
)
def test_a_deed_that_succeeds_is_seen(check: CodeTests, body: str) -> None:
    """The attacks above could be noticed: an innocent one is."""
    assert attack(check, deed(body)).value == 1.0


def test_a_process_in_a_sandbox_would_be_seen(check: CodeTests) -> None:
    """What the attacks are held to could fail: during one, its processes are found."""
    thread = threading.Thread(target=judged, args=(check, USES_UP["sleep"]))
    thread.start()
    deadline = time.monotonic() + 2
    while not left_over() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left_over() != []
    thread.join()
    assert left_over() == []


def test_a_fork_bomb_does_not_reach_the_program_beside_it() -> None:
    try:
        check = CodeTests(limit_seconds=LIMIT * 4, memory_mb=MEMORY_MB, workers=2)
    except SandboxUnavailable as error:
        pytest.skip(f"programs cannot be isolated on this machine: {error}")
    forks = """
import os, time
def solve(x):
    for _ in range(20):
        if os.fork() == 0: os._exit(0)
        os.wait()
        time.sleep(0.01)
    return 3 * x + 1
"""
    programs = [USES_UP["fork bomb of sleepers"], forks]
    scores = check.score_batch([(PROBLEM, f"```\n{program}\n```") for program in programs])
    check.close()
    assert [score.value for score in scores] == [0.0, 1.0]


@pytest.mark.slow
def test_fifty_endless_loops_leave_nothing(check: CodeTests) -> None:
    judged(check, USES_UP["endless loop"])
    memory, threads = resident_mb(), threading.active_count()
    scores = check.score_batch([(PROBLEM, f"```\n{USES_UP['endless loop']}\n```")] * 50)
    assert [score.value for score in scores] == [0.0] * 50
    assert left_over() == []
    assert resident_mb() - memory < 10
    assert threading.active_count() == threads
