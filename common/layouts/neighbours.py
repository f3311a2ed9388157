"""Memory that processes of one host share: what is packed there needs no way through sockets.

A buffer has no name in any file system and goes with the process that made it; others of the same user find it as
`/proc/PID/fd/N`. Who wants to read tries that before anybody relies on it.
"""

from __future__ import annotations

import functools
import mmap
import os
import secrets
import threading
from pathlib import Path

import msgspec
import torch

_TOKEN_BYTES = 16


class Neighbour(msgspec.Struct, frozen=True):
    """A process as others may find it: its open file `fd` has the bytes `token`."""

    host: str
    pid: int
    fd: int
    token: str


@functools.cache
def _token(_pid: int) -> tuple[int, bytes]:
    """A file of this process with a word that nobody else knows; another one after a fork."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    fd = os.memfd_create("rlmq-token")
    os.write(fd, token)
    return fd, token


def _host() -> str:
    """This kernel since it was started, and the name space in which process ids are what they are."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())


def this_process() -> Neighbour | None:
    """What others need to know to read here; None where there is no such thing."""
    try:
        fd, token = _token(os.getpid())
        return Neighbour(_host(), os.getpid(), fd, token.hex())
    except (OSError, AttributeError):
        return None


def can_read(other: Neighbour | None) -> bool:
    """Whether this process can read that one's buffers; it is tried."""
    try:
        if other is None or other.host != _host():
            return False
        return Path(f"/proc/{other.pid}/fd/{other.fd}").read_bytes().hex() == other.token
    except OSError:
        return False


class SharedBuffer:
    """Memory of this process that others of the host may map.

    Attributes:
        fd, pid: where they find it.
        words: its content, [size / 8] of int64.
    """

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("rlmq-buffer")
        os.ftruncate(self.fd, size)
        self.pid = os.getpid()
        self.words = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.int64)

    @classmethod
    def of(cls, size: int) -> SharedBuffer:
        """One of this size, if possible one that was there before: its pages need not be found again."""
        with _SPARE_LOCK:
            found = next((one for one in _SPARE if one.words.nbytes == size and one.pid == os.getpid()), None)
            if found is not None:
                _SPARE.remove(found)
        return found or cls(size)

    def close(self, *, again: bool = False) -> None:
        """Nobody finds it any more, and the memory goes with its last user; or keep it for the next of its size."""
        with _SPARE_LOCK:
            if again and len(_SPARE) < _MOST_SPARE:
                _SPARE.append(self)
                return
        os.close(self.fd)


_MOST_SPARE = 2
_SPARE: list[SharedBuffer] = []
_SPARE_LOCK = threading.Lock()


def mapped(pid: int, fd: int) -> torch.Tensor:
    """Another process's buffer, as words.

    Raises:
        OSError: it has ended.
    """
    there = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(there, os.fstat(there).st_size), dtype=torch.int64)
    finally:
        os.close(there)
