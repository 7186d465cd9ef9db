"""Replies of a server by request, kept in a file, so that a rerun gets the same ones and asks for none twice."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO


class ReplyCache:
    """``replies.jsonl`` in a folder: one line a reply, with its key and whatever tells where it came from.

    Several processes may share the file. The first reply to a request counts for all of them, so that they and
    every rerun judge by the same one.

    Args:
        folder: made when the first reply is kept.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "replies.jsonl"
        self._replies: dict[str, str] = {}
        self._read = 0

    def get(self, key: str) -> str | None:
        """The reply kept under ``key``, if there is one."""
        if key not in self._replies and self.path.is_file():
            with self.path.open("rb") as file:
                self._take_new(file)
        return self._replies.get(key)

    def keep(self, key: str, reply: str, origin: Mapping[str, Any]) -> str:
        """Write a reply down, unless another process was first; returns the one that counts."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"key": key, "reply": reply, **origin}, sort_keys=True).encode() + b"\n"
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._take_new(file)
            if key not in self._replies:
                torn = file.seek(0, os.SEEK_END) != self._read
                file.write(b"\n" + line if torn else line)
                file.flush()
                self._take_new(file)
            return self._replies[key]

    def _take_new(self, file: BinaryIO) -> None:
        """Read the whole lines after those already read."""
        file.seek(self._read)
        whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole + newline)
        for line in whole.splitlines():
            entry = _entry(line)
            if entry is not None:
                self._replies.setdefault(*entry)


def _entry(line: bytes) -> tuple[str, str] | None:
    """The key and the reply; None for the half line of a process killed while it wrote, which is asked again."""
    try:
        match json.loads(line):
            case {"key": str(key), "reply": str(reply)}:
                return key, reply
    except (ValueError, RecursionError):
        return None
    return None
