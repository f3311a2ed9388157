"""The role of a node that joined a run while it was going on; see `rlmq.common.joined_nodes`.

consumes: ended rows of the table `train`, each once; those that lack a column that it reads are passed over
produces: `samples/NAME-STEP-PART.parquet`: `sample_id`, `step`, and the node's columns
waits for: nothing that others do; what its function raises is told, and the rows are passed over
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from rlmq.buffer.recording import RecordingWriter, place_of
from rlmq.buffer.store import ExperienceStore, Interest, Stage
from rlmq.buffer.tables import TRAIN
from rlmq.common.columns import arrow_schema
from rlmq.common.errors import Fenced, Terminated
from rlmq.common.flow_nodes import node_columns
from rlmq.common.metrics import ROWS_ACKED
from rlmq.common.node_function import node_function
from rlmq.common.node_rows import NodeRow, to_columns
from rlmq.common.recipe.node_block import NodeBlock
from rlmq.common.worker import CallHandler, WorkerContext


def stage_of(block: NodeBlock) -> Stage:
    """What is added to the run's table: a stage of rows that have ended."""
    return Stage(block.name, needs=(), ended=True, lease_s=block.lease_s, max_deliveries=block.max_deliveries)


class JoinedNode:
    """Runs one node's function in this process."""

    def __init__(self, context: WorkerContext, store: ExperienceStore, block: NodeBlock) -> None:
        self._context = context
        self._store = store
        self._block = block
        self._function, self._model = node_function(block, context.recipe_folder)
        self._schema = arrow_schema(node_columns(block))
        place, mark = place_of(context.run, context.recipe), f"{context.incarnation:04d}"
        self._recording = RecordingWriter(place, segment_bytes=context.recipe.record.segment_mb << 20, mark=mark)
        self._failed_rows = 0
        self._last = ""

    def handlers(self) -> Mapping[str, CallHandler]:
        """`failures`: rows whose call failed so far, and the newest reason."""
        return {"failures": lambda _: {"count": self._failed_rows, "last": self._last}}

    def work(self) -> bool:
        """Work on one claim; False when no row is ready."""
        name, began = self._block.name, time.monotonic()
        columns = dict.fromkeys(("sample_id", "step", *self._block.reads))
        claim = self._store.claim(TRAIN, name, max_rows=self._block.max_rows, columns=tuple(columns))
        if claim is None:
            return False
        self._context.activity("scoring")
        reads = self._block.reads
        rows = [row for row in claim.rows.to_pylist() if all(row[column] is not None for column in reads)]
        try:
            told = self._told(rows) if rows else {}
        except Terminated:
            self._store.release(claim)
            raise
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything; the rows have ended well
            self._failed_rows += len(rows)
            self._last = f"{type(error).__name__}: {error}"
            self._context.log.warning("node.failed", table=TRAIN, rows=len(rows), reason=self._last)
            told = {}
        self._record(rows, told)
        try:
            self._store.ack(claim)
        except Fenced as error:  # written twice then; readers take a sample id once
            self._context.log.warning("node.lease_lost", table=TRAIN, error=str(error))
        ROWS_ACKED.labels(TRAIN, name).inc(claim.count)
        self._context.progress()
        seconds, passed_over = round(time.monotonic() - began, 3), claim.count - len(rows)
        self._context.log.info("node.done", table=TRAIN, rows=len(rows), passed_over=passed_over, seconds=seconds)
        return True

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        """Sleep until a row has ended."""
        self._context.waits(f"rows of stage {self._block.name} in table {TRAIN}")
        self._store.wait([Interest(TRAIN, self._block.name)], timeout_s=timeout_s, wake_fd=wake_fd)

    def close(self) -> None:
        """The model goes with the process."""

    def _told(self, rows: list[dict[str, object]]) -> dict[str, list[object]]:
        name, reads = self._block.name, self._block.reads
        seen = [NodeRow(name, {column: row[column] for column in reads}) for row in rows]
        returned = self._function(seen) if self._model is None else self._function(self._model, seen)
        return to_columns(returned, self._block.writes, len(rows), subject=f"node {name}")

    def _record(self, rows: list[dict[str, object]], told: Mapping[str, list[object]]) -> None:
        fields = [pa.field("sample_id", pa.string()), pa.field("step", pa.int32()), *self._schema]
        whole = {"sample_id": [row["sample_id"] for row in rows], "step": [row["step"] for row in rows], **told}
        for step in sorted({int(str(row["step"])) for row in rows}) if told else ():
            table = pa.Table.from_pydict(whole, schema=pa.schema(fields))
            own = table.filter(pc.equal(table["step"], step))
            self._recording.add(self._block.name, step, own)
