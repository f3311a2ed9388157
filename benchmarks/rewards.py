"""Four reward workers beside one, on verifiers that sleep: the workers' role, its child processes, a real server.

The rows of one step lie ready, generated; the time is from then until all of them have a reward.

    rlmq bench rewards
"""

from __future__ import annotations

import io
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from benchmarks.load import RUN, Server
from benchmarks.result import BenchResult, Cell
from rlmq.buffer.redis_calls import RedisCalls
from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import Claim, ExperienceStore, Interest
from rlmq.buffer.tables import TRAIN, sample_tables
from rlmq.common.columns import PROMPT_COLUMNS, ROLLOUT_COLUMNS, arrow_schema
from rlmq.common.flow import flow_of
from rlmq.common.logs import configure
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.common.worker import WorkerContext
from rlmq.producers.reward import RewardRole

_ROOT = Path(__file__).resolve().parent.parent
_SLEEP_S = 0.4  # of one row's verifier
_GROUP, _CHUNK, _CHUNKS = 8, 64, 1
_ROWS = _CHUNK * _CHUNKS
_ROUNDS = 2
_SOURCE = f"""
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep({_SLEEP_S})
    return 1.0
"""


def run() -> BenchResult:
    """Rounds of one worker and of four in turn; the best of each, since other work on the machine only adds."""
    seconds: dict[int, list[float]] = {1: [], 4: []}
    for _ in range(_ROUNDS):
        for workers, found in seconds.items():
            found.append(_scored(workers))
    rows: list[dict[str, Cell]] = [
        {
            "workers": workers,
            "rows": _ROWS,
            "seconds, best round": min(found),
            "of it asleep": _ROWS * _SLEEP_S / workers,
        }
        for workers, found in seconds.items()
    ]
    return BenchResult("rewards", rows, {"1 worker / 4 workers, at least 3.8": min(seconds[1]) / min(seconds[4])})


def _recipe(workers: int) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "bench"},
            "model": "none",
            "algorithm": {"group_size": _GROUP},
            "data": {"train": "none.jsonl", "prompts_per_step": _ROWS // _GROUP},
            "rollout": {"batch_size_per_device": _CHUNK},
            "reward": ({"function": "rewards.py:compute_score", "timeout_s": 60.0},),
            "placement": {"reward": {"workers": workers}},
            "train": {"steps": 1},
        }
    )


def _store(url: str, worker: str, workers: int) -> RedisStore:
    store = RedisStore(url, run_id=RUN, worker=worker)
    store.open(sample_tables(flow_of(_recipe(workers)), capacity_rows=_ROWS))
    return store


def _scored(workers: int) -> float:
    """Seconds until every row has its reward."""
    with Server() as server:
        (server.folder / "rewards.py").write_text(_SOURCE, "utf-8")
        store = _store(server.url, "bench", workers)
        with _processes(server, workers):
            claims = _admit(store)
            began = time.monotonic()
            for claim in claims:
                store.write(claim, _responses(claim.count), ack=True)
            while store.counts(TRAIN).ready.get("actor", 0) < _ROWS:
                store.wait([Interest(TRAIN, "actor", rows=_ROWS)], timeout_s=1.0)
            seconds = time.monotonic() - began
        store.close()
    return seconds


@contextmanager
def _processes(server: Server, workers: int) -> Iterator[None]:
    """Reward workers that are ready for rows."""
    command = [sys.executable, "-m", "benchmarks.rewards", server.url, str(server.folder), str(workers)]
    started = [
        subprocess.Popen([*command, str(rank)], cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for rank in range(workers)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("a reward worker ended")
        yield
    finally:
        for process in started:
            process.communicate()


def _admit(store: ExperienceStore) -> list[Claim]:
    """All prompts of the step, claimed as rollout workers claim them."""
    claims = []
    for chunk in range(_CHUNKS):
        groups = [f"train-000001-{chunk * _CHUNK + row // _GROUP:04d}" for row in range(_CHUNK)]
        rows = [
            {
                "sample_id": f"{group}-{row % _GROUP:02d}",
                "group_id": group,
                "step": 1,
                "source": TRAIN,
                "prompt_ids": [1, 2],
                "prompt_text": "asked",
                "record": '{"prompt": "asked", "data_source": "none", "ground_truth": "1"}',
            }
            for row, group in enumerate(groups)
        ]
        batch = pa.RecordBatch.from_pylist(rows, schema=arrow_schema(PROMPT_COLUMNS))
        store.put(TRAIN, batch, producer="bench", sequence=chunk + 1, group_size=_GROUP)
        claim = store.claim(TRAIN, "rollout", max_rows=_CHUNK, columns=("sample_id",))
        assert claim is not None
        claims.append(claim)
    return claims


def _responses(rows: int) -> pa.RecordBatch:
    response = {
        "response_ids": [3],
        "response_text": "1",
        "rollout_logprobs": [-0.5],
        "loss_mask": [True],
        "policy_versions": [0],
        "truncated": False,
    }
    return pa.RecordBatch.from_pylist([response] * rows, schema=arrow_schema(ROLLOUT_COLUMNS))


def work(url: str, folder: Path, workers: int, rank: int) -> None:
    """One worker: rows until standard input ends."""
    stdin = sys.stdin.fileno()
    context = WorkerContext(
        recipe=_recipe(workers),
        recipe_folder=folder,
        run=RunFolder(folder / "runs" / "bench-1"),
        role="reward",
        rank=rank,
        world_size=workers,
        incarnation=1,
        calls=RedisCalls(url, run_id=RUN),
        log=configure("reward", rank, stream=io.StringIO()),
        activity=lambda _: None,
        progress=lambda: None,
        serving=lambda _: None,
        desired=lambda: None,
        stopping=lambda: False,
    )
    role = RewardRole(context, _store(url, f"reward-{rank}", workers))
    try:
        print("ready", flush=True)
        while not select.select([stdin], [], [], 0)[0]:
            if not role.work():
                role.wait(1.0, stdin)
    finally:
        role.close()


if __name__ == "__main__":
    work(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
