"""The rollout's work with an engine that is there for a while only: that of the hybrid actor."""

from __future__ import annotations

from typing import cast

from rlmq.common.engines.generation import GenerationEngine
from rlmq.producers.rollout import RolloutRole


class HybridRollout(RolloutRole):
    """Claims and generates as a rollout worker does, but is no worker of its own, and gets no weights."""

    def _made(self, folder: str) -> GenerationEngine:
        return cast(GenerationEngine, None)  # `generate` brings one

    def _up_to_date(self) -> bool:
        return True

    def generate(self, engine: GenerationEngine) -> int:
        """Generate chunks until none is ready, or the process is told to stop.

        Returns:
            How many chunks.
        """
        self._engine = engine
        chunks = 0
        while not self._context.stopping() and self.work():
            chunks += 1
        self._engine = self._made("")
        return chunks
