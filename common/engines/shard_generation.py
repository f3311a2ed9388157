"""Generation with a decoder that lies on the ranks of a replica: the `hf` engine's decoding loop over shards.

Every rank of the replica makes the same calls with the same requests. Logits are whole and equal on all of them,
and random numbers depend on (seed, sample id, token index), so that all choose the same tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from transformers import DynamicCache

from rlmq.common.engines.hf import HfEngine
from rlmq.common.engines.mesh_groups import MeshGroups
from rlmq.common.engines.parallel_decoder import ParallelDecoder, visible
from rlmq.common.engines.pipeline import Pipeline
from rlmq.common.engines.tensor_parallel import broadcast, whole_logits
from rlmq.common.errors import IntegrityError, UsageError
from rlmq.common.models import context_length
from rlmq.common.weights import WeightManifest


class ShardedModel:
    """A decoder's stage, called as a transformers model is.

    Args:
        decoder: this rank's part.
        groups: of the replica.
    """

    def __init__(self, decoder: ParallelDecoder, groups: MeshGroups) -> None:
        self.config, self.device = decoder.config, decoder.device
        self._decoder = decoder
        self._groups = groups
        self._pipeline = Pipeline(groups.pp, decoder.place.pp, decoder.place.pps)

    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: DynamicCache | None = None,
        logits_to_keep: int = 1,
        use_cache: bool = True,
    ) -> SimpleNamespace:
        """`logits` `[rows, logits_to_keep, vocabulary]` of the last places, on every rank of the replica.

        Raises:
            RestartRequired: another rank died or did not answer in time.
        """
        decoder, place = self._decoder, self._decoder.place
        rows, new = input_ids.shape
        if place.first:
            hidden = decoder.embedded(input_ids)
        else:
            hidden = self._pipeline.receive((rows, new, decoder.shape.hidden), decoder.dtype, self.device)
        hidden = decoder.layers(
            hidden, visible(attention_mask, new), position_ids, past_key_values if use_cache else None
        )
        if not place.last:
            self._pipeline.send(hidden)
            logits = hidden.new_empty(rows, logits_to_keep, decoder.shape.vocabulary)
        else:
            logits = self._logits(hidden[:, -logits_to_keep:])
        broadcast(logits, self._groups.pp, place.pps - 1)
        self._pipeline.finish()
        return SimpleNamespace(logits=logits)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, places, _ = hidden.shape
        shape, tps = self._decoder.shape, self._decoder.place.tps
        widths = [len(shape.vocabulary_at(self._decoder.place.of_rank(part))) for part in range(tps)]
        own = self._decoder.logits(hidden).flatten(0, 1)
        return whole_logits(own, widths, self._groups.tp).view(rows, places, -1).contiguous()


class ShardEngine(HfEngine):
    """A `GenerationEngine` on this rank's generation shards; its weights are those of the training, in place.

    Args:
        model: this rank's part.
        layout: of the whole weights.
        version: policy version of the weights.
        pad_id, eos_ids, max_batch, decode: as for `HfEngine`.
    """

    def __init__(
        self,
        model: ShardedModel,
        layout: WeightManifest,
        version: int,
        *,
        pad_id: int,
        eos_ids: Sequence[int],
        max_batch: int,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        if max_batch < 1:
            raise UsageError("rollout.batch_size_per_device", got=max_batch, expected="at least 1")
        self._model = model
        self._weights = _InPlace(layout)  # type: ignore[assignment]
        self._pad_id = pad_id
        self._eos_ids = frozenset(eos_ids)
        self._max_batch = max_batch
        self._decode = decode
        self._context_tokens = context_length(model.config)
        self._queue = deque()
        self._slots = None
        self._active = None
        self._known = set()
        self._version = version
        self._torn = False

    def close(self) -> None:
        """End: keys and values are dropped, and no step is made any more."""
        self._queue.clear()
        self._known.clear()
        self._active = None
        self._version = -1


class _InPlace:
    """Stands where other engines stage weights that arrive."""

    loading = False

    def __init__(self, layout: WeightManifest) -> None:
        self.layout = layout

    def begin(self, manifest: WeightManifest, version: int) -> None:
        """Nothing can be loaded.

        Raises:
            IntegrityError: always.
        """
        raise IntegrityError(
            f"weights of version {version}", got="a transfer", expected="none: the shards are trained in place"
        )

    def abandon(self) -> None:
        """Nothing is on its way."""

    def release(self) -> None:
        """There are none."""
