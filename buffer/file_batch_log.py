"""The batch log as a file: JSON Lines, a CRC per line, fsynced before `append` returns.

A line is `{"crc32":"1a2b3c4d","entry":{…}}`; the checksum covers the bytes of the entry. A last line that
is cut or damaged was never promised to anybody: it is ignored, and cut off by the next append.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rlmq.buffer.batch_log import BatchEntry, BatchLog
from rlmq.common.errors import DependencyError, IntegrityError

_HEAD, _MIDDLE, _TAIL = b'{"crc32":"', b'","entry":', b"}\n"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}


class FileBatchLog(BatchLog):
    """One writer; readers may open the same file at any time."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._file: int | None = None
        self._end_bytes = 0
        self._last_step = -1

    def append(self, entry: BatchEntry) -> None:
        """Write and fsync one entry; see `BatchLog.append`. After a failure the file is as before.

        Raises:
            IntegrityError: the step is not the next one. DependencyError: the disk is full or not writable.
        """
        descriptor = self._open()
        if self._last_step >= 0 and entry.step != self._last_step + 1:
            subject = f"batch log {self._path}"
            raise IntegrityError(subject, got=f"step {entry.step}", expected=f"step {self._last_step + 1}")
        line = _line(entry)
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(descriptor, line[written:], self._end_bytes + written)
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, self._end_bytes)
            raise self._not_writable(error) from error
        self._end_bytes += len(line)
        self._last_step = entry.step

    def entries(self, after_step: int = -1) -> Iterator[BatchEntry]:
        """Entries with a greater step, in order; see `BatchLog.entries`."""
        return (entry for entry, _ in self._read() if entry.step > after_step)

    def rewind(self, step: int) -> None:
        """Take back entries from this step on; see `BatchLog.rewind`."""
        descriptor = self._open()
        self._end_bytes, self._last_step = 0, -1
        for entry, end_bytes in self._read():
            if entry.step < step:
                self._end_bytes, self._last_step = end_bytes, entry.step
        try:
            os.ftruncate(descriptor, self._end_bytes)
            os.fsync(descriptor)
        except OSError as error:
            raise self._not_writable(error) from error

    def last_step(self) -> int:
        """Greatest logged step, or -1."""
        if self._file is not None:
            return self._last_step
        return max((entry.step for entry in self.entries()), default=-1)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        if self._file is not None:
            return self._file
        self._end_bytes, self._last_step = 0, -1
        for entry, end_bytes in self._read():
            self._end_bytes, self._last_step = end_bytes, entry.step
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(descriptor, self._end_bytes)
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # the file's name must survive as well
            finally:
                os.close(folder)
        except OSError as error:
            raise self._not_writable(error) from error
        self._file = descriptor
        return descriptor

    def _not_writable(self, error: OSError) -> DependencyError:
        remedy = "Free space, then start the same command again" if error.errno in _NO_ROOM else "Make it writable"
        return DependencyError(
            f"batch log {self._path}", got=str(error), expected="room on the disk", remedy=remedy
        )

    def _read(self) -> Iterator[tuple[BatchEntry, int]]:
        """Whole entries and the offset behind each."""
        if not self._path.exists():
            return
        offset, last_step = 0, -1
        with self._path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            for line in file:
                entry = _parsed(line)
                if entry is None:
                    # Quotes in texts are escaped: a second head is that of an entry after a damaged line end.
                    if offset + len(line) >= size_bytes and _HEAD not in line[1:]:
                        return
                    raise self._damaged(offset, "a line that does not match its checksum", "an intact entry")
                if last_step >= 0 and entry.step != last_step + 1:
                    raise self._damaged(
                        offset, f"step {entry.step} after step {last_step}", f"step {last_step + 1}"
                    )
                offset, last_step = offset + len(line), entry.step
                yield entry, offset

    def _damaged(self, offset: int, got: str, expected: str) -> IntegrityError:
        remedy = "Restore the file from a copy; without it, steps after the newest checkpoint cannot be redone"
        return IntegrityError(f"batch log {self._path} at byte {offset}", got=got, expected=expected, remedy=remedy)


def _line(entry: BatchEntry) -> bytes:
    body = msgspec.json.encode(entry)
    return b"%s%08x%s%s%s" % (_HEAD, zlib.crc32(body), _MIDDLE, body, _TAIL)


def _parsed(line: bytes) -> BatchEntry | None:
    """The entry, or None when the line is cut or damaged."""
    start = len(_HEAD) + 8 + len(_MIDDLE)
    body = line[start : -len(_TAIL)]
    expected = b"%s%08x%s%s%s" % (_HEAD, zlib.crc32(body), _MIDDLE, body, _TAIL)
    if line != expected:
        return None
    try:
        return msgspec.json.decode(body, type=BatchEntry)
    except msgspec.MsgspecError:
        return None
