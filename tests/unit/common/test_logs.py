"""Log lines: what people read, and what programs find in them."""

from __future__ import annotations

import io
import re

import pytest

from rlmq.common.logs import configure


def test_a_line_has_utc_time_level_event_and_fields() -> None:
    stream = io.StringIO()

    configure("reward", 3, stream=stream).info("reward.scored", rows=8, sample_id="train-000001-0000-00")

    line = stream.getvalue()
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z \[info\] reward\.scored ", line)
    for field in ("role=reward", "rank=3", "rows=8", "sample_id=train-000001-0000-00"):
        assert field in line
    assert line.count("\n") == 1


def test_text_with_line_ends_stays_on_one_line() -> None:
    stream = io.StringIO()

    configure("reward", 0, stream=stream).warning("odd", text="a\nb\x1b[31m")

    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()


def test_an_exception_is_told_with_its_traceback() -> None:
    stream = io.StringIO()
    log = configure("reward", 0, stream=stream)

    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("crashed")

    assert "[error] crashed" in stream.getvalue()
    assert "ValueError: broken" in stream.getvalue()


@pytest.mark.parametrize(("level", "shown"), [("debug", 3), ("info", 2), ("error", 1)])
def test_lines_below_the_level_are_left_out(level: str, shown: int) -> None:
    stream = io.StringIO()
    log = configure("reward", 0, level=level, stream=stream)

    log.debug("a")
    log.info("b")
    log.error("c")

    assert stream.getvalue().count("\n") == shown
