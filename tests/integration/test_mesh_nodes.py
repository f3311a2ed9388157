"""Nodes that are meshes: rows dealt by their transfer protocols, and tensors that move from rank to rank."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from integration.mesh_module import COLUMNS, ROWS, rows_of
from pydantic import ValidationError

from rlmq.common.errors import UsageError
from rlmq.common.flow import sample_flow
from rlmq.common.flow_nodes import with_nodes
from rlmq.common.recipe.node_block import NodeBlock

pytestmark = pytest.mark.timeout(280)

NODES = """
nodes:
- {name: maker, function: mesh_module.py:Maker, method: hidden, reads: [sample_id, step, response_ids],
   writes: {hidden: tensor}, workers: 4, tp: 4, cuts: {hidden: 0}}
- {name: taker, function: mesh_module.py:Taker, method: judged, reads: [hidden, sample_id, step],
   writes: {total: float, by: int}, workers: 4, tp: 2, cuts: {hidden: 1}, max_rows: 2}
"""
ALLOWED = shutil.which("unshare") and not subprocess.run(["unshare", "-n", "true"], check=False).returncode
"""Whether a network namespace of its own may be had: there, nobody else's bytes are counted."""


def recipe(cli: Any, folder: Path, nodes: str) -> Path:
    shutil.copy(Path(__file__).with_name("mesh_module.py"), folder)
    text = cli.tiny.read_text()
    for file in ("tiny_model.py", "tiny_task.py:train", "tiny_task.py:letters"):
        text = text.replace(file, f"{cli.root}/recipes/{file}")
    path = folder / "own.yaml"
    path.write_text("\n".join(line for line in text.splitlines() if "held_out" not in line) + nodes)
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_tensors_move_from_four_tensor_ranks_to_two_replicas_of_two_past_controller_and_redis(
    cli: Any, tmp_path: Path, redis_url: str
) -> None:
    # given a mesh 1-4-1 that makes a tensor for each row, and a mesh 1-2-2 that reads them, cut otherwise
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "place.json").write_text(json.dumps({"redis": redis_url, "port": port}))
    path = recipe(cli, tmp_path, NODES)
    settings = ["train.steps=3", "data.prompts_per_step=3", "algorithm.group_size=2", f"redis.url={redis_url}"]
    settings += [f"control.address=tcp://127.0.0.1:{port}", "algorithm.loop=mesh_module.py:loop"]
    command = [sys.executable, "-m", "rlmq.cli", "up", str(path), *settings]
    if ALLOWED:
        command = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    # when it runs for three steps, with tensors of 16 KiB, 16 MiB and 16 KiB a row; in the third a maker dies
    done = subprocess.run(
        command, cwd=tmp_path, env=cli.environment(), capture_output=True, text=True, timeout=240, check=False
    )
    log = next((tmp_path / "runs").glob("*/logs/taker-0.log")).read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log
    # then each row has what an independent computation makes of its tensor, from the first tensor rank of a replica
    files = (tmp_path / "runs").glob("*/samples/train-*.parquet")
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert Counter(row["step"] for row in rows) == {1: 6, 2: 6, 3: 6}
    for row in rows:
        tensor = rows_of(row["sample_id"], 0, ROWS[row["step"]]).astype(np.float64)
        weights = np.arange(1, ROWS[row["step"]] + 1)[:, None] * np.arange(1, COLUMNS + 1)
        assert row["total"] == (tensor * weights).sum()
        assert row["by"] in (0, 2)
    # and rows were dealt to both replicas, each rank with as many micro-batches as all others
    taken = lines(tmp_path / "taken.jsonl")
    assert [one["rows"] for one in taken[:4]] == [3, 3, 3, 3]
    assert {one["micro_batches"] for one in taken[:4]} == {2}
    # and the loop's own call, by a protocol of the user's own, came back in the order of its rows
    for one in lines(tmp_path / "who.jsonl"):
        assert {"results": [[row, row % 4] for row in range(5 + one["step"])]} in one["answers"]
    # and tensors 1024 times as large made Redis and the controller carry no more
    carried = {one["step"]: one for one in reversed(lines(tmp_path / "carried.jsonl"))}  # the first of each step
    step = {n: {k: carried[n + 1][k] - carried[n][k] for k in ("redis", "controller", "lo")} for n in (1, 2)}
    large = 6 * ROWS[2] * COLUMNS * 4
    for name in ("redis", "controller"):
        assert step[2][name] < 1.3 * step[1][name] + 65536, step
    if ALLOWED:
        assert large <= step[2]["lo"] <= 1.05 * large + step[1]["lo"], step
    # and the rows of the dead maker were made again, by all its ranks, and by nobody else
    made = Counter(one["sample"] for one in lines(tmp_path / "made.jsonl"))
    assert {row["sample_id"]: made[row["sample_id"]] for row in rows} == {
        row["sample_id"]: 8 if row["step"] == 3 else 4 for row in rows
    }
    assert "node.tensors_lost" in log


def test_what_a_mesh_cannot_be_is_refused_with_the_numbers() -> None:
    good = {"name": "m", "function": "m.py:M", "method": "f", "writes": {"t": "tensor"}, "workers": 4, "tp": 2}
    assert str(NodeBlock.model_validate(good).mesh) == "1-2-2"
    for change, message in (
        ({"tp": 3}, "a multiple of pp · tp = 3, not 4"),
        ({"method": None}, "method with pp, tp, cuts or a column of type tensor"),
        ({"model": "x"}, "function file.py:Class, and no model, with method"),
    ):
        with pytest.raises(ValidationError, match=message):
            NodeBlock.model_validate(good | change)
    reader = NodeBlock(name="r", function="m.py:f", reads=("t",), writes={"x": "int"})
    with pytest.raises(UsageError, match="node r: got tensor column t, expected `method`"):
        with_nodes(sample_flow(["a"]), [NodeBlock.model_validate(good), reader])
