"""Closing several things, whatever one of them does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog


def close_all(
    closes: Sequence[Callable[[], None]], failure: BaseException | None, log: structlog.stdlib.BoundLogger
) -> BaseException | None:
    """Call every one, in order; the first error of all counts, later ones are logged.

    Args:
        closes: what to call.
        failure: the error that led to the end, if one did.
        log: where errors after the first are told.

    Returns:
        `failure`, else the first error of closing, else None.
    """
    for close in closes:
        try:
            close()
        except Exception as error:  # noqa: BLE001 - the others must still be closed
            if failure is not None:
                log.error("close failed too", error=f"{type(error).__name__}: {error}")
            failure = failure or error
    return failure
