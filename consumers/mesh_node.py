"""The role of a node whose workers are the ranks of one mesh: a method of the user's class, called on rows.

::

    controller   take(number)  to all ranks, while rows are ready for the stage
    rank 0       claims rows, tells the others which; all compute who works on which rows (`rlmq.common.transfer`)
    each rank    reads its own rows, gets their tensors (`held_tensors`), calls the method, tells what it found
    rank 0       puts the collected ranks' results in row order, writes them

Other registered methods are called on plain values by the loop: `run.call("NODE", "METHOD", {"rows": [...]})`.

consumes: rows of the node's stage; produces: its columns
waits for: the controller's calls; the other ranks; the makers of tensors that it reads
on failure: what the method raises gives the rows back, counted; a rank that dies makes all restart
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa
import torch

from rlmq.buffer.reading import subset
from rlmq.buffer.store import Claim, ExperienceStore, Facts, RowRange
from rlmq.buffer.tables import EVAL, TRAIN
from rlmq.common import transfer
from rlmq.common.columns import arrow_schema
from rlmq.common.errors import DeadlineExceeded, Fenced, IntegrityError, RestartRequired, Terminated, UsageError
from rlmq.common.flow_nodes import node_columns
from rlmq.common.metrics import ROWS_ACKED, ROWS_WRITTEN
from rlmq.common.node_rows import NodeRow, TakenRows, to_columns
from rlmq.common.recipe.load import recipe_hash
from rlmq.common.user_code import load_function, source_hash
from rlmq.common.worker import CallHandler, WorkerContext
from rlmq.common.worker_loop import raise_if_stopping
from rlmq.consumers.held_tensors import HeldTensors, Part, TensorNote, TensorReader, Wanted, wanted_by
from rlmq.consumers.mesh import meet

_MICRO_BATCHES = 16
"""Of each rank, that one claim is at most."""
_EXTEND_S = 1.0


class Dealt(msgspec.Struct, frozen=True):
    """The rows of one claim as rank 0 tells them; `notes` are the tensor columns that the node reads."""

    table: str
    ranges: tuple[RowRange, ...]
    ids: list[str]
    steps: list[int]
    sizes: list[int]
    notes: dict[str, list[str]]


class Told(msgspec.Struct, frozen=True):
    """What one rank found for its rows: plain columns, type and shape of the tensors that it holds now."""

    columns: dict[str, list[Any]] = {}
    tensors: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    process: str = ""
    failure: str = ""


class MeshNode:
    """One rank.

    Raises:
        UsageError: no such class or method, one without a transfer protocol, or one that does not collect rows.
    """

    def __init__(self, context: WorkerContext, store: ExperienceStore) -> None:
        self._context = context
        self._store = store
        recipe = context.recipe
        self._block = block = next(one for one in recipe.nodes if one.name == context.role)
        self._mesh = meet(
            context.calls,
            role=context.role,
            rank=context.rank,
            size=block.workers,
            incarnation=context.incarnation,
            timeout_s=recipe.deadlines.step_s,
            shape=block.mesh,
        )
        self._made_by = load_function(str(block.function), context.recipe_folder, subject=f"node {block.name}")
        self._object: Any = self._made_by(self._mesh)
        _, self._protocol = self._registered(str(block.method))
        if self._protocol.gives != "rows":
            raise UsageError(
                f"node {block.name}",
                got=f"protocol {self._protocol.name}",
                expected="one that gives a result per row",
            )
        self._schema = arrow_schema(node_columns(block))
        self._made = tuple(name for name, kind in block.writes.items() if kind == "tensor")
        makers = {name: one.name for one in recipe.nodes for name, kind in one.writes.items() if kind == "tensor"}
        self._makers = {name: makers[name] for name in block.reads if name in makers}
        group = recipe.algorithm.group_size if block.scope == "group" else 1
        most = max(block.min_batch, _MICRO_BATCHES * block.max_rows * self._mesh.shape.dp)
        self._max_rows = -(-most // group) * group
        source = source_hash(str(block.function), context.recipe_folder)
        self._facts = Facts(tag=f"config {recipe_hash(recipe)} function {source}")
        self._tensors = HeldTensors(context, self._mesh)
        self._reader = TensorReader(context, self._mesh)
        self._claim: Claim | None = None
        self._extended_at = 0.0
        self._failed_rows, self._last = 0, ""

    def _registered(self, name: str) -> tuple[Callable[..., Any], transfer.Transfer]:
        method = getattr(self._object, name, None)
        if method is None:
            raise UsageError(f"node {self._block.name}", got=f"no method {name}", expected="a method of its class")
        return method, transfer.transfer_of(method)

    # -- calls ---------------------------------------------------------------------------------------------------

    def handlers(self) -> Mapping[str, CallHandler]:
        """`take`, `give`, `failures`, and every registered method of the class."""
        own = [
            name
            for name in dir(self._object)
            if hasattr(getattr(type(self._object), name, None), transfer.ATTRIBUTE)
        ]
        return {
            **{name: partial(self._asked, name) for name in own},
            "take": self._take,
            "give": self._give,
            "failures": lambda _: {"count": self._failed_rows, "last": self._last},
        }

    def work(self) -> bool:
        """Rows are worked on in calls; here a rank notices that another one has gone."""
        self._mesh.check()
        return False

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        """Sleep until a call comes."""
        self._context.waits("a call")
        self._store.wait([], timeout_s=timeout_s, wake_fd=wake_fd)

    def close(self) -> None:
        """The model goes with the process."""

    def _answered(self, args: Mapping[str, Any]) -> bool:
        """Whether the ranks did this call together before this process began: then another one has its result."""
        results = self._context.calls.results(str(args["call"]))
        return any(one.rank != self._context.rank for one in results)

    def _asked(self, name: str, args: Mapping[str, Any]) -> dict[str, Any]:
        """A method on plain values. Every rank answers with the results in row order."""
        if self._answered(args):
            return {}
        method, protocol = self._registered(name)
        rows, sizes = list(args.get("rows", ())), list(args.get("sizes", ()))
        call = transfer.RankedCall(protocol, transfer.Mesh(self._block.mesh), rows, sizes, self._block.max_rows)
        told = self._mesh.gather(msgspec.msgpack.encode(call.on_rank(method, self._mesh.rank)))
        return {"results": call.collected([msgspec.msgpack.decode(one) for one in told])}

    def _give(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Send tensors that this rank made to the readers that ask for them."""
        return self._tensors.give(args["number"], str(args["to"]))

    def _take(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Work on all rows that are ready.

        Returns:
            Rows, bytes of tensors that came to this rank; `failed` where an exchange of tensors did.
        """
        if self._answered(args):
            return {}
        found = {"rows": 0, "bytes": 0, "lost": 0}
        self._tensors.drop(int(args["step"]) - 1)  # an evaluation is of the step before
        self._context.activity("scoring")
        for table in (EVAL, TRAIN):
            while (dealt := self._dealt(table)) is not None:
                tensors, lost, failed = self._fetched(dealt, args)
                if self._makers:
                    self._reader.end(args["number"])
                if failed or lost:
                    self._give_back(dealt, lost)
                    return {**found, "lost": len(lost), **({"failed": failed} if failed else {})}
                found["rows"] += len(dealt.ids)
                found["bytes"] += sum(one.nbytes for one in tensors.values())
                self._work_on(dealt, tensors)
                if self._makers:  # an exchange belongs to one call
                    return found
        return found

    # -- rows ----------------------------------------------------------------------------------------------------

    def _dealt(self, table: str) -> Dealt | None:
        """The next claim, on every rank."""
        own: Dealt | None = None
        if self._mesh.rank == 0:
            lengths = [name for name in self._block.reads if name.endswith("_ids")]
            columns = dict.fromkeys(("sample_id", "step", *lengths, *self._makers))
            claim = self._store.claim(table, self._block.name, max_rows=self._max_rows, columns=tuple(columns))
            self._claim = claim
            if claim is not None:
                told = claim.rows.to_pydict()
                sizes = [sum(map(len, ids)) for ids in zip(*(told[name] for name in lengths), strict=True)]
                notes = {name: told[name] for name in self._makers}
                sizes = sizes or [1] * claim.count
                own = Dealt(table, claim.ranges, told["sample_id"], told["step"], sizes, notes)
        encoded = self._mesh.broadcast(msgspec.msgpack.encode(own))
        return msgspec.msgpack.decode(encoded, type=Dealt | None)

    def _shares(self, dealt: Dealt) -> list[transfer.Share]:
        mesh = transfer.Mesh(self._block.mesh)
        return transfer.shares(
            self._protocol, len(dealt.ids), mesh, sizes=dealt.sizes, most_rows=self._block.max_rows
        )

    def _fetched(
        self, dealt: Dealt, args: Mapping[str, Any]
    ) -> tuple[dict[str, torch.Tensor], dict[str, set[int]], str]:
        """This rank's tensors; or by maker the rows whose tensors are gone; or why the exchange failed."""
        if not self._makers:
            return {}, {}, ""
        failed, lost, tensors = "", list[str](), dict[str, torch.Tensor]()
        try:
            tensors, lost = self._reader.fetch(args["number"], self._wanted(dealt), args["gives"])
        except (DeadlineExceeded, IntegrityError) as error:
            failed = str(error)
        everyone = [one.decode() for one in self._mesh.gather(failed.encode())]
        gone: dict[str, set[int]] = {}
        for name in lost:
            sample, _, column = name.rpartition("/")
            gone.setdefault(self._makers[column], set()).add(dealt.ids.index(sample))
        return tensors, gone, next((one for one in everyone if one), "")

    def _wanted(self, dealt: Dealt) -> Wanted:
        shape = self._block.mesh
        of_row: dict[int, list[int]] = {}
        for rank, share in enumerate(self._shares(dealt)):
            for row in share.rows:
                of_row.setdefault(row, []).append(rank)
        notes, readers = {}, {}
        for column in self._makers:
            for row, sample in enumerate(dealt.ids):
                name = f"{sample}/{column}"
                notes[name] = msgspec.json.decode(dealt.notes[column][row], type=TensorNote)
                readers[name] = of_row[row]
        return wanted_by(
            shape.size, notes, readers, self._block.cuts, lambda rank: (shape.place(rank)[1], shape.tp)
        )

    def _give_back(self, dealt: Dealt, lost: Mapping[str, set[int]]) -> None:
        """Rows whose tensors are gone are made again; the others wait for the next call."""
        if self._claim is None:
            return
        for maker, rows in lost.items():
            columns = [name for name, own in self._makers.items() if own == maker]
            self._store.lose(self._claim, sorted(rows), maker, columns)
            self._context.log.warning("node.tensors_lost", table=dealt.table, rows=len(rows), maker=maker)
        self._store.release(self._claim)

    def _work_on(self, dealt: Dealt, tensors: Mapping[str, torch.Tensor]) -> None:
        """Call the method on this rank's rows; rank 0 writes what all found.

        After a failure every rank makes its object anew.
        """
        began = time.monotonic()
        shares = self._shares(dealt)
        told = Told()
        try:
            told = self._computed(dealt, shares, tensors)
        except (Terminated, RestartRequired, Fenced):
            raise
        except Exception:  # noqa: BLE001 - the user's method may raise anything
            told = Told(failure=traceback.format_exc())
        if told.failure:
            self._drop()
        everyone = [
            msgspec.msgpack.decode(one, type=Told) for one in self._mesh.gather(msgspec.msgpack.encode(told))
        ]
        self._write(dealt, shares, everyone, began)
        if any(one.failure for one in everyone):
            self._drop()
            self._mesh.renew()
            self._object = self._made_by(self._mesh)

    def _drop(self) -> None:
        """Let go of the user's object and its groups: ranks that wait for this one in these fail too."""
        self._object = None
        gc.collect()

    def _write(
        self, dealt: Dealt, shares: Sequence[transfer.Share], everyone: Sequence[Told], began: float
    ) -> None:
        """Rank 0: write what all found, or give the rows back."""
        claim, self._claim = self._claim, None
        if claim is None:
            return
        failures = [f"rank {rank}: {one.failure}" for rank, one in enumerate(everyone) if one.failure]
        try:
            if failures:
                self._failed_rows += claim.count
                self._last = failures[0].strip().splitlines()[-1]
                self._context.log.warning("node.failed", table=dealt.table, rows=claim.count, reason=self._last)
                self._store.nack(claim, "\n".join(failures))
                return
            arrays = self._collected(dealt, shares, everyone)
            batch = pa.RecordBatch.from_arrays(
                [pa.array(arrays[field.name], field.type) for field in self._schema], schema=self._schema
            )
            self._store.write(claim, batch, ack=True, facts=self._facts)
        except Fenced as error:  # somebody else has the rows now
            self._context.log.warning("node.lease_lost", table=dealt.table, error=str(error))
            return
        ROWS_WRITTEN.labels(dealt.table, self._block.name).inc(claim.count)
        ROWS_ACKED.labels(dealt.table, self._block.name).inc(claim.count)
        self._context.progress()
        seconds = round(time.monotonic() - began, 3)
        self._context.log.info("node.done", table=dealt.table, rows=claim.count, seconds=seconds)

    def _computed(
        self, dealt: Dealt, shares: Sequence[transfer.Share], tensors: Mapping[str, torch.Tensor]
    ) -> Told:
        """The method's results of this rank, checked; its tensors are held here."""
        share = shares[self._mesh.rank]
        rows = self._rows(dealt, share, tensors)
        method, _ = self._registered(str(self._block.method))
        results = method(rows, micro_batches=share.micro_batches)
        if not self._tells(shares):
            return Told()
        subject = f"node {self._block.name}, rank {self._mesh.rank}"
        if len(results) != len(share.rows):
            raise UsageError(
                subject, got=f"{len(results)} results", expected=f"one for each of {len(share.rows)} rows"
            )
        writes = self._block.writes
        named = len(writes) > 1 or isinstance(next(iter(results), None), Mapping)
        values = {name: [one[name] if named else one for one in results] for name in writes}
        plain = {name: kind for name, kind in writes.items() if kind != "tensor"}
        columns = to_columns({n: values[n] for n in plain}, plain, len(results), subject=subject) if plain else {}
        held = {
            name: [
                (spec.dtype, spec.shape)
                for row, value in zip(share.rows, values[name], strict=True)
                for spec in (self._tensors.keep(f"{dealt.ids[row]}/{name}", dealt.steps[row], value),)
            ]
            for name in self._made
        }
        return Told(columns, held, self._tensors.process)

    def _rows(self, dealt: Dealt, share: transfer.Share, tensors: Mapping[str, torch.Tensor]) -> TakenRows:
        reads = [name for name in self._block.reads if name not in self._makers]
        own = sorted(share.rows)
        table: list[dict[str, Any]] = [{} for _ in own]
        if own and reads:
            table = self._store.read(dealt.table, subset(dealt.ranges, own), reads).to_pylist()
        by_row = dict(zip(own, table, strict=True))
        rows = TakenRows(
            NodeRow(
                self._block.name,
                {
                    name: tensors[f"{dealt.ids[row]}/{name}"] if name in self._makers else by_row[row][name]
                    for name in self._block.reads
                },
            )
            for row in share.rows
        )
        rows.taking = self._taking
        return rows

    def _taking(self) -> None:
        """Before the next row is taken up: progress, and a place to stop at."""
        raise_if_stopping(self._context)
        self._context.progress()
        if self._claim is not None and time.monotonic() - self._extended_at >= _EXTEND_S:
            self._extended_at = time.monotonic()
            self._store.extend(self._claim)

    # -- results -------------------------------------------------------------------------------------------------

    def _line(self, rank: int) -> list[int]:
        """The tensor ranks of a rank's stage and replica."""
        shape = self._block.mesh
        stage, _, replica = shape.place(rank)
        return [shape.rank(stage, index, replica) for index in range(shape.tp)]

    def _tells(self, shares: Sequence[transfer.Share]) -> bool:
        """Whether this rank's results count: they are collected, or they are a part of a tensor that is cut."""
        cut = any(name in self._block.cuts for name in self._made)
        line = self._line(self._mesh.rank) if cut else [self._mesh.rank]
        return any(shares[rank].gives_back for rank in line)

    def _collected(
        self, dealt: Dealt, shares: Sequence[transfer.Share], everyone: Sequence[Told]
    ) -> dict[str, list[Any]]:
        """All columns in row order; of a tensor, where it is."""
        found: dict[str, list[Any]] = {}
        for name, kind in self._block.writes.items():
            results: dict[int, list[Any]] = {}
            for rank, share in enumerate(shares):
                if share.gives_back and kind == "tensor":
                    results[rank] = [self._note(name, rank, place, everyone) for place in range(len(share.rows))]
                elif share.gives_back:
                    results[rank] = everyone[rank].columns[name]
            found[name] = transfer.together(self._protocol, shares, results)
        return found

    def _note(self, column: str, rank: int, place: int, everyone: Sequence[Told]) -> str:
        """Where the tensor of a row is, which is `place` among its rank's rows."""
        dim = self._block.cuts.get(column, -1)
        parts, at = [], 0
        for holder in self._line(rank) if dim >= 0 else [rank]:
            dtype, shape = everyone[holder].tensors[column][place]
            size = shape[dim] if dim >= 0 else 0
            parts.append(Part(holder, everyone[holder].process, at, at + size))
            at += size
        whole = shape if dim < 0 else (*shape[:dim], at, *shape[dim + 1 :])
        return msgspec.json.encode(TensorNote(self._block.name, dtype, whole, dim, tuple(parts))).decode()
