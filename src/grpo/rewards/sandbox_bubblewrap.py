"""The command line by which bubblewrap makes a sandbox: what is visible inside, and as whom.

Inside there is the C library, the interpreter with its standard library at ``/python``, the program's own files at
``/program``, ``/dev/null`` and a scratch folder ``/tmp`` of bounded size; all but the last read-only. There is no
``/etc``, no ``/proc``, no shell, no home and no installed package.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

INSTALL_HINT = "install bubblewrap (Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap)"
SYSTEM_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")

# The kernel counts processes by user, and root's not at all. So where root starts a sandbox, each becomes a user
# of its own, from a range that no distribution hands out.
_FIRST_USER = 2_100_000_000
_USERS = 40_000_000
_numbers = itertools.count(os.getpid() * 997)


def isolated_user() -> int:
    """The user id that the program inside takes on: 0 (it stays who it is) in a user namespace of its own."""
    return 0 if in_user_namespace() else _FIRST_USER + next(_numbers) % _USERS


def in_user_namespace() -> bool:
    """Whether the sandbox gets a user namespace: anyone but root needs one to make the other namespaces."""
    return os.geteuid() != 0


def bubblewrap_path() -> str | None:
    return shutil.which("bwrap")


def command(
    files: Sequence[Path], arguments: Sequence[str], *, scratch_mb: int, info_fd: int, filter_fd: int | None
) -> list[str]:
    """Run the first of ``files`` in a sandbox; bubblewrap's own process stays outside and waits for it.

    ``info_fd`` gets the id of the sandbox's first process; ``filter_fd`` holds the system call filter.
    """
    inside = [f"/program/grpo/rewards/{file.name}" for file in files]
    scratch = ["--perms", "1777", "--size", str(scratch_mb << 20), "--tmpfs", "/tmp"]
    call_filter = ["--seccomp", str(filter_fd)] if filter_fd is not None else []
    return [
        bubblewrap_path() or "bwrap",
        *_namespaces(),
        *_folders(),
        *_visible(),
        *(word for file, place in zip(files, inside, strict=True) for word in ("--ro-bind", str(file), place)),
        *scratch,
        *("--dev-bind", os.devnull, os.devnull, "--remount-ro", "/", "--chdir", "/tmp"),
        *("--info-fd", str(info_fd), *call_filter, "--"),
        *(_interpreter_inside(), *INTERPRETER_OPTIONS, inside[0], *arguments),
    ]


# No site packages, nothing imported from the working folder, no bytecode files.
INTERPRETER_OPTIONS = ("-P", "-s", "-S", "-B")

# Equal runs give equal verdicts: the order of a set of strings follows the hash seed. One arena: each thread would
# otherwise reserve 64 MB of the address space.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PYTHONUTF8": "1", "MALLOC_ARENA_MAX": "1"}


def interpreter() -> Path:
    """The interpreter itself, behind virtual environments and links."""
    return Path(sys._base_executable).resolve()  # type: ignore[attr-defined, unused-ignore]


def _namespaces() -> list[str]:
    """Everything apart from the host, and no rights; root keeps what it takes to become another user."""
    user = ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    root = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    environment = {
        **ENVIRONMENT,
        "HOME": "/tmp",
        "PYTHONPATH": "/program",
        "LD_LIBRARY_PATH": f"/python/{sys.platlibdir}",
    }
    return [
        *(user if in_user_namespace() else root),
        *("--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        # No --die-with-parent: where it strikes before bubblewrap's child is let go, that child waits for ever. The
        # guest's first process watches the trainer instead.
        *("--hostname", "sandbox", "--new-session", "--as-pid-1", "--clearenv"),
        *(word for name, value in environment.items() for word in ("--setenv", name, value)),
    ]


def _folders() -> list[str]:
    """The folders above what is mounted; bubblewrap by itself would close them to all but its own user."""
    library = f"/python/{sys.platlibdir}"
    above = ("/usr", "/dev", "/python", "/python/bin", library, "/program", "/program/grpo", "/program/grpo/rewards")
    return [word for folder in above for word in ("--perms", "0755", "--dir", folder)]


@cache
def _visible() -> tuple[str, ...]:
    words: list[str] = []
    for folder in SYSTEM_LIBRARIES:
        if Path(folder).is_symlink():
            words += ["--symlink", str(Path(folder).readlink()), folder]
        elif Path(folder).is_dir():
            words += ["--ro-bind", folder, folder, *_without_packages(Path(folder))]
    home = f"/python/{sys.platlibdir}"
    library = Path(sysconfig.get_path("stdlib"))
    words += ["--ro-bind", str(interpreter()), _interpreter_inside()]
    words += ["--ro-bind", str(library), f"{home}/{library.name}"]
    for packages in ("site-packages", "dist-packages"):
        if (library / packages).is_dir():
            words += _emptied(f"{home}/{library.name}/{packages}")
    shared = Path(sys.base_prefix) / sys.platlibdir / (sysconfig.get_config_var("INSTSONAME") or "none")
    if shared.suffix != ".a" and shared.is_file():
        words += ["--ro-bind", str(shared.resolve()), f"{home}/{shared.name}"]
    return tuple(words)


def _without_packages(libraries: Path) -> list[str]:
    """Hide the packages that the system installed for its own interpreters (Debian: python3/dist-packages)."""
    found = sorted(libraries.glob("python*/*-packages"))
    return [word for folder in found if folder.is_dir() and not folder.is_symlink() for word in _emptied(str(folder))]


def _emptied(folder: str) -> list[str]:
    return ["--tmpfs", folder, "--remount-ro", folder]


def _interpreter_inside() -> str:
    return f"/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
