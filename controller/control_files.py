"""The two files in which the controller tells what it knows and did: `control.json` and `control_log.jsonl`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from rlmq.common.control import Snapshot
from rlmq.common.run_folder import RunFolder
from rlmq.controller.events import Line

_BUFFER_BYTES = 1 << 16
_encoder = msgspec.json.Encoder()


class ControlFiles:
    """Written by the controller alone. A full disk costs lines, never the run; `failed` has the last reason."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._log: IO[bytes] | None = None
        self.failed = ""

    def append(self, line: Line) -> None:
        """Add a line; it is in the file after the next `show` or `close`."""
        try:
            if self._log is None:
                self._log = _open_for_lines(self._run.control_log)
            self._log.write(_encoder.encode(line) + b"\n")
        except OSError as error:
            self.failed = str(error)

    def show(self, snapshot: Snapshot) -> None:
        """Replace the snapshot whole, so that a reader never sees half of it."""
        temporary = self._run.control.with_suffix(".tmp")
        try:
            temporary.write_bytes(msgspec.json.format(_encoder.encode(snapshot), indent=1))
            temporary.replace(self._run.control)
            if self._log is not None:
                self._log.flush()
        except OSError as error:
            self.failed = str(error)

    def close(self) -> None:
        """Write what is left."""
        if self._log is not None:
            try:
                self._log.close()
            except OSError as error:
                self.failed = str(error)


def read_control_log(path: Path) -> Iterator[Line]:
    """Lines of a log, in order. A line that was cut when its writer died is left out.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for line in file:
            try:
                yield msgspec.json.decode(line, type=Line)
            except msgspec.MsgspecError:
                continue


def _open_for_lines(path: Path) -> IO[bytes]:
    """Append; what a killed writer left of a line becomes a line of its own."""
    file = path.open("ab+", buffering=_BUFFER_BYTES)
    if file.seek(0, os.SEEK_END) > 0:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file
