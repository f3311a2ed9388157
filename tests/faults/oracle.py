"""The oracle: what must be true after every fault, from files alone.

`snapshot` writes what the store holds in the end to `FOLDER/final.json`; `broken` compares it with what the workers
wrote down (`workers.py` says how) and names each broken invariant:

    lost       an admitted sample is neither held nor recorded as ended
    foreign    a sample that nobody put, or that is held twice
    two ends   a sample has two end states, or none and is not held
    retrained  a sample is in more batches than `max_uses`, or twice in one use
    unlogged   trained without a batch-log entry, or logged and not trained
    two acks   one stage acknowledged a sample twice
    two owners one delivery of a sample was leased twice
    too old    trained with a policy version more than `max_staleness` behind the trainer's
    fenced     a verb succeeded under a lease that had been refused
    value      a column is not what its writer writes
    counters   the scripts' counters disagree with the samples
    leases     slots in use are not the rows in flight
    verify     the store's own check of its invariants

A server that lost acknowledged transitions (`rewound`: a cut append-only file) may lease a row and be told of its
end twice; it must still be trained once and never be lost, and the server must agree with its own counters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from faults.workers import BATCH_LOG, COLUMNS, TABLE, read_journal, wrong_values

from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import END_STATES, RowRange, Table
from rlmq.common.errors import IntegrityError

FINAL = "final.json"
_Facts = list[dict[str, Any]]


def journals(folder: Path) -> dict[str, _Facts]:
    """Each worker's facts, by its name."""
    return {path.stem: read_journal(path) for path in sorted(folder.glob("*.jsonl")) if path.name != BATCH_LOG}


def snapshot(folder: Path, store: RedisStore, table: Table) -> None:
    """Write down what the store holds of every chunk that anybody tried to put, and its counters."""
    columns = [*(c.name for c in COLUMNS if c.name != "prompt_text"), "end_state", "end_step"]
    held: list[dict[str, Any]] = []
    chunks = {fact["chunk"]: len(fact["rows"]) for fact in _all(folder, "putting")}
    for chunk, rows in chunks.items():
        try:
            batch = store.read(TABLE, [RowRange(chunk, 0, rows)], columns)
        except IntegrityError:  # never admitted, or freed
            continue
        wrong = set(wrong_values(batch.to_pylist()))
        for row in batch.to_pylist():
            end = [row["end_state"], row["end_step"]]
            held.append({"id": row["sample_id"], "chunk": chunk, "end": end, "wrong": row["sample_id"] in wrong})
    final = {
        "max_uses": table.max_uses,
        "max_staleness": {stage.name: stage.max_staleness for stage in table.stages}["actor"],
        "held": held,
        "counts": asdict(store.counts(TABLE)),
        "leased": sum(lease.rows for lease in store.leases(TABLE)),
        "verify": store.verify(TABLE),
    }
    (folder / FINAL).write_bytes(msgspec.json.encode(final))


def broken(folder: Path, *, rewound: bool = False) -> list[str]:
    """Every broken invariant, as `"name: what"`; empty when all hold."""
    final = msgspec.json.decode((folder / FINAL).read_bytes())
    told = journals(folder)
    log = [line for line in read_journal(folder / BATCH_LOG) if line["did"] == "logged"]
    checks = [
        _samples(told, final, rewound=rewound),
        _batches(told, log, final),
        _staleness(told, final),
        _values(told, final),
        _counters(told, log, final, rewound=rewound),
    ]
    if not rewound:
        checks.append(_leases(told))
    return [line for check in checks for line in check]


def _all(folder: Path, did: str) -> Iterator[dict[str, Any]]:
    return (fact for facts in journals(folder).values() for fact in facts if fact["did"] == did)


def _named(name: str, samples: Iterable[Any], what: str) -> Iterator[str]:
    found = sorted(map(str, samples))
    if found:
        yield f"{name}: {len(found)} {what}: {', '.join(found[:5])}{' …' if len(found) > 5 else ''}"


def _facts(told: dict[str, _Facts], *did: str) -> Iterator[dict[str, Any]]:
    return (fact for facts in told.values() for fact in facts if fact["did"] in did)


def _ends(told: dict[str, _Facts], final: dict[str, Any]) -> dict[str, set[str]]:
    """End states of each sample that ended: held ones as the store says, freed ones as they were recorded."""
    ends: dict[str, set[str]] = defaultdict(set)
    for fact in _facts(told, "recorded"):
        for sample, state, _, _ in fact["rows"]:
            ends[sample].add(state)
    for row in final["held"]:
        if row["end"][0] is not None:
            ends[row["id"]].add(row["end"][0])
    return ends


def _samples(told: dict[str, _Facts], final: dict[str, Any], *, rewound: bool) -> Iterator[str]:
    tried = {i for fact in _facts(told, "putting") for i in fact["rows"]}
    rows_of = {fact["chunk"]: fact["rows"] for fact in _facts(told, "putting")}
    admitted = {i for fact in _facts(told, "put") for i in rows_of[fact["chunk"]]}
    held = Counter(row["id"] for row in final["held"])
    ends = _ends(told, final)
    recorded = {row[0] for fact in _facts(told, "recorded") for row in fact["rows"]}
    seen = {row[0] for fact in _facts(told, "claimed") for row in fact["rows"]}
    yield from _named("lost", admitted - held.keys() - recorded, "admitted samples are nowhere")
    yield from _named("foreign", (held.keys() | recorded | seen) - tried, "samples that nobody put")
    yield from _named("foreign", [i for i, n in held.items() if n > 1], "samples are held twice")
    twice = [] if rewound else [i for i, states in ends.items() if len(states) > 1]
    yield from _named("two ends", twice, "samples have several end states")
    live = {row["id"] for row in final["held"] if row["end"][0] is None}
    if not rewound:
        yield from _named("two ends", live & recorded, "samples are live and recorded as ended")


def _batches(told: dict[str, _Facts], log: _Facts, final: dict[str, Any]) -> Iterator[str]:
    trained = Counter(i for entry in log for i in entry["rows"])
    uses = Counter((i, one[2]) for entry in log for i, one in zip(entry["rows"], entry["ranges"], strict=True))
    over = [i for i, n in trained.items() if n > final["max_uses"]]
    yield from _named("retrained", over, f"samples are in more than {final['max_uses']} batches")
    twice = [i for (i, _), n in uses.items() if n > 1]
    yield from _named("retrained", twice, "samples are trained twice in one use")
    last = {i: entry["step"] for entry in log for i in entry["rows"]}
    ended = {i: [state, step] for fact in _facts(told, "recorded") for i, state, _, step in fact["rows"]}
    ended |= {row["id"]: row["end"] for row in final["held"]}
    without = [i for i, end in ended.items() if end[0] == "trained" and i not in last]
    yield from _named("unlogged", without, "samples are trained without a batch-log entry")
    whole = [i for i, n in trained.items() if n == final["max_uses"] and i in ended]
    not_trained = [i for i in whole if ended[i] != ["trained", last[i]]]
    yield from _named("unlogged", not_trained, "samples are in the batch log and not trained at its step")
    counted = final["counts"]["uses"]
    if counted != sum(trained.values()):
        yield f"counters: {counted} uses, {sum(trained.values())} rows in the batch log"


def _staleness(told: dict[str, _Facts], final: dict[str, Any]) -> Iterator[str]:
    if final["max_staleness"] is None:
        return
    made_by = {i: fact["version"] for fact in _facts(told, "acked") if "version" in fact for i in fact["rows"]}
    trained = [(i, f["version"]) for f in _facts(told, "finished") if f["state"] == "trained" for i in f["rows"]]
    old = [i for i, version in trained if version - made_by.get(i, version) > final["max_staleness"]]
    yield from _named("too old", old, f"samples are more than {final['max_staleness']} versions behind")


def _values(told: dict[str, _Facts], final: dict[str, Any]) -> Iterator[str]:
    yield from _named("value", [row["id"] for row in final["held"] if row["wrong"]], "held samples are wrong")
    yield from _named("value", [i for f in _facts(told, "wrong") for i in f["rows"]], "claimed samples are wrong")


def _leases(told: dict[str, _Facts]) -> Iterator[str]:
    acks: Counter[tuple[Any, ...]] = Counter()
    leased: Counter[tuple[Any, ...]] = Counter()
    for facts in told.values():
        claims: dict[str, dict[str, Any]] = {}
        refused: set[str] = set()
        for fact in facts:
            lease = fact.get("lease")
            if fact["did"] == "claimed":
                claims[fact["lease"]] = fact
                leased.update((fact["stage"], i, use, delivery) for i, delivery, use in fact["rows"])
            elif fact["did"] == "fenced":
                refused.add(fact["lease"])
            elif lease in refused:
                yield f"fenced: {fact['did']} succeeded under lease {lease}, which had been refused"
            elif fact["did"] in ("acked", "finished"):
                use_of = {i: use for i, _, use in claims[fact["lease"]]["rows"]}
                acks.update((fact["stage"], i, use_of[i]) for i in fact["rows"])
            elif fact["did"] == "released":  # given back uncounted: the next claim has the same delivery
                leased.subtract((fact["stage"], i, use, n) for i, n, use in claims[fact["lease"]]["rows"])
    yield from _named("two acks", [key for key, n in acks.items() if n > 1], "acknowledged twice")
    yield from _named("two owners", [key for key, n in leased.items() if n > 1], "deliveries leased twice")


def _counters(told: dict[str, _Facts], log: _Facts, final: dict[str, Any], *, rewound: bool) -> Iterator[str]:
    counts = final["counts"]
    live = sum(row["end"][0] is None for row in final["held"])
    ended = Counter[str]()
    for label, rows in counts["ended"].items():
        ended[label.split("(")[0]] += rows
    if counts["admitted"] != counts["live"] + sum(ended.values()):
        yield f"counters: {counts['admitted']} admitted, {counts['live']} live and {dict(ended)} ended"
    if counts["live"] != live:
        yield f"counters: {counts['live']} live, {live} live samples held"
    tally = Counter(state for states in _ends(told, final).values() for state in states)
    for state in END_STATES:
        if ended[state] != tally[state] and not rewound:
            yield f"counters: {ended[state]} {state}, {tally[state]} samples ended so"
    held = {row["id"] for row in final["held"]}
    ended_ids = {row[0] for fact in _facts(told, "recorded") for row in fact["rows"]} - held
    known = len(held) + len(ended_ids)
    if counts["admitted"] != known:
        yield f"counters: {counts['admitted']} admitted, {known} samples held or recorded"
    if not rewound:
        yield from _stage_counters(told, counts)
    if final["leased"] < sum(counts["leased"].values()):  # a lease may outlive rows that ended otherwise
        yield f"leases: {final['leased']} rows under leases, {counts['leased']} counted as leased"
    yield from (f"verify: {line}" for line in final["verify"])


def _stage_counters(told: dict[str, _Facts], counts: dict[str, Any]) -> Iterator[str]:
    again = Counter[tuple[str, str, int]]()
    acked: dict[str, set[str]] = defaultdict(set)
    for fact in _facts(told, "claimed"):
        for i, delivery, use in fact["rows"]:
            key = (fact["stage"], i, use)
            again[key] = max(again[key], delivery - 1)
    for fact in _facts(told, "acked"):
        acked[fact["stage"]].update(fact["rows"])
    if counts["redelivered"] < sum(again.values()):
        yield f"counters: {counts['redelivered']} redelivered, {sum(again.values())} seen"
    for stage, samples in acked.items():
        if counts["acked"][stage] < len(samples):
            yield f"counters: stage {stage} is past {counts['acked'][stage]} rows, {len(samples)} were acknowledged"
    refused = sum(1 for _ in _facts(told, "fenced"))
    if counts["fenced"] < refused:
        yield f"counters: {counts['fenced']} fenced, {refused} verbs were refused"
