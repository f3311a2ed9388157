"""The buffer's benchmarks: our adapter under a referee's contract, the referee's command, and our own load."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import server_binary

from rlmq.common.errors import IntegrityError, UsageError

ROOT = Path(__file__).resolve().parents[2]
HARNESS = """
class Peer: pass
class Client: pass
class Ragged:
    def __init__(self, values, offsets): self.values, self.offsets = values, offsets
    def __len__(self): return len(self.offsets) - 1
"""
REFEREE = """
import json, os, sys
rounds, out, *peers = sys.argv[1:]
with open(out, "a") as f:
    for number in range(int(rounds)):
        for place, peer in enumerate(peers):
            for wl in os.environ["WLS"].split(","):
                line = {"peer": peer, "wl": wl, "chunk": int(os.environ["CHUNK"]), "err": None, "bad": BAD,
                        "cpu_clients": 0.02 * (place + 1), "cpu_server": 0.01 * number,
                        "samples_s": 5.0, "rows_s": 7.0, "lat_p50": 2.0 + place, "lat_p99": 9.0,
                        "lo_ratio": 2.5, "rss_total_mb": 12, "rss_start_mb": 2,
                        "settings": {"appendonly": "yes"} if ":" in peer else None}
                f.write(json.dumps(line) + "\\n")
"""


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a benchmark by name."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A referee's `harness` with no more than the contract."""
    (tmp_path / "harness.py").write_text(HARNESS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("harness")
    for name in ("harness", "benchmarks.peer"):
        sys.modules.pop(name, None)


@pytest.fixture
def client(harness: Any, benchmarks: Any) -> Iterator[Any]:
    """A client of a started peer, as a referee makes it."""
    server_binary()
    peer = benchmarks("peer").Rlmq()
    info = peer.start(units=2)
    client = peer.client({**info, "train_after": "reward"})
    client.peer = peer
    yield client
    client.close()
    peer.stop()


def samples(harness: Any, first_uid: int = 0) -> dict[str, Any]:
    """Two groups of eight; token counts and values all differ."""
    lengths = np.arange(16) + 3
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = np.arange(offsets[-1], dtype=np.int32)
    uid = first_uid + np.arange(16)
    return {
        "prompt_ids": harness.Ragged(tokens, offsets),
        "response_ids": harness.Ragged(tokens + 1000, offsets),
        "response_log_probs": harness.Ragged(-tokens.astype(np.float32), offsets),
        "policy_version": np.full(16, 4),
        "group_uid": uid // 8,
        "uid": uid,
        "t_put": np.zeros(16, np.int64),
    }


def rewards_of(client: Any, rows: int = 16) -> Any:
    """Let a reward worker write the uid of each row's first token; the handle, unacked."""
    handle, batch = client.get("reward", rows, ["prompt_ids", "response_ids"], 5)
    first = batch["response_ids"].values[batch["response_ids"].offsets[:-1]]
    client.put_columns(handle, {"reward": first.astype(np.float32)})
    return handle


@pytest.mark.timeout(60)
def test_adapter_brings_every_column_of_a_rewarded_row(client: Any, harness: Any) -> None:
    put = samples(harness)
    client.put(put)
    client.ack("reward", rewards_of(client))

    handle, got = client.get("trainer", 16, [*put, "reward"], 5)

    for name in ("prompt_ids", "response_ids", "response_log_probs"):
        assert np.array_equal(got[name].values, put[name].values), name
        assert np.array_equal(got[name].offsets, put[name].offsets), name
    for name in ("policy_version", "group_uid", "uid", "t_put"):
        assert np.array_equal(got[name], put[name]), name
    assert np.array_equal(got["reward"], put["response_ids"].values[put["response_ids"].offsets[:-1]])
    client.ack("trainer", handle)
    assert client._store.counts("grpo").live == 0


@pytest.mark.timeout(60)
def test_adapter_writes_columns_with_the_ack(client: Any, harness: Any) -> None:
    client.put(samples(harness))
    handle = rewards_of(client)

    before = client.get("trainer", 16, ["uid", "prompt_ids", "reward"], 0.1)
    client.ack("reward", handle)

    assert before is None
    assert client.get("trainer", 16, ["uid", "prompt_ids", "reward"], 5) is not None


@pytest.mark.timeout(60)
def test_adapter_gives_what_there_is_when_less_than_asked_for_comes(client: Any, harness: Any) -> None:
    client.put(samples(harness))

    _, got = client.get("reward", 1000, ["uid", "prompt_ids"], 5)

    assert sorted(got["uid"]) == list(range(16))


@pytest.mark.timeout(60)
def test_adapter_cuts_lists_at_the_rows_of_a_claim(client: Any, harness: Any) -> None:
    put = samples(harness)
    client.put(put)

    client.get("reward", 5, ["prompt_ids"], 5)
    _, got = client.get("reward", 11, ["prompt_ids"], 5)

    assert got["prompt_ids"].offsets[0] == 0
    assert np.array_equal(got["prompt_ids"].values, put["prompt_ids"].values[put["prompt_ids"].offsets[5] :])
    assert np.array_equal(np.diff(got["prompt_ids"].offsets), np.diff(put["prompt_ids"].offsets)[5:])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("meta", np.arange(6 * 184, dtype=np.uint8).reshape(6, 184)),
        ("tensor", np.arange(6 * 1000, dtype=np.float32).reshape(6, 1000)),
    ],
)
def test_adapter_keeps_the_shape_of_columns_of_one_width(client: Any, name: str, column: Any) -> None:
    put = {"uid": np.arange(6), **({"version": np.zeros(6, np.int64)} if name == "meta" else {}), name: column}
    client.put(put)

    handle, got = client.get("trainer", 6, list(put), 5)
    client.ack("trainer", handle)

    assert np.array_equal(got[name], column)
    assert got[name].dtype == column.dtype


@pytest.mark.timeout(60)
def test_adapter_tells_the_servers_own_settings_and_bytes(client: Any, harness: Any) -> None:
    before = client.peer.wire_bytes()
    client.put(samples(harness))

    assert client.peer.settings == {"appendonly": "yes", "appendfsync": "everysec"}
    assert len(client.peer.pids) == 1
    assert client.peer.wire_bytes() > before


# -- the referee's command -------------------------------------------------------------------------------------


def rlmq(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PEER_BENCH", "PEERS_HOME")}
    return subprocess.run(
        [sys.executable, "-m", "rlmq.cli", *words],
        cwd=ROOT,
        env={**kept, "NO_COLOR": "1", "COLUMNS": "300", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def referee(folder: Path, bad: int = 0) -> Path:
    """A referee that measures nothing, and environments for its peers."""
    for kind in ("redis", "tq"):
        python = folder / kind / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
    (folder / "run_interleaved.py").write_text(REFEREE.replace("BAD", str(bad)))
    return folder


@pytest.mark.timeout(120)
def test_peers_without_a_referee_says_what_it_needs() -> None:
    done = rlmq("bench", "peers")

    assert done.returncode == 3
    assert "--folder" in done.stderr
    assert "PEER_BENCH" in done.stderr


@pytest.mark.timeout(120)
def test_peers_without_their_environment_names_the_command_that_makes_it(tmp_path: Path) -> None:
    folder = referee(tmp_path)
    (folder / "tq" / "bin" / "python").unlink()

    done = rlmq("bench", "peers", "--folder", str(folder), PEERS_HOME=str(tmp_path))

    assert done.returncode == 3
    assert f"PEERS_HOME={tmp_path} sh {folder}/setup_peers.sh tq" in done.stderr


@pytest.mark.timeout(120)
def test_peers_prints_medians_and_the_ratios_that_have_limits(tmp_path: Path) -> None:
    folder, file = referee(tmp_path), tmp_path / "peers.json"

    done = rlmq(
        "bench", "peers", "--rounds", "3", "--json", str(file), PEER_BENCH=str(folder), PEERS_HOME=str(tmp_path)
    )

    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    first = result["rows"][0]
    assert (first["load"], first["peer"], first["AOF"]) == ("W1", "rlmq", "yes")
    assert result["notes"] == ["rounds: 3"]
    assert first["CPU µs/sample"] == pytest.approx((0.02 + 0.01) / 2048 * 1e6)
    assert result["ratios"]["W1 CPU µs/sample / zmq_arrow, limit 1.9"] == pytest.approx(0.03 / 0.05)
    assert result["ratios"]["W1 CHUNK=8 CPU µs/sample / redis_blob, limit 1.1"] == pytest.approx(0.03 / 0.07)
    assert result["ratios"]["W1P p50 ms / zmq_arrow, limit 1.4"] == pytest.approx(2 / 3)
    assert len(result["ratios"]) == 8


@pytest.mark.timeout(120)
def test_peers_with_our_rows_lost_is_an_error(tmp_path: Path) -> None:
    folder = referee(tmp_path, bad=2)

    done = rlmq("bench", "peers", "--folder", str(folder), PEERS_HOME=str(tmp_path))

    assert done.returncode == 6
    assert "2 bad rows" in done.stderr


@pytest.mark.timeout(120)
def test_a_benchmark_without_options_refuses_them() -> None:
    done = rlmq("bench", "control", "--rounds", "3")

    assert done.returncode == 2
    assert "--rounds 3" in done.stderr


def test_a_result_as_markdown_is_a_table_and_a_list(benchmarks: Any) -> None:
    result = benchmarks("result").BenchResult("x", [{"a": 1, "b": 2.0}, {"a": 3}], {"r": 0.5}, ["told"])

    lines = result.markdown()

    assert lines[:5] == ["| a | b |", "| --- | --- |", "| 1 | 2 |", "| 3 | - |", ""]
    assert lines[5:7] == ["* ratio r: 0.500", "* told"]


# -- our side alone --------------------------------------------------------------------------------------------


def load(benchmarks: Any, **changed: Any) -> Any:
    """The smallest load with every role."""
    module, parts = benchmarks("buffer"), benchmarks("load")
    whole = module.Load("W1", parts.GRPO, parts.grpo_rows, rows=256, chunk=64, batch=128, steps=3)
    return replace(whole, **changed)


@pytest.mark.timeout(120)
def test_buffer_tells_where_the_time_of_a_sample_goes(benchmarks: Any) -> None:
    server_binary()

    line = benchmarks("buffer").measured(load(benchmarks, steps=20))

    shares = [line[name] for name in ("server (%)", "wire (%)", "encode (%)", "Python (%)", "load (%)")]
    assert sum(shares) == pytest.approx(100)
    assert 0 < line["of it scripts (%)"] < line["server (%)"] < 100
    assert 2 < line["moved / payload"] < 5
    assert line["AOF"] == "yes everysec"


@pytest.mark.timeout(120)
def test_buffer_ends_with_the_error_of_the_role_that_failed(benchmarks: Any) -> None:
    server_binary()

    with pytest.raises(UsageError, match="whole groups of 8"):
        benchmarks("buffer").measured(load(benchmarks, chunk=60))


def test_buffer_notices_rows_that_are_lost_doubled_or_mixed_up(benchmarks: Any) -> None:
    buffer, parts = benchmarks("buffer"), benchmarks("load")
    rows = parts.grpo_rows(256, 1, 0, 0)
    right = rows.append_column("reward", parts.pa.array(parts.rewards(rows)))
    mixed = rows.append_column("reward", parts.pa.array(np.roll(parts.rewards(rows), 1)))

    buffer._check([right.slice(0, 100), right.slice(100)], load(benchmarks), 0)
    for wrong in ([right.slice(0, 100)], [right.slice(0, 255), right.slice(254)], [mixed]):
        with pytest.raises(IntegrityError):
            buffer._check(wrong, load(benchmarks), 0)


@pytest.mark.timeout(120)
def test_flat_compares_few_rows_with_many(benchmarks: Any) -> None:
    server_binary()

    result = benchmarks("flat").run_flat(12_000, rounds=1, range_calls=1)

    assert [(row["live rows"], row["rows a chunk"]) for row in result.rows] == [
        (10_000, 64), (12_000, 64), (10_000, 8), (12_000, 8)
    ]  # fmt: skip
    assert all(row[f"{verb} (µs)"] > 0 for row in result.rows for verb in ("put", "claim", "write", "ack"))
    assert result.ratios["metadata per row at 12000 (bytes), limit 40"] > 0
    assert len(result.ratios) == 11
