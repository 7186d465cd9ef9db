"""A system call filter for the sandbox, as the kernel's own bytecode (seccomp BPF), written without a library.

A list of what is refused, not of what is allowed: Python and its libraries may call anything ordinary. Refused
are the calls by which code gets new namespaces and mounts, looks into other processes, loads code into the
kernel, or holds memory that no limit of the sandbox counts; and every socket but a Unix one, since not all
kinds (AF_VSOCK, for one) are confined by a network namespace.
"""

from __future__ import annotations

import errno
import platform
import struct

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # offsets in struct seccomp_data, little-endian

_UNIX_FAMILY = 1
_CLONE3 = 435
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000

# Of machine: (its audit number, clone, socket, socketpair).
_MACHINES = {"x86_64": (0xC000003E, 56, 41, 53), "aarch64": (0xC00000B7, 220, 198, 199)}

# Name: (number on x86_64, number on aarch64).
_REFUSED = {
    # other processes, the kernel, its log and its keys
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "syslog": (103, 116), "reboot": (169, 142), "acct": (163, 89), "quotactl": (179, 60),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "personality": (135, 92),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "swapon": (167, 224), "swapoff": (168, 225), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    # memory outside the address space and the scratch folder
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180),
}  # fmt: skip


def filter_bytes(machine: str = platform.machine()) -> bytes | None:
    """The filter for this machine, or None for a kind of machine whose call numbers are not known here.

    >>> len(filter_bytes("x86_64")) % 8, filter_bytes("abacus")
    (0, None)
    """
    if machine not in _MACHINES:
        return None
    audit, clone, socket, socketpair = _MACHINES[machine]
    column = list(_MACHINES).index(machine)
    program = [_step(_LOAD, _ARCHITECTURE_AT), _step(_EQUAL, audit, 1, 0), _step(_RETURN, _KILL)]
    program.append(_step(_LOAD, _NUMBER_AT))
    if machine == "x86_64":  # the same calls under other numbers (x32)
        program += [_step(_AT_LEAST, 0x40000000, 0, 1), _refuse(errno.EPERM)]
    for numbers in _REFUSED.values():
        program += [_step(_EQUAL, numbers[column], 0, 1), _refuse(errno.EPERM)]
    # Its flags lie in memory, where no filter can look; the C library then falls back on clone.
    program += [_step(_EQUAL, _CLONE3, 0, 1), _refuse(errno.ENOSYS)]
    program += _by_argument(clone, _step(_ANY_BIT, _NEW_NAMESPACES, 0, 1), _refuse(errno.EPERM), _allow())
    for call in (socket, socketpair):
        program += _by_argument(call, _step(_EQUAL, _UNIX_FAMILY, 0, 1), _allow(), _refuse(errno.EACCES))
    return b"".join([*program, _allow()])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _allow() -> bytes:
    return _step(_RETURN, _ALLOW)


def _refuse(number: int) -> bytes:
    return _step(_RETURN, _ERROR | number)


def _by_argument(call: int, test: bytes, if_true: bytes, if_false: bytes) -> list[bytes]:
    """For ``call`` alone: return one or the other by a test of its first argument."""
    return [_step(_EQUAL, call, 0, 4), _step(_LOAD, _FIRST_ARGUMENT_AT), test, if_true, if_false]
