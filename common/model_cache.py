"""Models that are made on this machine: each is made once, whoever asks first, and then reused.

A folder of the cache appears by one rename, so a process that was killed while it made one leaves nothing that
looks finished.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlmq.common.errors import DeadlineExceeded, DependencyError

POLL_S = 0.1


def cache_folder() -> Path:
    """`$RLMQ_CACHE`, or `~/.cache/rlmq`."""
    return Path(os.environ.get("RLMQ_CACHE") or Path.home() / ".cache" / "rlmq")


def torch_cache() -> dict[str, str]:
    """What to set before torch is imported: it makes a folder then, which else stays in the temporary one."""
    name, folder = "TORCHINDUCTOR_CACHE_DIR", cache_folder() / "inductor"
    if name in os.environ:
        return {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return {}
    return {name: str(folder)} if os.access(folder, os.W_OK) else {}


@contextmanager
def file_lock(path: Path, *, timeout_s: float, purpose: str) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel drops it when the process dies.

    Raises:
        DeadlineExceeded: another process kept it longer than `timeout_s`; names the process.
        DependencyError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DependencyError(
            f"cache folder {path.parent}",
            got=error.strerror,
            expected="a folder that can be written",
            remedy="Free it, or name another one with RLMQ_CACHE=FOLDER",
        ) from error
    try:
        _acquire(descriptor, path, time.monotonic() + timeout_s, timeout_s, purpose)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, deadline: float, timeout_s: float, purpose: str) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace") or "unknown"
                raise DeadlineExceeded(
                    purpose,
                    got=f"lock {path} still held by process {holder} after {timeout_s:g} s",
                    expected="the other process to finish",
                    remedy="See what that process does, or end it",
                ) from None
            time.sleep(POLL_S)
        else:
            return


def make_once(name: str, build: Callable[[Path], None], *, timeout_s: float = 600.0) -> Path:
    """The cached folder `models/NAME`; `build` fills an empty folder if it is not there yet.

    Several processes may ask at once: one builds, the others wait for it.

    Raises:
        DeadlineExceeded: another process builds longer than `timeout_s`.
        DependencyError: the cache cannot be written.
    """
    folder = cache_folder() / "models" / name
    if folder.is_dir():
        return folder
    with file_lock(folder.parent / f".{name}.lock", timeout_s=timeout_s, purpose=f"preparing model {name}"):
        if folder.is_dir():
            return folder
        _remove_abandoned(folder)
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}.tmp-", dir=folder.parent))
        try:
            build(temporary)
            temporary.chmod(0o755)
            temporary.rename(folder)
        except OSError as error:
            raise DependencyError(
                f"preparing model {name} in {folder.parent}",
                got=error.strerror or str(error),
                expected="room and permission to write it",
                remedy="Free space, or name another folder with RLMQ_CACHE=FOLDER",
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _remove_abandoned(folder: Path) -> None:
    """Remove what a killed builder left; the caller holds the lock, so no builder is alive."""
    for leftover in folder.parent.glob(f".{folder.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
