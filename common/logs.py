"""Logs: one line per event for people, an event name and fields for programs.

Every process logs to stderr; the supervisor redirects it to `runs/<run_id>/logs/<role>-<rank>.log`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

import structlog

LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def configure(
    role: str, rank: int, *, level: str = "info", stream: TextIO | None = None, **fields: object
) -> structlog.stdlib.BoundLogger:
    """Set up this process's log and return its logger.

    Args:
        role: the process's role (`"reward"`).
        rank: its rank within the role.
        level: the lowest level shown, one of `LEVELS`.
        stream: where lines go; none: stderr.
        fields: more fields of every line (`run="demo-1"`).

    Example:
        >>> log = configure("reward", 0)
        >>> log.info("reward.scored", rows=8)       # 2026-01-02T03:04:05.678901Z [info] reward.scored role=reward …
    """
    threshold = LEVELS[level]
    structlog.configure(
        processors=[
            _drop_below(threshold),
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.dev.ConsoleRenderer(
                colors=False, pad_event_to=0, pad_level=False, exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.PrintLoggerFactory(file=stream or sys.stderr),
        cache_logger_on_first_use=True,
    )
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(role=role, rank=rank, **fields)
    return logger.bind()


def _drop_below(threshold: int) -> structlog.types.Processor:
    def drop(_: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if LEVELS.get(method, logging.CRITICAL) < threshold:
            raise structlog.DropEvent
        return event

    return drop
