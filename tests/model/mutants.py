"""Faults planted in the buffer, each a small substitution in its source, and the invariant that must notice it.

A substitution that does not match exactly once raises `Stale`: a mutant cannot rot unseen.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmq.buffer import connection, library

README = Path(__file__).with_name("README.md")
_FUNCTIONS = Path(library.__file__).parent / "functions"


class Stale(Exception):
    """The source has changed: the mutant must be written anew."""


@dataclass(frozen=True)
class Mutant:
    """A planted fault: `old` becomes `new` in `source`, which is a file of functions or a module of the client.

    `killed_by` names the invariants, any of which may be the first to notice it; `dimensions` choose the tables in
    which it shows soonest.
    """

    name: str
    fault: str
    killed_by: tuple[str, ...]
    source: str
    old: str
    new: str
    dimensions: Mapping[str, Any] = field(default_factory=dict)

    def mutated(self, text: str) -> str:
        """The source with the fault in it."""
        if text.count(self.old) != 1:
            raise Stale(f"{self.name}: {self.source} has {text.count(self.old)} times {self.old!r}")
        return text.replace(self.old, self.new)


MUTANTS = (
    Mutant(
        "double_ack",
        "an acknowledged row counts twice",
        ("counts_agree",),
        "runs.lua",
        "if to > 0 then count(config.base[i] + to, 1) end",
        "if to > 0 then count(config.base[i] + to, to == PAST and from == LEASED and 2 or 1) end",
    ),
    Mutant(
        "lost_member",
        "a group is ready although a member misses columns",
        ("group_whole",),
        "rows.lua",
        "if complete[u] and not blocked[u] then joined",
        "if complete[u] then joined",
        {"a_scope": "row", "b_scope": "group", "group_deadline_s": None},
    ),
    Mutant(
        "forgotten_flush",
        "the end of the upstream does not waive min_batch",
        ("flush_flushes",),
        "wake.lua",
        "if closed > 0 then",
        "if closed < 0 then",
        {"min_batch": 3, "max_wait_s": None},
    ),
    Mutant(
        "lost_expiry",
        "rows of a lease that ran out are not delivered again",
        ("redelivery", "ready_is_given"),
        "rows.lua",
        "each_chunk(t, f, 5, function(chunk, ranges) give_back(t, chunk, f[3], ranges, true, reason) end)",
        "",
        {"max_deliveries": 3},
    ),
    Mutant(
        "uncounted_delivery",
        "a claim does not count its delivery",
        ("delivery_counted",),
        "rows.lua",
        "math.min(string.byte(sig, at + 1) + 1, FIRST + 40)",
        "math.max(string.byte(sig, at + 1), FIRST + 1)",
        {"max_deliveries": 3},
    ),
    Mutant(
        "no_fence",
        "a worker whose lease is over acts under the lease that has its place now",
        ("lease_fences",),
        "rows.lua",
        "if f[1] ~= serial then return nil, f[2] > 0 and f or nil end",
        "",
    ),
    Mutant(
        "capacity_plus_one",
        "one row more than capacity_rows is admitted",
        ("capacity_bound",),
        "wake.lua",
        "if live + rows > config.capacity_rows then",
        "if live + rows > config.capacity_rows + 1 then",
        {"capacity_rows": 16, "window": None, "samples_per_insert": None},
    ),
    Mutant(
        "lost_letter",
        "a dead letter is freed before it is dropped",
        ("dead_letters_kept",),
        "runs.lua",
        "if string.find(sig, '^[otx]') then return false end",
        "if string.find(sig, '^[ot]') then return false end",
        {"max_dead_rows": 100, "max_deliveries": 1, "recorder": False},
    ),
    Mutant(
        "freed_unrecorded",
        "a chunk is freed before the recorder has seen its rows",
        ("held_while_needed",),
        "runs.lua",
        "if stage.ended and string.byte(sig, config.pos[i]) ~= 97 then return false end",
        "",
        {"recorder": True},
    ),
    Mutant(
        "live_after_finish",
        "a row that ended still counts as live",
        ("counts_agree",),
        "runs.lua",
        "if ended(new) ~= ended(old) then count(ENDED, ended(new) - ended(old)) end",
        "",
    ),
    Mutant(
        "double_use",
        "a redo counts a training again",
        ("uses_bounded",),
        "rows.lua",
        "if string.byte(sig, 1) ~= 111 or uses > use then return end",
        "if string.byte(sig, 1) ~= 111 then return end",
        {"max_uses": 2},
    ),
    Mutant(
        "hasty_advance",
        "a checkpoint frees rows of the step after it",
        ("held_while_needed",),
        "finish.lua",
        "redis.call('ZRANGEBYSCORE', at, '-inf', step, 'LIMIT', 0, MOST_RANGES)",
        "redis.call('ZRANGEBYSCORE', at, '-inf', step + 1, 'LIMIT', 0, MOST_RANGES)",
        {"recorder": False, "max_uses": 1},
    ),
    Mutant(
        "stale_row",
        "the trainer gets rows one version beyond max_staleness",
        ("staleness_bound",),
        "claim.lua",
        "version - t.stages[i].max_staleness, {}",
        "version - t.stages[i].max_staleness - 1, {}",
        {"max_staleness": 1, "min_size": 0},
    ),
    Mutant(
        "lost_token",
        "who waits for rows is taken from the list and not woken",
        ("waiter_wakes",),
        "wake.lua",
        "redis.call('RPUSH', t.prefix .. KEY.wake .. waiter, '1')",
        "",
    ),
    Mutant(
        "repeated_put",
        "a repeated put is admitted again",
        ("put_once",),
        "put.lua",
        "if mark and reaches(mark, args[3]) then",
        "if mark and mark ~= args[3] and reaches(mark, args[3]) then",
        {"capacity_rows": 40, "window": None, "samples_per_insert": None},
    ),
    Mutant(
        "newest_first",
        "the first chunk that was put comes last",
        ("fifo_order",),
        "wake.lua",
        "stage.selector == 'fresh_first' and -chunk.ordinal or chunk.ordinal",
        "-chunk.ordinal",
        {"a_selector": "fifo", "end_selector": "fifo"},
    ),
    Mutant(
        "deaf_priority",
        "rates of units are not looked at",
        ("priority_draws",),
        "wake.lua",
        "math.log(draw) / rate",
        "math.log(draw)",
        {"end_selector": "prioritized", "end_scope": "row", "min_size": 0, "samples_per_insert": None},
    ),
    Mutant(
        "counted_release",
        "a released row keeps its delivery",
        ("delivery_counted",),
        "rows.lua",
        "'r' .. string.char(math.max(FIRST, string.byte(sig, at + 1) - 1))",
        "'r'",
        {"max_deliveries": 3},
    ),
    Mutant(
        "late_stage",
        "a stage that is added gets no rows that were there before",
        ("ready_is_given", "group_whole"),
        "put.lua",
        "move(t, chunk, all_rows(chunk), 'settle', to_settled)",
        "",
    ),
    Mutant(
        "shifted_finish",
        "the client ends the first rows of a range instead of those that it was told",
        ("only_ready", "fifo_order", "ended_counted"),
        "reading.py",
        "first = one.first + wanted[k] - start",
        "first = one.first + (k - start)",
    ),
    Mutant(
        "thin_batch",
        "the client takes what there is for a stage of whole batches",
        ("claim_bounds",),
        "redis_store.py",
        "            min_rows = max_rows\n",
        "            min_rows = 1\n",
        {"end_scope": "batch", "end_selector": "fifo", "min_size": 0, "samples_per_insert": None},
    ),
)


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[types.ModuleType]:
    """`rlmq.buffer.redis_store` with the fault in it or in the functions that it loads."""
    if mutant.source.endswith(".lua"):
        with _functions(mutant):
            yield importlib.import_module("rlmq.buffer.redis_store")
    else:
        with _client(mutant) as module:
            yield module


@contextlib.contextmanager
def _functions(mutant: Mutant) -> Iterator[None]:
    """The server gets another library, whose name carries its own fingerprint."""
    text = (_FUNCTIONS / mutant.source).read_text(encoding="utf-8")
    before, body = library._body, library._body().replace(text, mutant.mutated(text))
    library._body = lambda: body  # type: ignore[assignment]
    _forget_names()
    try:
        yield
    finally:
        library._body = before
        _forget_names()


def _forget_names() -> None:
    """The library's name is part of what clients remember."""
    library.library_name.cache_clear()
    connection._head.cache_clear()


@contextlib.contextmanager
def _client(mutant: Mutant) -> Iterator[types.ModuleType]:
    """The store's module made anew, on top of the module with the fault."""
    name = f"rlmq.buffer.{mutant.source.removesuffix('.py')}"
    whole = {name, "rlmq.buffer.redis_store"}
    before = {one: importlib.import_module(one) for one in whole}
    try:
        for one in sorted(whole, key=lambda one: one != name):
            file = before[one].__file__
            assert file is not None
            text = Path(file).read_text(encoding="utf-8")
            module = types.ModuleType(one)
            module.__file__ = file
            sys.modules[one] = module
            exec(compile(mutant.mutated(text) if one == name else text, file, "exec"), module.__dict__)
        yield sys.modules["rlmq.buffer.redis_store"]
    finally:
        sys.modules.update(before)


def table() -> str:
    """The mutants as a Markdown table."""
    lines = [
        f"| `{m.name}` | {m.fault} | `{m.source}` | {', '.join(f'`{one}`' for one in m.killed_by)} |"
        for m in MUTANTS
    ]
    return "\n".join(["| mutant | fault | source | killed by |", "|---|---|---|---|", *lines]) + "\n"


if __name__ == "__main__":
    print(table())
