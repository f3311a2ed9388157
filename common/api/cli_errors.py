"""How every command ends: one message on stderr and a documented exit code, no traceback."""

from __future__ import annotations

import errno
import functools
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, ParamSpec

import typer

from rlmq.common.errors import ExitCode, RlmqError

_P = ParamSpec("_P")


def ends_in_one_message(command: Callable[_P, int | None]) -> Callable[_P, None]:
    """Run a command; its return value is the exit code, its errors become `error: MESSAGE` on stderr."""

    @functools.wraps(command)
    def told(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            code = command(*args, **kwargs) or 0
        except KeyboardInterrupt:
            code = int(ExitCode.INTERRUPTED)
        except BrokenPipeError:  # the reader of a pipe has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 0
        except (RlmqError, OSError) as error:
            code = tell(error)
        except Exception as error:  # noqa: BLE001 - the outermost frame of a process: nobody else can tell the user
            code = tell(error)
        raise typer.Exit(code)

    return told


def tell(error: BaseException, *, to_log: bool = False) -> int:
    """Print `error: MESSAGE` on stderr; returns the exit code.

    The traceback of an unexpected error comes before it when stderr is a process's log (`to_log`) or
    `RLMQ_TRACEBACK` is set.
    """
    if isinstance(error, RlmqError):
        message, code = str(error), int(error.exit_code)
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        place = f" at {error.filename}" if error.filename else ""
        message = (
            f"{os.strerror(error.errno)}{place}. Free some space or choose another place; the same command goes on."
        )
        code = int(ExitCode.DEPENDENCY)
    else:
        message, code = f"unexpected {type(error).__name__} at {_place(error)}: {error}", 1
        if not to_log:
            message += " (RLMQ_TRACEBACK=1 shows the whole way there)"
    if os.environ.get("RLMQ_TRACEBACK") or (code == 1 and to_log):
        traceback.print_exception(error, file=sys.stderr)
    print(f"error: {message}", file=sys.stderr, flush=True)
    return code


def leave(code: int) -> NoReturn:
    """End this process at once with the code, past threads that do not end by themselves."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "an unknown place"
