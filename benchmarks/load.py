"""What the buffer's benchmarks share: a server of their own, and the tables and rows of their loads."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import redis

from rlmq.buffer.store import Stage, Table
from rlmq.common.columns import Column
from rlmq.common.errors import DependencyError
from rlmq.controller.server import find_binary

GROUP = 8  # samples of one prompt
META_BYTES = 184
RUN = "bench"  # run id of every benchmark's store

_START_S = 20.0
_TOKENS = pa.list_(pa.field("item", pa.int32()))
_FLOATS = pa.list_(pa.field("item", pa.float32()))

GRPO = Table(
    "grpo",
    (
        Column("prompt_ids", _TOKENS, "rollout"),
        Column("response_ids", _TOKENS, "rollout"),
        Column("response_log_probs", _FLOATS, "rollout"),
        Column("policy_version", pa.int64(), "rollout"),
        Column("group_uid", pa.int64(), "rollout"),
        Column("uid", pa.int64(), "rollout"),
        Column("t_put", pa.int64(), "rollout"),  # nanoseconds of the monotonic clock
        Column("reward", pa.float32(), "reward"),
    ),
    (
        Stage("reward", needs=("prompt_ids", "response_ids")),
        Stage("trainer", needs=("prompt_ids", "response_ids", "reward")),
    ),
)
SMALL = Table(
    "small",
    (
        Column("uid", pa.int64(), "rollout"),
        Column("version", pa.int64(), "rollout"),
        Column("meta", pa.list_(pa.field("item", pa.uint8()), META_BYTES), "rollout"),
    ),
    (Stage("trainer", needs=("uid",)),),
)
BULK = Table(
    "bulk",
    (Column("uid", pa.int64(), "rollout"), Column("tensor", _FLOATS, "rollout")),
    (Stage("trainer", needs=("uid",)),),
)


class Server:
    """A Redis-compatible server on a unix socket, with the append-only file that a run's server has."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rlmq-bench-"))
        self.url = f"unix://{self.folder / 'redis.sock'}"
        options = {
            "port": "0",
            "unixsocket": str(self.folder / "redis.sock"),
            "dir": str(self.folder),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "auto-aof-rewrite-min-size": "1gb",
            "save": "",
            "latency-tracking-info-percentiles": "50 99 99.9 100",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        self.process = subprocess.Popen([str(find_binary()), *words], stdout=subprocess.DEVNULL)
        self.client = redis.Redis.from_url(self.url)
        self._wait_ready()

    def _wait_ready(self) -> None:
        end = time.monotonic() + _START_S
        while True:
            try:
                self.client.ping()
                return
            except redis.RedisError as error:
                if time.monotonic() > end or self.process.poll() is not None:
                    raise DependencyError("redis-server", got=str(error), expected="an answer") from error
                time.sleep(0.02)

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far, by the scheduler's statistics."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def rss_bytes(self) -> int:
        """Memory of the process now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))

    def script_s(self) -> float:
        """Seconds in functions so far, what they call included."""
        stats: dict[str, Any] = self.client.info("commandstats")
        return float(stats.get("cmdstat_fcall", {"usec": 0})["usec"]) / 1e6

    def append_only(self) -> dict[str, str]:
        """What the server itself says of its append-only file."""
        told: dict[Any, Any] = self.client.config_get("append*")
        return {name: str(told[name]) for name in ("appendonly", "appendfsync")}

    def moved_bytes(self) -> int:
        """Bytes that went in and out so far."""
        stats: dict[str, Any] = self.client.info("stats")
        return int(stats["total_net_input_bytes"]) + int(stats["total_net_output_bytes"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it and remove its data."""
        self.client.close()
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def grpo_rows(rows: int, seed: int, first_uid: int, version: int) -> pa.RecordBatch:
    """Samples as rollout puts them: prompts of 32 to 256 tokens, long-tailed responses of 16 to 1024."""
    random = np.random.default_rng(seed)
    prompts = np.repeat(random.integers(32, 257, -(-rows // GROUP)), GROUP)[:rows]
    responses = np.clip(np.exp(random.normal(np.log(180), 0.9, rows)), 16, 1024).astype(np.int64)
    uid = first_uid + np.arange(rows)
    arrays = [
        _lists(prompts, random.integers(0, 151_000, prompts.sum(), dtype=np.int32)),
        _lists(responses, random.integers(0, 151_000, responses.sum(), dtype=np.int32)),
        _lists(responses, -random.random(responses.sum(), dtype=np.float32)),
        pa.array(np.full(rows, version)),
        pa.array(uid // GROUP),
        pa.array(uid),
        pa.array(np.full(rows, time.monotonic_ns())),
    ]
    return pa.RecordBatch.from_arrays(arrays, names=[column.name for column in GRPO.columns[:7]])


def small_rows(rows: int, seed: int, first_uid: int, version: int) -> pa.RecordBatch:
    """Rows of 200 bytes, none of them in lists of their own."""
    meta = np.random.default_rng(seed).integers(0, 256, rows * META_BYTES, dtype=np.uint8)
    uid = first_uid + np.arange(rows)
    arrays = [
        pa.array(uid),
        pa.array(np.full(rows, version)),
        pa.FixedSizeListArray.from_arrays(pa.array(meta), META_BYTES),
    ]
    return pa.RecordBatch.from_arrays(arrays, names=[column.name for column in SMALL.columns])


def rewards(rows: pa.RecordBatch) -> npt.NDArray[np.float32]:
    """A verdict that depends on every response token, so that a mixed-up row shows. [rows]"""
    responses, prompts = rows.column("response_ids"), rows.column("prompt_ids")
    starts = responses.offsets.to_numpy()[:-1] - responses.offsets[0].as_py()
    sums = np.add.reduceat(responses.flatten().to_numpy().astype(np.int64), starts)
    verdicts: npt.NDArray[np.float64] = (sums % 1000) / 1000.0 + np.diff(prompts.offsets.to_numpy())
    return verdicts.astype(np.float32)


def user_bytes(rows: pa.RecordBatch) -> int:
    """Bytes of the values alone: offsets and headers are each system's own cost."""
    return sum(_flat(array).nbytes for array in rows.columns)


def _lists(lengths: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> pa.Array:
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _flat(array: pa.Array) -> pa.Array:
    return array.flatten() if pa.types.is_nested(array.type) else array
