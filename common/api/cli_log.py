"""`rlmq log`: what the controller heard and did, and what the supervisor did, merged by time."""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from rlmq.cli_buffer import plain
from rlmq.common.control import Death, Order
from rlmq.common.errors import ExitCode
from rlmq.common.processes import describe_exit
from rlmq.common.run_folder import RunFolder
from rlmq.controller.display import GrowingLines, describe_line
from rlmq.controller.runs import find_run, read_summary

_POLL_S = 0.25
_QUIET_S = 1.0
_LAST_LINES = 3

Record = Mapping[str, Any]


@dataclass(slots=True)
class Story:
    """Tells records one after the other; remembers what a later one needs: open calls, the open step."""

    evaluations: Mapping[int, Record] = field(default_factory=dict)
    step: int = 0
    open_calls: dict[str, Record] = field(default_factory=dict)
    joined: dict[str, tuple[int, bool]] = field(default_factory=dict)
    waited_for: str = ""

    def about(self, record: Record) -> tuple[int, set[str]]:
        """The step of a record, and the workers that it concerns."""
        if "name" in record:
            return self.step, {str(record["name"])}
        event = _event(record)
        if event["type"] == "opened":
            self.step = int(event.get("step", 0))
        names = {f"{event['role']}-{rank}" for rank in _ranks(event)} if "role" in event else set()
        call_id = str(event.get("call_id", ""))
        if call_id in self.open_calls:
            asked = _event(self.open_calls[call_id])
            names |= {f"{asked.get('role')}-{rank}" for rank in _ranks(event) or _ranks(asked)}
        number = call_id.partition("/")[0]
        return int(number) if number.isdigit() else self.step, names

    def tell(self, record: Record, *, every: bool) -> Iterator[str]:
        """Lines for people; none for what only machines need. `every` brings each change of activity."""
        if "name" in record:
            yield from _tell_death(record)
            return
        event = _event(record)
        kind = event["type"]
        if kind == "asked":
            self.open_calls[str(event.get("call_id"))] = record
        elif kind == "began":
            self.open_calls.clear()  # this controller asks again for what it still needs
        if kind == "heard":
            yield from self._tell_heard(event, every=every)
        elif kind == "waits":
            yield from self._tell_wait(event)
        elif kind not in _WORDS:
            yield f"{kind} {_fields(event)}".rstrip()
        elif text := _WORDS[kind](event):
            yield text
        commands = record.get("commands", ())
        yield from _tell_desired([one["desired"] for one in commands if one.get("type") == "want"])
        for command in commands:
            yield from self._tell_command(record, command)

    def _tell_heard(self, event: Record, *, every: bool) -> Iterator[str]:
        """A worker joined, or is ready; of one worker alone also what it does."""
        name, now = _name(event), (int(event.get("incarnation", 0)), bool(event.get("ready")))
        if self.joined.get(name) != now:
            yield f"{name} {'is ready' if now[1] else 'joined'} (incarnation {now[0]})"
        elif every:
            yield _doing(event)
        self.joined[name] = now

    def _tell_wait(self, event: Record) -> Iterator[str]:
        what = str(event.get("what", ""))
        if what and what != self.waited_for:
            on = f" ({', '.join(event['on'])})" if event.get("on") else ""
            yield f"the loop waits for {what}{on}"
        self.waited_for = what

    def _tell_command(self, record: Record, command: Record) -> Iterator[str]:
        match command.get("type"):
            case "resolve":
                yield from self._tell_done(record, command)
            case "lost":
                yield f"{_name(command)} is lost: silent for {command.get('silent_s', 0):.1f} s"
            case "release":
                asked = self.open_calls.get(str(command.get("call_id")))
                role = _event(asked).get("role", "rank") if asked else "rank"
                name = f"{role}-{command.get('rank')}"
                yield f"call {command.get('call_id')} goes on without {name}: {command.get('why')}"
            case "refuse":
                yield f"order {command.get('number')} refused: {command.get('why')}"
            case "fail":
                yield f"the run fails with exit {command.get('exit_code')}: {command.get('error')}"

    def _tell_done(self, record: Record, command: Record) -> Iterator[str]:
        call_id = str(command.get("call_id"))
        asked = self.open_calls.pop(call_id, None)
        ranks = ",".join(map(str, command.get("ranks", ())))
        seconds = f" in {float(record['at']) - float(asked['at']):.3f} s" if asked else ""
        yield f"call {call_id} done by rank{'s' * (',' in ranks)} {ranks}{seconds}"
        step, _, rest = call_id.partition("/")
        if rest.endswith("recorder.evaluate") and step.isdigit() and int(step) in self.evaluations:
            yield describe_line(self.evaluations[int(step)])

    def rest(self, now: float) -> Iterator[str]:
        """Calls that have no results yet."""
        for call_id, asked in self.open_calls.items():
            yield f"call {call_id} is open for {now - float(asked['at']):.1f} s"


def log_command(
    run: str | None, *, folder: Path, step: int | None, worker: str | None, follow: bool, as_json: bool
) -> int:
    """`rlmq log`. With `follow` it goes on until the run has ended or the user ends it."""
    found = find_run(folder, run)
    sources = [GrowingLines(path, from_start=True) for path in (found.control_log, found.supervisor_log)]
    story = Story()
    quiet_since = time.monotonic()
    while True:
        story.evaluations = _evaluations(found)
        for record in heapq.merge(*(source.new() for source in sources), key=_at):
            quiet_since = time.monotonic()
            number, names = story.about(record)
            lines = _stamped(record, list(story.tell(record, every=worker is not None)))
            if as_json:
                lines = [msgspec.json.encode(record).decode()]
            if (step is None or number == step) and (worker is None or worker in names):
                _print(lines)
        over = read_summary(found).get("exit") is not None and time.monotonic() - quiet_since >= _QUIET_S
        if not follow or over:
            break
        time.sleep(_POLL_S)
    if not as_json and step is None and worker is None and read_summary(found).get("exit") is None:
        _print(list(story.rest(time.time())))
    return int(ExitCode.OK)


def _print(lines: Sequence[str]) -> None:
    if lines:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()


def _stamped(record: Record, lines: Sequence[str]) -> list[str]:
    at = datetime.fromtimestamp(_at(record)).astimezone()
    stamp = at.strftime("%H:%M:%S.") + f"{at.microsecond // 1000:03d}"
    return [f"{stamp}  {plain(line)}" for line in lines]


def _at(record: Record) -> float:
    value = record.get("at", record.get("at_unix_s", 0.0))
    return float(value) if isinstance(value, int | float) else 0.0


def _evaluations(run: RunFolder) -> dict[int, Record]:
    lines = GrowingLines(run.metrics, from_start=True).new()
    return {int(line["step"]): line for line in lines if line.get("kind") == "eval" and "step" in line}


# -- words ---------------------------------------------------------------------------------------------------------


def _event(record: Record) -> dict[str, Any]:
    event = record.get("event")
    return {"type": "", **event} if isinstance(event, dict) else {"type": ""}


def _ranks(event: Record) -> tuple[int, ...]:
    if "rank" in event:
        return (event["rank"],)
    return tuple(event.get("ranks") or ())


def _name(event: Record) -> str:
    return f"{event.get('role')}-{event.get('rank')}"


def _fields(event: Record) -> str:
    return " ".join(f"{key}={value}" for key, value in event.items() if key not in ("type", "at"))


def _doing(event: Record) -> str:
    version = event.get("serving", -1)
    serves = f", serves version {version}" if version >= 0 else ""
    call = f", call {event['call']}" if event.get("call") else ""
    return f"{_name(event)} is {event.get('activity', 'idle')}{serves}{call}"


def _left(event: Record) -> str:
    error = f": {event['error']}" if event.get("error") else ""
    return f"{_name(event)} left with exit {event.get('exit_code')}{error}"


def _ordered(event: Record) -> str:
    return f"order {event.get('number')}: {order_words(msgspec.convert(event['order'], Order))}"


def _began(event: Record) -> str:
    workers = ", ".join(f"{count} {role}" for role, count in event.get("workers", {}).items())
    return f"controller began epoch {event.get('epoch')}, phase {event.get('phase', 'run')}; workers: {workers}"


def _served(event: Record) -> str:
    ranks = ", ".join(f"{event.get('role')}-{rank}" for rank in _ranks(event))
    return f"version {event.get('version')} is served by {ranks}"


def _silence(_: Record) -> str:
    return ""


_WORDS = {
    "began": _began,
    "left": _left,
    "ordered": _ordered,
    "opened": lambda event: f"step {event.get('step')} opened",
    "wanted": _silence,
    "served": _served,
    "ended": lambda event: f"run ended with exit {event.get('exit_code')}",
    "asked": _silence,
    "told": _silence,
    "looked": _silence,
    "silent": _silence,
    "tick": _silence,
}
"""What is told of an event; of calls one hears when they are done, of silence when somebody is lost."""


def _tell_desired(wants: Sequence[Record]) -> Iterator[str]:
    """Desired states that one event made: roles by what they shall do."""
    roles: dict[str, list[str]] = {}
    for desired in wants:
        version = f", policy version {desired['policy_version']}" if desired.get("policy_version") else ""
        roles.setdefault(f"{desired.get('phase')}{version}", []).append(str(desired.get("role")))
    for what, names in roles.items():
        yield f"{', '.join(names)} shall {what}"


def order_words(order: Order) -> str:
    """`set train.steps=40 by ada@host`."""
    settings = "".join(f" {key}={value}" for key, value in order.settings.items())
    return plain(f"{order.verb}{settings}" + (f" by {order.by}" if order.by else ""))


def _tell_death(record: Record) -> Iterator[str]:
    death = msgspec.convert(record, Death)
    text = f"{death.name} {death.what}, process {death.pid}"
    if death.exit_code is not None:
        text += f", {describe_exit(death.exit_code)}"
    if death.call:
        text += f", in call {death.call}"
    yield text + (f", {death.why}" if death.why else "")
    if death.exit_code not in (0, None):
        yield from (f"    {line}" for line in death.last_lines[-_LAST_LINES:])
