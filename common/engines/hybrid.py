"""The hybrid engine: the ranks that train a model switch to a coarser layout of it and generate, in place.

::

    training layout p-t-d  -- vote, exchange, vote -->  generation layout p_g-t_g-d_g-d  -- release -->  p-t-d

What a rank trains is a part of what it generates with, and stays where it is; the switch brings what is missing,
the fewest bytes that can (`layouts.plan`, `layouts.zero_redundancy`). Until every rank has all of it nothing has
changed for the training, so that a failure anywhere leaves the training layout as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from rlmq.common.engines.mesh_groups import MeshGroups
from rlmq.common.engines.parallel_decoder import ParallelDecoder
from rlmq.common.engines.parallel_trainer import ParallelEngine
from rlmq.common.engines.shard_generation import ShardedModel, ShardEngine
from rlmq.common.engines.shard_memory import Ledger
from rlmq.common.engines.tensor_parallel import all_gather
from rlmq.common.errors import DeadlineExceeded, DependencyError, IntegrityError, RestartRequired
from rlmq.common.layouts.exchange import Exchange
from rlmq.common.layouts.plan import plan
from rlmq.common.layouts.views import ShardViews
from rlmq.common.weights import TransferStats

_FOREIGN, _BUCKET = "shards of other ranks", "messages"


@dataclass(frozen=True, slots=True)
class Decoding:
    """What generation needs to know beside the model; see `HfEngine`."""

    pad_id: int
    eos_ids: Sequence[int]
    max_batch: int
    decode: Callable[[Sequence[int]], str] | None = None


class HybridEngine:
    """Switches one rank; all ranks of the mesh switch at once.

    Args:
        engine: made with the generation places of `grouping`.
        groups: of this rank's generation replica.
        decoding: how to generate.
        timeout_s: of a switch.
        bucket_bytes: memory for messages during the switch.

    Attributes:
        ledger: memory that is held only while generating; balances to 0 in the training layout.
        switched: bytes that this rank sent in the newest switch, and its seconds.
    """

    def __init__(
        self,
        engine: ParallelEngine,
        groups: MeshGroups,
        decoding: Decoding,
        *,
        timeout_s: float = 120.0,
        bucket_bytes: int = 16 << 20,
    ) -> None:
        self.ledger = Ledger()
        self.switched = TransferStats(0, 0.0)
        self._engine = engine
        self._groups = groups
        self._decoding = decoding
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._plan = plan(engine.layouts["training"], engine.layouts["generation"])
        self._switches = 0

    @contextmanager
    def generation(self, version: int = 0) -> Iterator[ShardEngine]:
        """The generation layout while the context lasts, as a generation engine that serves `version`.

        Raises:
            DependencyError: a rank lacks the memory; all are in the training layout.
            IntegrityError: bytes were damaged on their way; all are in the training layout.
            RestartRequired: a rank died or did not answer in time.
        """
        self._enter()
        try:
            engine = self._serving(version)
            try:
                yield engine
            finally:
                engine.close()
        finally:
            self._leave()

    def _serving(self, version: int) -> ShardEngine:
        own, how = self._engine, self._decoding
        decoder = ParallelDecoder(own.config, self._groups.place, own.memory.generation, self._groups.tp)
        return ShardEngine(
            ShardedModel(decoder, self._groups),
            own.layout(),
            version,
            pad_id=how.pad_id,
            eos_ids=how.eos_ids,
            max_batch=how.max_batch,
            decode=how.decode,
        )

    def _enter(self) -> None:
        self._switches += 1
        began = time.monotonic()
        try:
            self._reserve()
            sent = self._exchange() if self._plan.moves else 0
        except BaseException:
            self._leave()
            raise
        self.ledger.give(_BUCKET)
        self.switched = TransferStats(sent, time.monotonic() - began)

    def _reserve(self) -> None:
        """Every rank has the memory for the switch, or none begins it."""
        failure = ""
        try:
            self.ledger.take(_FOREIGN, self._engine.memory.foreign_bytes)
            if self._plan.moves:
                self.ledger.take(_BUCKET, self._bucket_bytes)
                torch.empty(self._bucket_bytes, dtype=torch.uint8).fill_(0)
        except (RuntimeError, MemoryError) as error:  # torch has no exception of its own for this on the CPU
            failure = str(error).splitlines()[0]
        vote, everyone = torch.tensor([bool(failure)], dtype=torch.int32), self._engine.groups.everyone
        votes = all_gather(vote, everyone, timeout_s=self._timeout_s)
        failed = [rank for rank, vote in enumerate(votes) if int(vote)]
        if failed:
            raise DependencyError(
                "switch to the generation layout",
                got=failure or f"too little memory on rank {', '.join(map(str, failed))}",
                expected=f"room for {self.ledger.balance_bytes} bytes beside the training",
                remedy="Raise placement.actor.generation.tp, or free memory",
            )

    def _exchange(self) -> int:
        """Bring what other ranks train to its place."""
        own, group = self._engine.groups, self._engine.groups.everyone
        assert group is not None
        training, generation = self._engine.named_shards("training"), self._engine.named_shards("generation")
        exchange = Exchange(group, own.rank, range(own.mesh.size), bucket_bytes=self._bucket_bytes)
        try:
            with torch.no_grad():
                stats = exchange.run(
                    self._plan,
                    ShardViews(training, generation),
                    generation=f"switch {self._switches}",
                    deadline=time.monotonic() + self._timeout_s,
                )
        except DeadlineExceeded as error:
            raise RestartRequired("switch to the generation layout", got=str(error)) from error
        return stats.bytes

    def _leave(self) -> None:
        self._engine.memory.release()
        self.ledger.give(_FOREIGN)
        self.ledger.give(_BUCKET)
        if self.ledger.balance_bytes:
            raise IntegrityError("memory ledger", got=self.ledger.held, expected="nothing in the training layout")
