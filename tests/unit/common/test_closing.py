"""Closing several things: failed set-up, a close that raises."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from rlmq.common.closing import Closing
from rlmq.common.logs import configure


class Opened:
    """Things that note when they are closed; those named in `broken` raise then."""

    def __init__(self, *broken: str) -> None:
        self.closed: list[str] = []
        self.told = io.StringIO()
        self._broken = broken

    def thing(self, name: str) -> Callable[[], None]:
        def close() -> None:
            self.closed.append(name)
            if name in self._broken:
                raise RuntimeError(name)

        return close

    def use(self, *names: str, then: Exception | None = None) -> None:
        with Closing(configure("reward", 0, stream=self.told)) as closing:
            for name in names:
                closing.add(self.thing(name))
            if then is not None:
                raise then


def test_everything_is_closed_newest_first() -> None:
    opened = Opened()
    opened.use("first", "second")
    assert opened.closed == ["second", "first"]


def test_one_that_fails_does_not_keep_the_others_open_and_the_first_error_is_raised() -> None:
    # given three things, of which two cannot be closed
    opened = Opened("second", "third")
    with pytest.raises(RuntimeError, match="third"):
        opened.use("first", "second", "third")
    # then all were tried, and the second error is in the log
    assert opened.closed == ["third", "second", "first"]
    assert "RuntimeError: second" in opened.told.getvalue()


def test_an_error_of_the_work_or_the_set_up_counts_before_those_of_closing() -> None:
    opened = Opened("second")
    with pytest.raises(ValueError, match="set-up"):
        opened.use("first", "second", then=ValueError("set-up"))
    assert opened.closed == ["second", "first"]
