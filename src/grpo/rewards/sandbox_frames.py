"""Messages over a socket to code that may answer late, endlessly or not at all: length, then that many bytes."""

from __future__ import annotations

import socket
import time


class ChannelError(Exception):
    """No message came; the text says why, as a half sentence about the other side."""


class HungUp(ChannelError):
    """The other side ended."""


class OutOfTime(ChannelError):
    """The deadline passed first."""


class TooLong(ChannelError):
    """The message says it is longer than is read here."""


def frame(payload: bytes) -> bytes:
    """One message as it goes over the wire."""
    return len(payload).to_bytes(4, "big") + payload


def send_frame(channel: socket.socket, payload: bytes, deadline: float) -> None:
    """Send one message by ``deadline``, in the time of :func:`time.monotonic`."""
    _wait(channel, deadline)
    try:
        channel.sendall(frame(payload))
    except TimeoutError:
        raise OutOfTime("did not take what was sent within the time limit") from None
    except OSError:
        raise HungUp("ended before it took what was sent") from None


def receive_frame(channel: socket.socket, deadline: float, longest: int) -> bytes:
    """The next message, of at most ``longest`` bytes; nothing is kept of a longer one."""
    size = int.from_bytes(_exactly(channel, 4, deadline), "big")
    if size > longest:
        raise TooLong(f"gave an answer of more than {longest} bytes")
    return _exactly(channel, size, deadline)


def receive_some(channel: socket.socket, size: int, deadline: float) -> bytes:
    """Up to ``size`` bytes as they come; none where the other side has ended."""
    _wait(channel, deadline)
    try:
        return channel.recv(min(size, 1 << 16))
    except TimeoutError:
        raise OutOfTime("did not end within the time limit") from None
    except ConnectionError:
        return b""


def _exactly(channel: socket.socket, size: int, deadline: float) -> bytes:
    parts = []
    while size:
        part = receive_some(channel, size, deadline)
        if not part:
            raise HungUp("ended before it answered")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _wait(channel: socket.socket, deadline: float) -> None:
    """Let the next call on ``channel`` take until ``deadline`` at most, however little arrives at a time."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise OutOfTime("did not end within the time limit")
    channel.settimeout(left)
