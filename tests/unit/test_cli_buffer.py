"""`rlmq buffer` and `rlmq dead` on a real server: what they print and do, how they end; looking changes nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import redis

from rlmq import cli_buffer, cli_dead
from rlmq.buffer import keys
from rlmq.buffer.acl import acl_rules
from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import Claim, Stage, Table, VersionWindow
from rlmq.cli_sql import sql_command
from rlmq.common.columns import Column
from rlmq.common.errors import DependencyError, IntegrityError, UsageError
from rlmq.common.recipe.load import load_recipe
from rlmq.common.run_folder import RunFolder
from rlmq.controller.addresses import claim_home, write_addresses
from rlmq.controller.runs import open_run

pytestmark = pytest.mark.timeout(60)

RECIPE = """
run: {name: b, seed: 7}
model: ./m
data: {train: t.jsonl, prompts_per_step: 4}
reward: [{function: "r.py:score"}]
train: {steps: 3, lr: 1e-4}
"""
COLUMNS = (
    Column("sample_id", pa.string(), "source"),
    Column("prompt_text", pa.string(), "source"),
    Column("x", pa.int64(), "source"),
    Column("reward", pa.float64(), "score"),
)
STAGES = (
    Stage("score", ("x",), lease_s=60.0, max_deliveries=1),
    Stage("learn", ("reward",), "group"),
)
TRAIN = Table("train", COLUMNS, STAGES, capacity_rows=100, capacity_bytes=10**6, window=VersionWindow(8, 1))
EVAL = Table("eval", COLUMNS, STAGES)


class Bench:
    """A run folder whose server holds two small tables, and a worker's store on them."""

    def __init__(self, folder: Path, url: str) -> None:
        (folder / "b.yaml").write_text(RECIPE)
        recipe = load_recipe(folder / "b.yaml", [f"run.folder={folder / 'runs'}"]).recipe
        self.run: RunFolder = open_run(recipe).run
        self.folder = folder / "runs"
        self.client = redis.Redis.from_url(url)
        write_addresses(self.run, url)
        self.store = RedisStore(url, run_id=self.run.run_id, worker="score-0")
        self.store.open([TRAIN, EVAL])
        self._sequence = 0

    def put(self, count: int, text: str = "What is 1 + 1?") -> None:
        rows = pa.record_batch(
            {
                "sample_id": [f"s{self._sequence}-{k}" for k in range(count)],
                "prompt_text": [text] * count,
                "x": pa.array(range(count), pa.int64()),
            }
        )
        assert self.store.put("train", rows, producer="p", sequence=self._sequence, group_size=1)
        self._sequence += 1

    def claim(self, rows: int) -> Claim:
        claim = self.store.claim("train", "score", max_rows=rows, min_rows=rows)
        assert claim is not None
        return claim

    def kill(self, rows: int, reason: str, text: str = "What is 1 + 1?") -> None:
        """A chunk of rows that the stage `score` loses."""
        self.put(rows, text)
        self.store.nack(self.claim(rows), reason)

    def snapshot(self) -> dict[bytes, bytes | None]:
        return {key: self.client.dump(key) for key in self.client.scan_iter("*")}

    def buffer(self, capsys: pytest.CaptureFixture[str], *, verify: bool = False) -> dict[str, Any]:
        """What `rlmq buffer --json` says of the table `train`, with who waits."""
        capsys.readouterr()
        cli_buffer.buffer_command(None, folder=self.folder, verify=verify, as_json=True)
        found = json.loads(capsys.readouterr().out)
        return {**found["tables"][0], "who_waits": found["waiting"]}

    def letters(self, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
        capsys.readouterr()
        cli_dead.dead_list_command(None, folder=self.folder, as_json=True)
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def bench(tmp_path: Path, redis_url: str) -> Iterator[Bench]:
    bench = Bench(tmp_path, redis_url)
    yield bench
    bench.store.close()
    bench.client.close()


def a_traceback() -> str:
    try:
        raise ValueError("no number in 'two'")
    except ValueError:
        return traceback.format_exc()


def test_json_has_the_rows_of_each_stage_and_the_limits(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    # given five rows, of which two are leased and one is scored
    bench.put(5)
    bench.store.write(bench.claim(1), pa.record_batch({"reward": [1.0]}), ack=True)
    bench.claim(2)
    # when a program looks
    told = bench.buffer(capsys)
    # then every figure is there
    score, learn = told["stages"]
    assert {key: score[key] for key in ("stage", "waiting", "ready", "leased", "past")} == {
        "stage": "score",
        "waiting": 0,
        "ready": 2,
        "leased": 2,
        "past": 1,
    }
    assert (learn["waiting"], learn["ready"], learn["needs"], learn["scope"]) == (4, 1, ["reward"], "group")
    assert told["limits"]["rows"] == {"used": 5, "limit": 100}
    assert told["limits"]["bytes"]["limit"] == 10**6
    assert told["limits"]["bytes"]["used"] > 0
    assert "broken" not in told


def test_a_lease_has_its_worker_and_how_long_it_made_no_progress(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.put(2)
    bench.claim(2)

    [lease] = bench.buffer(capsys)["stages"][0]["leases"]

    assert (lease["worker"], lease["rows"]) == ("score-0", 2)
    assert 0 <= lease["idle_s"] < 30
    assert lease["idle_s"] + lease["left_s"] == pytest.approx(60.0, abs=0.01)


def test_the_window_counts_what_was_admitted_and_not_dropped(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    # given 8 rows a version and one version ahead; two of five rows were filtered
    bench.store.set_version("train", 2)
    bench.put(5)
    bench.store.finish(bench.claim(2), "filtered", "too long")
    # when a program looks
    told = bench.buffer(capsys)
    # then admitted - dropped is held against 8 * (2 + 1 + 1)
    assert told["limits"]["versions"] == {"used": 3, "limit": 32}
    assert told["ended"] == {"filtered(too long)": 2}


def test_a_person_sees_one_screen_in_which_no_line_is_folded(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a leased row and a filtered one
    bench.put(2)
    bench.store.finish(bench.claim(1), "filtered", "too long")
    bench.claim(1)
    # when a person pipes it
    cli_buffer.buffer_command(None, folder=bench.folder, verify=True, as_json=False)
    out = capsys.readouterr().out
    # then each fact has its line, without colours
    assert "\x1b" not in out
    assert len(out.splitlines()) <= 24
    assert re.search(r"^score +0 +0 +1 +1 +score-0, 1 row, progress [\d.]+ s ago, ends in [\d.]+ s *$", out, re.M)
    assert "ended: 1 filtered (too long)" in out
    assert "2 of 100 rows" not in out
    assert "1 of 100 rows (1%)" in out
    assert out.count("verify: found no broken invariant") == 2
    assert "nobody waits" in out


def test_looking_changes_nothing_in_the_server(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    # given rows in every place, a dead one included
    bench.kill(2, "bad")
    bench.put(4)
    bench.claim(1)
    before = bench.snapshot()
    [letter] = bench.letters(capsys)
    # when everything is looked at
    bench.buffer(capsys, verify=True)
    cli_dead.dead_show_command([letter["id"]], folder=bench.folder, rows=3, as_json=False)
    # then every key is as it was
    assert bench.snapshot() == before


def test_a_lost_piece_of_payload_is_a_broken_invariant_and_exit_6(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a table that lost payload behind the functions' back
    bench.put(3)
    prefix = keys.table_prefix(bench.run.run_id, "train") + keys.TABLE_SUFFIXES["payload"]
    bench.client.delete(*bench.client.keys(f"{prefix}*"))
    # when it is verified
    with pytest.raises(IntegrityError, match="broken invariant") as raised:
        cli_buffer.buffer_command(None, folder=bench.folder, verify=True, as_json=False)
    # then the code is 6, and what is broken was printed
    assert raised.value.exit_code == 6
    assert "BROKEN: " in capsys.readouterr().out


def test_an_intact_buffer_has_no_broken_invariant(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.put(3)
    bench.claim(1)

    assert bench.buffer(capsys, verify=True)["broken"] == []


def test_a_dead_letter_is_listed_by_what_its_traceback_says(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    # given two rows that ended with a traceback
    bench.kill(2, a_traceback())
    # when they are listed
    [letter] = bench.letters(capsys)
    cli_dead.dead_list_command(None, folder=bench.folder, as_json=False)
    out = capsys.readouterr().out
    # then the last line of the traceback stands beside the id
    assert (letter["id"], letter["stage"], letter["rows"]) == ("train/p.0:0", "score", 2)
    assert letter["reason"] == a_traceback()
    assert re.search(r"^train/p\.0:0 +score +2 +0:\d\d +ValueError: no number in 'two'", out, re.M)


def test_a_letter_is_shown_with_its_whole_reason_and_the_text_of_its_rows(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.kill(2, a_traceback(), text="How much is two?")

    cli_dead.dead_show_command(["train/p.0:0"], folder=bench.folder, rows=1, as_json=False)

    out = capsys.readouterr().out
    for line in a_traceback().splitlines():
        assert line in out
    assert "sample_id: s0-0" in out
    assert out.count("prompt_text: How much is two?") == 1
    assert "and 1 row more (--rows 2)" in out


def test_json_of_a_letter_has_the_text_of_all_rows(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.kill(2, "bad", text="How much is two?")

    cli_dead.dead_show_command(["train/p.0:0"], folder=bench.folder, rows=1, as_json=True)

    told = json.loads(capsys.readouterr().out)
    assert told["text"] == [{"sample_id": f"s0-{k}", "prompt_text": "How much is two?"} for k in range(2)]


def test_a_reason_cannot_steer_the_terminal(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.kill(1, "bad \x1b[2J\x9b1m thing\x07 [red]", text="clear \x1b[2J")

    cli_dead.dead_list_command(None, folder=bench.folder, as_json=False)
    cli_dead.dead_show_command(["train/p.0:0"], folder=bench.folder, rows=1, as_json=False)
    cli_buffer.buffer_command(None, folder=bench.folder, verify=False, as_json=False)

    out = capsys.readouterr().out
    assert not {"\x1b", "\x9b", "\x07"} & set(out)
    assert out.count("[red]") == 3


def test_retry_makes_the_rows_ready_again(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    # given two dead letters
    bench.kill(2, "bad")
    bench.kill(1, "worse")
    # when the first is tried again
    cli_dead.dead_retry_command(["train/p.0:0"], folder=bench.folder, every=False)
    # then its rows are ready and the other is still dead
    assert capsys.readouterr().out == "train/p.0:0: 2 rows ready again for stage score\n"
    assert [one["id"] for one in bench.letters(capsys)] == ["train/p.1:0"]
    assert bench.claim(2).rows["sample_id"].to_pylist() == ["s0-0", "s0-1"]


def test_drop_lets_go_of_all_and_leaves_them_counted(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.kill(2, "bad")
    bench.kill(1, "worse")

    cli_dead.dead_drop_command(["b"], folder=bench.folder, every=True)

    assert capsys.readouterr().out.splitlines() == [
        "train/p.0:0: 2 rows let go, still counted as dead",
        "train/p.1:0: 1 row let go, still counted as dead",
    ]
    assert bench.letters(capsys) == []
    assert bench.buffer(capsys)["ended"] == {"dead(bad)": 2, "dead(worse)": 1}


def test_an_unknown_id_is_refused_before_anything_is_done(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.kill(2, "bad")

    with pytest.raises(UsageError, match=r"train/p\.7:0.*train/p\.0:0"):
        cli_dead.dead_drop_command(["train/p.0:0", "train/p.7:0"], folder=bench.folder, every=False)

    assert [one["rows"] for one in bench.letters(capsys)] == [2]


@pytest.mark.parametrize(
    ("words", "every", "told"),
    [
        ([], False, "neither an id nor --all"),
        (["train/p.0:0"], True, "both"),
        (["b", "c"], True, "at most one run"),
    ],
)
def test_which_letters_are_meant_must_be_said(bench: Bench, words: list[str], every: bool, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        cli_dead.dead_drop_command(words, folder=bench.folder, every=every)


def test_a_pipe_that_is_closed_early_is_no_failure(bench: Bench) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "rlmq.cli", "buffer"],
        cwd=bench.folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()

    _, err = process.communicate(timeout=50)

    assert (process.returncode, err) == (0, b"")


def test_a_run_whose_server_is_gone_says_how_to_go_on(bench: Bench) -> None:
    write_addresses(bench.run, f"unix://{bench.folder}/gone.sock")

    with pytest.raises(DependencyError, match=r"no server.*continues it"):
        cli_buffer.buffer_command(None, folder=bench.folder, verify=False, as_json=False)


def test_a_run_that_has_ended_names_what_is_left_of_it(bench: Bench) -> None:
    write_addresses(bench.run, f"unix://{bench.folder}/gone.sock")
    bench.run.summary.write_text('{"exit": 0}')

    done = subprocess.run(
        [sys.executable, "-P", "-m", "rlmq.cli", "buffer", "--json"],
        cwd=bench.folder.parent,
        capture_output=True,
        text=True,
        timeout=50,
    )

    assert done.returncode == 3
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert "has ended (exit 0)" in done.stderr
    assert f"rlmq samples {bench.run.run_id}" in done.stderr


def test_a_server_of_the_users_own_that_is_gone_is_named(bench: Bench) -> None:
    recipe = bench.run.recipe.read_text()
    bench.run.recipe.write_text(recipe.replace("url: null", "url: redis://127.0.0.1:1/0"))

    with pytest.raises(DependencyError, match=r"127\.0\.0\.1:1.*redis\.url"):
        cli_buffer.buffer_command(None, folder=bench.folder, verify=False, as_json=False)


def test_a_run_without_tables_yet_says_so(bench: Bench) -> None:
    bench.client.flushall()

    with pytest.raises(DependencyError, match="without its tables"):
        cli_dead.dead_list_command(None, folder=bench.folder, as_json=False)


def test_records_of_another_run_with_this_id_are_left_alone(bench: Bench, redis_url: str, tmp_path: Path) -> None:
    # given a server of the user's own, with the tables of a run of another folder
    claim_home(bench.run, redis_url)
    recipe = load_recipe(tmp_path / "b.yaml", [f"run.folder={tmp_path / 'other'}", f"redis.url={redis_url}"]).recipe
    write_addresses(open_run(recipe).run, redis_url)
    # when its dead letters are dropped through the wrong folder, then that is refused
    with pytest.raises(UsageError, match="another run"):
        cli_dead.dead_drop_command([], folder=tmp_path / "other", every=True)


def test_a_user_with_a_workers_rights_sees_all_but_needs_more_to_verify(
    bench: Bench, own_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a server that knows its user as a worker of the run
    bench = Bench(bench.folder.parent, own_server.url)
    bench.kill(1, "bad")
    bench.client.execute_command("ACL", "SETUSER", "w", "on", ">secret", *acl_rules(bench.run.run_id))
    write_addresses(bench.run, f"unix://w:secret@{own_server.socket}")
    # when it looks, then it sees the rows and letters
    assert bench.buffer(capsys)["admitted"] == 1
    assert len(bench.letters(capsys)) == 1
    # and is told what --verify needs
    with pytest.raises(DependencyError, match=r"\+scan and \+strlen"):
        bench.buffer(capsys, verify=True)
    bench.client.execute_command("ACL", "SETUSER", "w", "+scan", "+strlen")
    assert bench.buffer(capsys, verify=True)["broken"] == []
    bench.store.close()
    bench.client.close()


def test_the_pages_key_table_is_that_of_the_code() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "buffer.md").read_text("utf-8")

    listed = re.findall(r"^\| `P ([^`]+)` \|", page, flags=re.MULTILINE)

    assert len(listed) == len(set(listed))
    assert {re.sub(r"<.*", "", name) for name in listed} == set(keys.TABLE_SUFFIXES.values())


def test_sql_reaches_the_rows_that_the_server_holds(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.put(3)
    bench.put(2, "Why?")
    bench.claim(1)
    query = (
        'select run, "table", prompt_text, count(*) as n, max(x) as x, count(reward) as scored, '
        "count(end_state) as ended, min(lineage[:12]) as lineage from live group by all order by n"
    )

    sql_command(query, [bench.run.run_id], folder=bench.folder, live=True, as_json=True)

    every = {"run": bench.run.run_id, "table": "train", "scored": 0, "ended": 0, "lineage": '[{"columns":'}
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {**every, "prompt_text": "Why?", "n": 2, "x": 1},
        {**every, "prompt_text": "What is 1 + 1?", "n": 3, "x": 2},
    ]
