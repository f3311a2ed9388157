"""The process that a reward function runs in: killable, without our sockets, with its prints in our log.

Started by `rlmq.producers.process_runner` as `python -P -m rlmq.producers.reward_child FD PARENT_PID FOLDER BLOCK`,
the item of the recipe as JSON. It imports nothing heavy by itself; torch is imported if the scorer needs it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rlmq.common.errors import UsageError
from rlmq.common.processes import die_with_parent
from rlmq.common.user_code import load_function, source_file, user_error
from rlmq.producers.reward_kinds import make_scorer
from rlmq.producers.reward_messages import Connection, Hello, ScoreReply, ScoreRequest, decode_rows
from rlmq.producers.reward_values import to_numbers

_TRACE_CHARACTERS = 4000
Rows = Sequence[tuple[Any, str, dict[str, Any]]]
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class MissingColumn(LookupError):
    """The function needs a column that the row does not have."""


class UserFunction:
    """The user's function behind one form: rows in, values out.

    Args:
        function: the user's function, in TRL's or in verl's signature; which one is told by its parameter names.
        arguments: the recipe's extra keyword arguments.
        subject: the beginning of error messages.

    Raises:
        UsageError: its parameters fit neither signature.
    """

    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any], subject: str) -> None:
        if inspect.isclass(function):
            # Made once; what it is called with later are columns.
            made: Any = function(**arguments)
            function, arguments = made.__call__, {}
        self._function = function
        self._arguments = arguments
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # C functions tell nothing
            parameters = ()  # type: ignore[assignment]
        self._names = {p.name for p in parameters if p.kind in _BY_KEYWORD}
        self._required = {p.name for p in parameters if p.kind in _BY_KEYWORD and p.default is p.empty}
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.verl = "solution_str" in self._names
        self.verl_batch = "solution_strs" in self._names
        self.per_row = self.verl and not inspect.iscoroutinefunction(function)
        if not (self.verl or self.verl_batch or self._takes_all or self._names & {"prompts", "completions"}):
            raise UsageError(
                subject,
                got=f"a function with the parameters ({', '.join(p.name for p in parameters)})",
                expected="f(prompts, completions, **columns) or "
                "compute_score(data_source, solution_str, ground_truth, extra_info)",
            )
        unknown = sorted(set(arguments) - self._names)
        if unknown and not self._takes_all:
            raise UsageError(
                f"{subject}, arguments",
                got=unknown[0],
                expected=f"one of its parameters ({', '.join(sorted(self._names))})",
            )

    def __call__(self, rows: Rows) -> Any:
        """What the user's function returns for these rows; awaited when it is async."""
        if self.verl:
            results = [self._function(**self._fitting(_verl_arguments(row))) for row in rows]
            return [_resolve(result) for result in results] if self.per_row else asyncio.run(_gather(results))
        if self.verl_batch:
            return _resolve(self._function(**self._fitting(_verl_batch_arguments(rows))))
        return _resolve(self._function(**self._fitting(_trl_arguments(rows))))

    def _fitting(self, given: dict[str, Any]) -> dict[str, Any]:
        """Only what the function takes: a row's other columns are offered, not forced on it."""
        offered = {**given, **self._arguments}
        missing = sorted(self._required - set(offered))
        if missing:
            raise MissingColumn(f"no column {missing[0]!r} in the data (columns: {', '.join(sorted(offered))})")
        return offered if self._takes_all else {k: v for k, v in offered.items() if k in self._names}


def _trl_arguments(rows: Rows) -> dict[str, Any]:
    """TRL's form: lists over rows; a completion is text, or one assistant message where the prompt is messages."""
    columns: dict[str, list[Any]] = {name: [] for _, _, fields in rows for name in fields}
    for _, _, fields in rows:
        for name, values in columns.items():
            values.append(fields.get(name))
    prompts = [prompt for prompt, _, _ in rows]
    completions = [
        [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text for prompt, text, _ in rows
    ]
    return {**columns, "prompts": prompts, "completions": completions}


def _verl_arguments(row: tuple[Any, str, dict[str, Any]]) -> dict[str, Any]:
    """verl's form: one row; the truth lies in `reward_model.ground_truth`."""
    _, text, fields = row
    given = {"data_source": fields.get("data_source"), "solution_str": text, "extra_info": fields.get("extra_info")}
    if given["extra_info"] is None:
        given["extra_info"] = {}
    model = fields.get("reward_model")
    if isinstance(model, dict) and "ground_truth" in model:
        given["ground_truth"] = model["ground_truth"]
    elif "ground_truth" in fields:
        given["ground_truth"] = fields["ground_truth"]
    return given


def _verl_batch_arguments(rows: Rows) -> dict[str, Any]:
    """verl's form for all rows at once: its names in the plural, one list each."""
    given = [_verl_arguments(row) for row in rows]
    names = dict.fromkeys(name for one in given for name in one)
    return {f"{name}s": [one.get(name) for one in given] for name in names}


def _resolve(result: Any) -> Any:
    return asyncio.run(_gather([result]))[0] if inspect.isawaitable(result) else result


async def _gather(results: Sequence[Awaitable[Any]]) -> list[Any]:
    return list(await asyncio.gather(*results))


class Scorer:
    """Answers requests about one function; tells each distinct traceback once, in the log."""

    def __init__(self, function: UserFunction, spec: str, file: Path, *, per_row: bool) -> None:
        self.per_row = per_row
        self._function = function
        self._spec = spec
        self._file = file
        self._told: set[str] = set()

    def score(self, request: ScoreRequest) -> ScoreReply:
        """Call the function; whatever it raises is the reply's failure."""
        rows = decode_rows(request.rows)
        try:
            returned = self._function(rows)
            # A generator runs the user's code only now.
            found = to_numbers(returned, len(rows), self._spec)
        except MissingColumn as error:
            return self._failed(request, len(rows), f"{self._spec}: {error}")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
            message = str(user_error(error, self._file, subject=self._spec)).removesuffix(" Correct this line.")
            self._tell(message)
            trace = "" if isinstance(error, MemoryError) else traceback.format_exc()[-_TRACE_CHARACTERS:]
            return self._failed(request, len(rows), message, raised=True, trace=trace)
        return ScoreReply(
            call=request.call, values=found.values, failure=found.failure, notes=found.notes, fields=found.fields
        )

    def _failed(
        self, request: ScoreRequest, count: int, failure: str, *, raised: bool = False, trace: str = ""
    ) -> ScoreReply:
        none: list[float | None] = [None] * count
        return ScoreReply(call=request.call, values=none, failure=failure, raised=raised, traceback=trace)

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            traceback.print_exc()


def _load(block: dict[str, Any], folder: Path) -> Scorer:
    spec, subject = block["source"], "reward function"
    if block["kind"] != "function":
        scorer = make_scorer(block, folder)
        return Scorer(UserFunction(scorer, {}, block["subject"]), spec, Path(__file__), per_row=scorer.per_row)
    loaded = load_function(spec, folder, subject=subject)
    file = source_file(spec, folder, subject=subject)
    try:
        function = UserFunction(loaded, block["arguments"], f"{subject} ({spec})")
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # a class that cannot be made
        raise user_error(error, file, subject=f"{subject} ({spec})") from error
    return Scorer(function, spec, file, per_row=function.per_row)


def main(argv: Sequence[str]) -> int:
    """Load the scorer, say hello, answer requests until the parent closes the connection."""
    descriptor, parent_pid, folder, text = argv
    die_with_parent(int(parent_pid))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    connection = Connection(socket.socket(fileno=int(descriptor)))
    block = json.loads(text)
    sys.argv = [block["source"]]
    if block["memory_mb"] is not None and block["kind"] != "code":
        limit_bytes = block["memory_mb"] << 20
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    try:
        scorer = _load(block, Path(folder))
    except UsageError as error:
        connection.send(Hello(error=str(error)))
        return int(error.exit_code)
    connection.send(Hello(per_row=scorer.per_row))
    while message := connection.receive():
        connection.send(scorer.score(msgspec.msgpack.decode(message, type=ScoreRequest)))
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
