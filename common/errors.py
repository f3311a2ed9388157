"""Every error that rlmq raises on purpose, grouped by what the caller does about it.

::

    RlmqError                      exit  what to do
     +-- UsageError                   2  correct the recipe, data, reward function or command
     +-- DependencyError              3  start or install what is missing (Redis, a package, disk)
     +-- SecondController             4  another process already steers this run: leave it alone
     +-- DeadlineExceeded             5  look at who was waited for
     +-- IntegrityError               6  stop: the data contradict each other
     |    +-- SchemaMismatch             a process with other columns
     |    +-- DecodeError                bytes that are not what they claim to be
     |    +-- Fenced                     a write from a lease or incarnation that is no longer valid
     |    +-- ControlLoopDiverged        another call under a known id
     +-- RestartRequired             75  the supervisor starts the process again
     +-- Interrupted                130  Ctrl-C: what was trained is saved
     +-- Terminated                 143  SIGTERM, and not everything was done in time

After SIGTERM a process exits with 0 when all of it was done within `deadlines.drain_s`: work in hand finished or
given back, what was trained saved, goodbye said. The same command goes on then, as after 130 and 143.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of every command, in one table."""

    OK = 0
    USAGE = 2
    DEPENDENCY = 3
    SECOND_CONTROLLER = 4
    DEADLINE = 5
    INTEGRITY = 6
    RESTART = 75
    INTERRUPTED = 130
    TERMINATED = 143


class RlmqError(Exception):
    """An expected failure, told in one message: subject, got, expected, what to do.

    Args:
        subject: what the message is about (`"train.lr"`, `"reward function r.py:score"`).
        got: what was found there.
        expected: what would have been right.
        remedy: what the user can do, as an imperative sentence.

    Example:
        >>> str(UsageError("train.lr", got="'fast'", expected="a number", remedy="Write lr: 1.0e-6"))
        "train.lr: got 'fast', expected a number. Write lr: 1.0e-6."
    """

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(self, subject: str, *, got: object = None, expected: str = "", remedy: str = "") -> None:
        self.subject = subject
        self.got = got
        self.expected = expected
        self.remedy = remedy
        super().__init__(self._message())

    def _message(self) -> str:
        facts = []
        if self.got is not None:
            facts.append(f"got {self.got}")
        if self.expected:
            facts.append(f"expected {self.expected}")
        text = f"{self.subject}: {', '.join(facts)}" if facts else self.subject
        if self.remedy:
            text = f"{text}. {self.remedy}" if text[-1] not in ".!?" else f"{text} {self.remedy}"
        return text if text[-1] in ".!?" else f"{text}."


class UsageError(RlmqError):
    """The user can correct it: recipe, data, reward function, command line."""

    exit_code = ExitCode.USAGE


class DependencyError(RlmqError):
    """Something outside rlmq is missing, unreachable or full."""

    exit_code = ExitCode.DEPENDENCY


class SecondController(RlmqError):
    """Another live process already steers this run."""

    exit_code = ExitCode.SECOND_CONTROLLER


class DeadlineExceeded(RlmqError):
    """A wait ended without what it waited for; the message names who was waited for."""

    exit_code = ExitCode.DEADLINE


class IntegrityError(RlmqError):
    """Stored data contradict each other; going on would corrupt the run."""

    exit_code = ExitCode.INTEGRITY


class SchemaMismatch(IntegrityError):
    """Two processes disagree about a table's columns."""


class DecodeError(IntegrityError):
    """Bytes from a wire or a file are not what they claim to be."""


class Fenced(IntegrityError):
    """A write came from a lease, incarnation or epoch that is no longer valid."""


class ControlLoopDiverged(IntegrityError):
    """The control loop made another call under an id that is already known."""


class RestartRequired(RlmqError):
    """This process cannot go on, a fresh one can."""

    exit_code = ExitCode.RESTART


class Interrupted(RlmqError):
    """The user pressed Ctrl-C."""

    exit_code = ExitCode.INTERRUPTED


class Terminated(RlmqError):
    """The process received SIGTERM."""

    exit_code = ExitCode.TERMINATED
