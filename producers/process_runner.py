"""Runs a reward function in a killable child process: a time-out or a crash is *no verdict*, never 0."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rlmq.common.errors import DeadlineExceeded, DecodeError, UsageError
from rlmq.common.metrics import REWARD_CALL_FAILURES, REWARD_CALL_SECONDS
from rlmq.common.processes import describe_exit, end_family, reap
from rlmq.common.recipe.reward_block import RewardBlock
from rlmq.producers.reward_messages import Connection, Hello, ScoreReply, ScoreRequest, encode_rows
from rlmq.producers.reward_runner import RewardRow, RewardRunner, Verdicts

Message = TypeVar("Message", bound=msgspec.Struct)

GREATEST_TIMEOUTS = 3  # of one per-row function in one `score`, so that a claim's time is bounded


class ProcessRewardRunner(RewardRunner):
    """One scorer in a child process of its own, restarted after a time-out or a crash.

    The function is called with all rows at once (TRL's signature), or once per row (verl's); the time limit is
    for each call. After three time-outs of a per-row function within one `score`, its remaining rows have no
    verdict.

    Args:
        block: the item of the recipe's list: kind, limits, arguments.
        name: name of its column.
        recipe_folder: where a relative file is looked up.
        while_waiting: called about once a second during a call, to extend leases.
        start_s: how long importing the user's file may take; it may load a model.
        most_calls: how often a row for which the function raises is tried, alone.

    Raises:
        UsageError: no such file or function, an import that fails, or parameters of neither signature.
    """

    def __init__(
        self,
        block: RewardBlock,
        name: str,
        recipe_folder: Path,
        *,
        while_waiting: Callable[[], None] | None = None,
        start_s: float = 180.0,
        most_calls: int = 1,
    ) -> None:
        self._block = block
        self._start_s = start_s
        self._most_calls = most_calls
        self._name = name
        self._folder = recipe_folder
        self._while_waiting = while_waiting
        self._calls = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._per_row = False
        try:
            self._start()
        except (ConnectionError, DeadlineExceeded) as error:
            raise UsageError(self._subject, got=str(error), expected="a file that can be imported") from error

    @property
    def name(self) -> str:
        """Name of its column (`reward.NAME`)."""
        return self._name

    @property
    def _subject(self) -> str:
        return self._block.subject

    def score(self, rows: Sequence[RewardRow]) -> Verdicts:
        """Score the rows; never raises for what the function does."""
        if not rows:
            return Verdicts([])
        return self._row_by_row(rows) if self._per_row else self._part_by_part(rows)

    def _part_by_part(self, rows: Sequence[RewardRow]) -> Verdicts:
        """One call; where it raises, dies or takes too long, its halves: such a row takes no other's verdict.

        What it returned is never a reason: a lone value would fit a lone row. All rows for which it raises are
        found, and of those for which it dies or takes too long one, within three times the limit of a call.
        """
        values: list[float | None] = [None] * len(rows)
        fields: list[dict[str, Any]] = [{} for _ in rows]
        failures: list[str] = []
        notes: list[str] = []
        raised: dict[int, str] = {}
        timed_out, parts, left = False, [range(len(rows))], 2 * len(rows).bit_length()
        deadline = time.monotonic() + GREATEST_TIMEOUTS * self._block.timeout_s
        while parts and left > 0:
            part = parts.pop()
            verdict, late, ended = self._tried([rows[row] for row in part])
            left -= self._connection is None
            raised.update((part.start, trace) for trace in verdict.raised.values())
            timed_out |= late
            notes += verdict.notes
            if verdict.failure:
                failures.append(verdict.failure)
                if ended and len(part) > 1:
                    middle = part.start + len(part) // 2
                    parts += [range(middle, part.stop), range(part.start, middle)]
            for row, value, own in zip(part, verdict.values, verdict.fields or [{}] * len(part), strict=True):
                values[row], fields[row] = value, own
            if time.monotonic() > deadline:
                timed_out, left = timed_out or bool(parts), 0
        told = tuple(dict.fromkeys((*failures, *notes)))
        failure = failures[0] if failures and all(value is None for value in values) else ""
        return Verdicts(values, failure, told, timed_out, tuple(fields) if any(fields) else (), raised)

    def _row_by_row(self, rows: Sequence[RewardRow]) -> Verdicts:
        values: list[float | None] = []
        notes: list[str] = []
        fields: list[dict[str, Any]] = []
        raised: dict[int, str] = {}
        timeouts = 0
        for index, row in enumerate(rows):
            if timeouts == GREATEST_TIMEOUTS:
                notes.append(f"{self._block.source}: {timeouts} time-outs, so rows {index} and on were not scored")
                values += [None] * (len(rows) - index)
                break
            verdict, timed_out, _ = self._tried([row])
            raised.update((index, trace) for trace in verdict.raised.values())
            timeouts += timed_out
            values += verdict.values
            fields += verdict.fields or [{}]
            notes += [verdict.failure] if verdict.failure else list(verdict.notes)
        failure = notes[0] if notes and all(value is None for value in values) else ""
        fields += [{}] * (len(rows) - len(fields))
        return Verdicts(values, failure, tuple(notes), timeouts > 0, tuple(fields) if any(fields) else (), raised)

    def close(self) -> None:
        """End its process."""
        self._end()

    def _tried(self, rows: Sequence[RewardRow]) -> tuple[Verdicts, bool, bool]:
        """One call; with a row alone for which it raises, some more."""
        found = self._call(rows)
        for _ in range(self._most_calls - 1):
            if not found[0].raised:
                break
            found = self._call(rows)
        return found

    def _call(self, rows: Sequence[RewardRow]) -> tuple[Verdicts, bool, bool]:
        """One call of the function; whether it timed out, and whether it did not return."""
        began = time.monotonic()
        timed_out, ended = False, True
        try:
            verdicts, ended = self._ask(rows)
        except DeadlineExceeded:
            timed_out = True
            self._end()
            verdicts = self._none(rows, f"no answer within {self._block.timeout_s:g} s, so its process was ended")
        except (ConnectionError, DecodeError, UsageError) as error:
            self._end()
            verdicts = self._none(rows, str(error))
        except BaseException:
            self._end()  # an answer may be under way: the next call must not read it
            raise
        REWARD_CALL_SECONDS.labels(self._name).observe(time.monotonic() - began)
        if verdicts.failure:
            REWARD_CALL_FAILURES.labels(self._name).inc()
        return verdicts, timed_out, ended

    def _none(self, rows: Sequence[RewardRow], reason: str) -> Verdicts:
        reason = reason if reason.startswith(self._block.source) else f"{self._block.source}: {reason}"
        return Verdicts([None] * len(rows), reason)

    def _ask(self, rows: Sequence[RewardRow]) -> tuple[Verdicts, bool]:
        """What the process says, and whether the function raised."""
        connection = self._connection or self._start()
        self._calls += 1
        request = ScoreRequest(
            call=self._calls, rows=encode_rows([(row.prompt, row.response_text, row.fields) for row in rows])
        )
        deadline = time.monotonic() + self._block.timeout_s
        try:
            connection.send(request, timeout_s=self._block.timeout_s)
        except OSError as error:
            raise ConnectionError(self._how_it_ended()) from error
        reply = self._receive(connection, deadline, ScoreReply)
        if reply.call != self._calls or len(reply.values) != len(rows) or len(reply.fields) not in (0, len(rows)):
            raise DecodeError(self._subject, got="an answer to another call", expected=f"call {self._calls}")
        raised = {0: reply.traceback} if reply.traceback and len(rows) == 1 else {}
        verdicts = Verdicts(
            reply.values, reply.failure, tuple(reply.notes), fields=tuple(reply.fields), raised=raised
        )
        return verdicts, reply.raised

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                self._command(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=2,  # the function's prints go to this process's log
                pass_fds=(theirs.fileno(),),
                process_group=0,
                # Sets of texts keep their order over restarts.
                env={"PYTHONHASHSEED": "0", **os.environ},
            )
        self._connection = Connection(ours)
        hello = self._receive(self._connection, time.monotonic() + self._start_s, Hello)
        if hello.error:
            self._end()
            raise UsageError(hello.error)
        self._per_row = hello.per_row
        return self._connection

    def _command(self, descriptor: int) -> list[str]:
        block = self._block
        return [
            sys.executable,
            "-P",  # the working directory is not on the path; the function's own folder is
            "-m",
            "rlmq.producers.reward_child",
            str(descriptor),
            str(os.getpid()),
            str(self._folder),
            json.dumps(
                {
                    "kind": block.kind,
                    "source": block.source,
                    "subject": block.subject,
                    "arguments": block.arguments,
                    "timeout_s": block.timeout_s,
                    "memory_mb": block.memory_mb,
                }
            ),
        ]

    def _receive(self, connection: Connection, deadline: float, kind: type[Message]) -> Message:
        def check() -> None:
            # Its own children may hold the socket open after it died.
            if self._child is not None and reap(self._child) is not None:
                raise ConnectionError(self._how_it_ended())
            if self._while_waiting is not None:
                self._while_waiting()

        message = connection.receive(deadline=deadline, while_waiting=check)
        if not message:
            raise ConnectionError(self._how_it_ended())
        try:
            return msgspec.msgpack.decode(message, type=kind)
        except msgspec.MsgspecError as error:
            raise DecodeError(self._subject, got=str(error), expected=f"a {kind.__name__}") from error

    def _how_it_ended(self) -> str:
        child = self._child
        if child is None:
            return "its process had ended"
        returncode = reap(child)
        if returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                returncode = child.wait(timeout=1.0)
        return (
            "its process closed the connection"
            if returncode is None
            else f"its process ended with {describe_exit(returncode)}"
        )

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._child is not None:
            if self._child.returncode is None:
                end_family(self._child.pid)
                self._child.wait()
            self._child = None
