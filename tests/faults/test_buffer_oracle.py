"""The oracle itself: what is planted in a copy of the files of a good run must be named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from faults import oracle
from faults.workers import BATCH_LOG

pytestmark = pytest.mark.timeout(120)


class Copy:
    """A copy of a run's files, to plant something in."""

    def __init__(self, good: Path, folder: Path) -> None:
        self.folder = Path(shutil.copytree(good, folder))
        self.final = json.loads((self.folder / oracle.FINAL).read_text())
        self.told = {path.stem: read(path) for path in self.folder.glob("*.jsonl")} | {"reward2": []}
        self.log = self.told[Path(BATCH_LOG).stem]

    def first(self, worker, did, **facts):
        """The first fact of this kind that has these values."""
        wanted = {"did": did} | facts
        return next(fact for fact in self.told[worker] if wanted.items() <= fact.items())

    def held(self, state):
        """The first held row that ended so (None: that lives)."""
        return next(row for row in self.final["held"] if row["end"][0] == state)

    def broken(self):
        """Names of the invariants that the oracle finds broken."""
        (self.folder / oracle.FINAL).write_text(json.dumps(self.final))
        for name, facts in self.told.items():
            text = "".join(json.dumps(fact) + "\n" for fact in facts)
            (self.folder / f"{name}.jsonl").write_text(text)
        return {line.partition(":")[0] for line in oracle.broken(self.folder)}


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def _acked_twice(copy):
    copy.told["reward2"].append(copy.first("reward", "claimed") | {"lease": "other"})
    copy.told["reward2"].append(copy.first("reward", "acked") | {"lease": "other"})


def _leased_twice(copy):
    copy.told["reward2"].append(copy.first("reward", "claimed") | {"lease": "other"})


def _live_row_lost(copy):
    copy.final["held"].remove(copy.held(None))


def _ended_row_lost(copy):
    row = copy.held("trained")
    copy.final["held"].remove(row)
    for fact in copy.told["recorder"]:
        if fact["did"] == "recorded":
            fact["rows"] = [one for one in fact["rows"] if one[0] != row["id"]]


def _held_twice(copy):
    copy.final["held"].append(copy.held(None) | {"chunk": "other.0"})


def _row_of_nobody(copy):
    copy.final["held"].append(copy.held(None) | {"id": "nobody"})


def _ended_twice(copy):
    recorded = copy.first("recorder", "recorded")
    copy.told["recorder"].append(recorded | {"rows": [[recorded["rows"][0][0], "stale", "", -1]]})


def _recorded_and_live(copy):
    copy.told["recorder"].append({"did": "recorded", "rows": [[copy.held(None)["id"], "done", "", -1]]})


def _trained_twice(copy):
    entry = copy.log[0]
    copy.log.append(entry | {"step": 99, "ranges": [[c, f, use + 1] for c, f, use in entry["ranges"]]})


def _trained_twice_in_one_use(copy):
    copy.final["max_uses"] = 2
    copy.log.append(copy.log[0] | {"step": 99})


def _batch_not_logged(copy):
    copy.log.pop(0)


def _batch_not_applied(copy):
    row = copy.held(None)
    copy.log.append({"did": "logged", "step": 99, "rows": [row["id"]], "ranges": [[row["chunk"], 0, 0]]})


def _trained_at_another_step(copy):
    copy.held("trained")["end"][1] += 1


def _worked_after_refusal(copy):
    lease = copy.first("reward", "acked")["lease"]
    claimed = copy.first("reward", "claimed", lease=lease)
    refusal = {"did": "fenced", "verb": "acked", "stage": "reward", "lease": lease, "error": ""}
    copy.told["reward"].insert(copy.told["reward"].index(claimed) + 1, refusal)


def _trained_too_old(copy):
    copy.final["max_staleness"] = 1
    copy.first("rollout", "acked")["version"] = -2


def _wrong_value_held(copy):
    copy.held(None)["wrong"] = True


def _wrong_value_claimed(copy):
    copy.told["actor"].append({"did": "wrong", "stage": "actor", "rows": ["produce-0000-00"]})


def _count(field, by):
    def plant(copy):
        copy.final["counts"][field] += by

    plant.__name__ = f"{field} counted wrongly"
    return plant


def _ended_count(copy):
    copy.final["counts"]["ended"]["trained"] -= 1
    copy.final["counts"]["live"] += 1


def _stage_count(copy):
    copy.final["counts"]["acked"]["reward"] = 0


def _slot_leaked(copy):
    copy.final["counts"]["leased"]["reward"] += 1


def _verify_complains(copy):
    copy.final["verify"].append("live is 3, expected 4")


PLANTED = [
    (_acked_twice, "two acks"),
    (_leased_twice, "two owners"),
    (_live_row_lost, "lost"),
    (_ended_row_lost, "lost"),
    (_held_twice, "foreign"),
    (_row_of_nobody, "foreign"),
    (_ended_twice, "two ends"),
    (_recorded_and_live, "two ends"),
    (_trained_twice, "retrained"),
    (_trained_twice_in_one_use, "retrained"),
    (_batch_not_logged, "unlogged"),
    (_batch_not_applied, "unlogged"),
    (_trained_at_another_step, "unlogged"),
    (_worked_after_refusal, "fenced"),
    (_trained_too_old, "too old"),
    (_wrong_value_held, "value"),
    (_wrong_value_claimed, "value"),
    (_count("admitted", 1), "counters"),
    (_count("live", -1), "counters"),
    (_count("redelivered", -1), "counters"),
    (_count("uses", 1), "counters"),
    (_ended_count, "counters"),
    (_stage_count, "counters"),
    (_slot_leaked, "leases"),
    (_verify_complains, "verify"),
]


def test_what_is_planted_in_the_files_is_named(scene, tmp_path):
    """One run with rows trained, filtered, dead, live, leased and redelivered; then each fault in its own copy."""
    scene.folder = tmp_path / "run"
    scene.folder.mkdir()
    scene.open(stages={"reward": {"max_deliveries": 2}})
    poison = {"produce-0000-01": "null", "produce-0000-02": "raise"}
    scene.start_all(produce={"chunks": 3}, rollout={}, reward={"poison": poison}, actor={"rows": 8}, recorder={})
    scene.until_ended(48)
    scene.end_workers()
    scene.start("produce", first_chunk=3, chunks=2).wait()
    scene.start("rollout", fail_at=[{"phase": "after_claim"}]).wait()
    scene.check()
    assert [scene.ended(state) for state in ("trained", "filtered", "dead")] == [46, 1, 1]
    assert (scene.counts.live, scene.counts.leased["rollout"], scene.counts.redelivered) == (32, 16, 1)
    missed = []
    for number, (plant, name) in enumerate(PLANTED):
        copy = Copy(scene.folder, tmp_path / f"planted{number}")
        plant(copy)
        found = copy.broken()
        if name not in found:
            missed.append((plant.__name__, name, found))
    assert missed == []
