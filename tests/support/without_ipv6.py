"""Runs a command as on a kernel without IPv6: `socket` fails for that family, by a filter of seccomp(2)."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import sys
from typing import Final

PR_SET_NO_NEW_PRIVS: Final = 38
PR_SET_SECCOMP: Final = 22
SECCOMP_MODE_FILTER: Final = 2
SECCOMP_RET_ERRNO: Final = 0x00050000
SECCOMP_RET_ALLOW: Final = 0x7FFF0000
SOCKET_CALLS: Final = {"x86_64": 41, "aarch64": 198}
NUMBER_OFFSET: Final = 0  # of the system call, in seccomp_data
FIRST_ARGUMENT_OFFSET: Final = 16
LOAD: Final = 0x20
JUMP_IF_EQUAL: Final = 0x15
RETURN: Final = 0x06


class Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("value", ctypes.c_uint),
    )


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(Instruction)))


def forbid_ipv6() -> None:
    """Forbid it for this process and all that it starts. Raises `OSError`."""
    instructions = (
        Instruction(LOAD, 0, 0, NUMBER_OFFSET),
        Instruction(JUMP_IF_EQUAL, 0, 3, SOCKET_CALLS[platform.machine()]),
        Instruction(LOAD, 0, 0, FIRST_ARGUMENT_OFFSET),
        Instruction(JUMP_IF_EQUAL, 0, 1, socket.AF_INET6),
        Instruction(RETURN, 0, 0, SECCOMP_RET_ERRNO | errno.EAFNOSUPPORT),
        Instruction(RETURN, 0, 0, SECCOMP_RET_ALLOW),
    )
    array = (Instruction * len(instructions))(*instructions)
    program = Program(len(instructions), array)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program)
    ):
        raise OSError(ctypes.get_errno(), "seccomp is not available")


if __name__ == "__main__":
    forbid_ipv6()
    os.execv(sys.argv[1], sys.argv[1:])
