"""Closing several things, whatever one of them does."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import structlog


class Closing:
    """Closes what was added, the newest first; of several errors the first is raised, the others are logged."""

    def __init__(self, log: structlog.stdlib.BoundLogger) -> None:
        self._log = log
        self._closes: list[Callable[[], None]] = []

    def add(self, close: Callable[[], None]) -> None:
        """Call this at the end."""
        self._closes.append(close)

    def __enter__(self) -> Closing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        first = error
        for close in reversed(self._closes):
            try:
                close()
            except Exception as later:  # noqa: BLE001 - the others must still be closed
                if first is not None:
                    self._log.error("close failed too", error=f"{type(later).__name__}: {later}")
                first = first or later
        if first is not None and first is not error:
            raise first
