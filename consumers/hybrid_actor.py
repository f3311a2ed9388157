"""The hybrid actor: its ranks generate the rows that they will train on, on a coarser layout of the same weights.

::

    call   generate(version)   all ranks: switch; the first rank of each replica claims chunks until none is
    ready; back call   train(step)         as ever

No weights are sent: policy version v is what the ranks hold after step v.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rlmq.buffer.store import ExperienceStore
from rlmq.common.engines.decoder_shape import Place, generation_places
from rlmq.common.engines.generation import GenerationEngine
from rlmq.common.engines.hybrid import Decoding, HybridEngine
from rlmq.common.engines.mesh_groups import generation_groups
from rlmq.common.engines.parallel_trainer import ParallelEngine
from rlmq.common.errors import DependencyError, IntegrityError
from rlmq.common.layouts.zero_redundancy import Grouping
from rlmq.common.metrics import POLICY_VERSION
from rlmq.common.models import eos_ids, load_tokenizer
from rlmq.common.worker import CallHandler, WorkerContext
from rlmq.common.worker_loop import raise_if_stopping
from rlmq.consumers.actor import ActorRole
from rlmq.consumers.generation_ranks import LeadingEngine, follow
from rlmq.consumers.mesh import Mesh

Generate = Callable[[GenerationEngine], int]
"""Generate what is ready in the rollout stage with this engine; how many chunks that were."""


class HybridActorRole(ActorRole):
    """An actor rank that also generates.

    Args:
        generate: the rollout's work, for the first rank of a replica.
    """

    def __init__(self, context: WorkerContext, store: ExperienceStore, generate: Generate) -> None:
        placed = context.recipe.placement.actor
        self._generate_ready = generate
        self._grouping = Grouping(placed.mesh, *placed.generation_sizes)
        super().__init__(context, store)
        self._hybrid, self._replica = self._switching()

    def _generation_places(self) -> list[Place]:
        return generation_places(self._grouping)

    def _switching(self) -> tuple[HybridEngine, Mesh]:
        """What switches the layout, and this rank's generation replica."""
        assert isinstance(self._engine, ParallelEngine)
        groups = generation_groups(self._grouping, self._context.rank, self._mesh.part)
        tokenizer = load_tokenizer(self._model_folder)
        decoding = Decoding(
            pad_id=self._pad_id,
            eos_ids=eos_ids(self._model_folder, tokenizer),
            max_batch=self._recipe.rollout.batch_size_per_device,
            decode=lambda ids: str(tokenizer.decode(ids)),
        )
        hybrid = HybridEngine(self._engine, groups, decoding, timeout_s=self._recipe.deadlines.sync_s)
        return hybrid, Mesh(groups.replica, groups.rank, groups.mesh.size, groups.mesh)

    def handlers(self) -> Mapping[str, CallHandler]:
        """Those of the actor, and `generate`."""
        return {**super().handlers(), "generate": self._generate}

    def _agreed(self, number: tuple[int, ...]) -> bool:
        """Whether all ranks make this call; a stop or a kill may have left an older one with some of them.

        Raises:
            RestartRequired: a rank died or did not come in time.
        """
        desired = self._context.desired()
        if desired is not None and number[0] < desired.epoch:
            return False
        while True:
            gathered = self._mesh.gather(msgspec.msgpack.encode(number))
            everyone = [msgspec.msgpack.decode(one, type=tuple[int, ...]) for one in gathered]
            if number < max(everyone):
                return False
            if number == min(everyone):
                return True

    def _generate(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Generate all rows that are ready, with the weights of `version`, or newer ones that the log has.

        Returns:
            Version, chunks of this rank's replica, seconds and bytes of the switch; or `failed`: all ranks are in
            the training layout, and nothing was generated; or nothing: other ranks do not have this call.
        """
        if not self._agreed(tuple(args["number"])):
            return {}
        self._catch_up(int(args["version"]))
        self._context.activity("generating")
        chunks = 0
        try:
            with self._hybrid.generation(self._trained) as engine:
                if self._replica.rank:
                    follow(engine, self._replica, self._context.progress)
                else:
                    leading = LeadingEngine(engine, self._replica)
                    chunks = self._generate_ready(leading)
                    leading.end()
        except (DependencyError, IntegrityError) as error:
            self._context.log.error("switch failed", error=str(error))
            return {"failed": str(error), "version": self._trained}
        raise_if_stopping(self._context)
        POLICY_VERSION.set(self._trained)
        switched = self._hybrid.switched
        return {
            "version": self._trained,
            "chunks": chunks,
            "switch_s": round(switched.seconds, 4),
            "switch_bytes": switched.bytes,
        }
