"""What a user writes: two classes for the ranks of two meshes, and a loop. `test_mesh_nodes.py` copies it.

The maker's tensors are 16 KiB a row in steps 1 and 3, and 16 MiB in step 2. Before each step its first rank writes
down what Redis, the controller's sockets and the loopback interface have carried so far.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import redis
import torch
import torch.distributed as dist

import rlmq

FOLDER = Path(__file__).parent
COLUMNS = 64
ROWS = {1: 64, 2: 65536, 3: 64}
"""Of each step's tensors, which have 64 columns of float32."""


def rows_of(sample: str, first: int, stop: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows of a sample's tensor: small whole numbers, whose sums are exact."""
    places = np.arange(first, stop, dtype=np.int32)[:, None] * 7 + np.arange(COLUMNS, dtype=np.int32) * 13
    return ((places + zlib.crc32(sample.encode()) % 1009) % 17 - 8).astype(np.float32)


def told(name: str, **facts: object) -> None:
    with (FOLDER / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(facts) + "\n")


def tcp_bytes(ports: Sequence[int]) -> int:
    """What the kernel counted on TCP connections with these local ports (inet_diag, struct tcp_info)."""
    total = 0
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as link:
        body = struct.pack("=BBBBI48x", socket.AF_INET, socket.IPPROTO_TCP, 2, 0, 2)
        link.send(struct.pack("=IHHII", 16 + len(body), 20, 0x301, 1, 0) + body)
        while True:
            data = link.recv(1 << 20)
            while data:
                length, kind = struct.unpack_from("=IH", data)
                if kind != 20:
                    return total
                at = 16 + 72
                while at < length and struct.unpack_from("!H", data, 20)[0] in ports:
                    size, attribute = struct.unpack_from("=HH", data, at)
                    total += sum(struct.unpack_from("=QQ", data, at + 124)) if attribute == 2 else 0
                    at += (size + 3) & ~3
                data = data[(length + 3) & ~3 :]


def carried() -> dict[str, int]:
    """By Redis, by the controller's sockets, and by the loopback interface of this network namespace."""
    place = json.loads((FOLDER / "place.json").read_text())
    stats = redis.Redis.from_url(place["redis"]).info("stats")
    lo = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line).split()
    return {
        "redis": stats["total_net_input_bytes"] + stats["total_net_output_bytes"],
        "controller": tcp_bytes([place["port"], place["port"] + 1]),
        "lo": int(lo[1]),
    }


def dealt_round(rows: int, _sizes: Sequence[int], mesh: Any) -> list[list[int]]:
    size = mesh.training.size
    return [list(range(rank, rows, size)) for rank in range(size)]


ROUND = rlmq.Transfer("round", dealt_round, lambda mesh: range(mesh.training.size))
"""A protocol of the user's own."""


class Maker:
    """Each tensor rank makes its part of every tensor: rows of it."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self.step = 0

    @rlmq.register(transfer="3d")
    def hidden(self, rows: Any, micro_batches: int) -> list[torch.Tensor]:
        index, parts, found = self.mesh.shape.place(self.mesh.rank)[1], self.mesh.shape.tp, []
        for row in rows:
            if self.mesh.rank == 0 and row.step > self.step:
                self.step = row.step
                told("carried", step=row.step, **carried())
            told("made", sample=row.sample_id, rank=self.mesh.rank, pid=os.getpid())
            each = ROWS[row.step] // parts
            found.append(torch.from_numpy(rows_of(row.sample_id, index * each, (index + 1) * each)))
        return found


class Taker:
    """Each tensor rank wants columns of every tensor; two replicas share the rows."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        line = [rank for rank in range(mesh.size) if mesh.shape.place(rank)[2] == mesh.replica]
        self.line = mesh.part("line", line)

    @rlmq.register(transfer="3d")
    def judged(self, rows: Any, micro_batches: int) -> list[dict[str, Any]]:
        told("taken", rank=self.mesh.rank, rows=len(rows), micro_batches=micro_batches)
        if self.mesh.rank == 0 and rows[0].step == 3 and not (FOLDER / "killed").exists():
            (FOLDER / "killed").touch()
            made = [json.loads(line) for line in (FOLDER / "made.jsonl").read_text().splitlines()]
            os.kill([one["pid"] for one in made if one["rank"] == 1][-1], signal.SIGKILL)
            raise RuntimeError("a maker died")
        index, parts, found = self.mesh.shape.place(self.mesh.rank)[1], self.mesh.shape.tp, []
        for number in range(micro_batches):  # as many on every rank: they meet in each
            own = rows[2 * number : 2 * number + 2]
            sums = torch.zeros(2, dtype=torch.float64)
            for place, row in enumerate(own):
                part = row.hidden.double()
                assert part.shape == (ROWS[row.step], COLUMNS // parts)
                weights = torch.arange(1, COLUMNS + 1).chunk(parts)[index] * torch.arange(1, len(part) + 1)[:, None]
                sums[place] = (part * weights).sum()
            self.line.allreduce([sums], dist.AllreduceOptions()).wait()
            found += [{"total": float(total), "by": self.mesh.rank} for total, _ in zip(sums, own, strict=False)]
        return found

    @rlmq.register(transfer=ROUND)
    def who(self, rows: list[int], micro_batches: int) -> list[list[int]]:
        return [[row, self.mesh.rank] for row in rows]


def loop(run: Any) -> None:
    run.publish(0)
    for step in run.steps():
        run.admit(step)
        run.wait_batch(step)
        run.train(step)
        run.publish(step)
        told("who", step=step, answers=run.call("taker", "who", {"rows": list(range(5 + step))}))
