"""One of the two ends of `rlmq bench sync`: `python -m benchmarks.sync_rank FOLDER REPEATS RANK`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.reshard_cases import LLAMA_135M
from rlmq.common.engines.hf import HfEngine
from rlmq.common.layouts.groups import join
from rlmq.common.layouts.layout import Box
from rlmq.common.layouts.part import own_part, whole_part
from rlmq.common.layouts.weight_sync import WeightReceiver, WeightSender
from rlmq.common.weights import Rendezvous

_PIECE = 16 << 20
_TIMEOUT_S = 300.0


def model(seed: int) -> LlamaForCausalLM:
    """A random model; its embedding is tied."""
    torch.manual_seed(seed)
    shape = LLAMA_135M
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            tie_word_embeddings=shape.tied,
        )
    )


class End:
    """One of the two processes."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self.store = dist.FileStore(str(folder / "store"), 2)
        self.group = join(self.store, "bench", rank, 2, _TIMEOUT_S)
        self.model = model(rank)
        self.engine = HfEngine(self.model, pad_id=0, eos_ids=(0,), max_batch=1) if rank else None
        self.sender, self.receiver = WeightSender(timeout_s=_TIMEOUT_S), WeightReceiver("r")
        self.tensors = {name: t for name, t in self.model.state_dict().items() if name != "lm_head.weight"}
        self.bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.flat = torch.ones(self.bytes // 4)

    def together(self) -> None:
        """Wait for the other."""
        self.group.allreduce([torch.zeros(1)], dist.AllreduceOptions()).wait()

    def raw(self, _: int) -> None:
        """The same bytes in pieces, two on the way at a time."""
        waiting = []
        for number, part in enumerate(self.flat.split(_PIECE // 4)):
            move = self.group.recv if self.rank else self.group.send
            waiting.append(move([part], 1 - self.rank, number))
            if len(waiting) > 1:
                waiting.pop(0).wait()
        for work in waiting:
            work.wait()

    def weight_sync(self, number: int) -> None:
        """As trainer and rollout do it."""
        key = f"meeting/{number}"
        if self.engine is None:
            meeting = self.sender.offer(str(number), ("r",))
            self.store.set(key, msgspec.json.encode(meeting).decode())
            self.sender.send(meeting, own_part(self.model.state_dict().items()), number)
            return
        meeting = msgspec.json.decode(self.store.get(key), type=Rendezvous)
        engine = self.engine
        layout = engine.layout()
        engine.begin_load(layout, number)

        def load(name: str, _: Box, tensor: torch.Tensor) -> None:
            engine.load(name, tensor)

        self.receiver.receive(meeting, whole_part(layout), load, room=engine.room, served=engine.served)
        engine.commit()
        self.receiver.committed()

    def broadcast(self, _: int) -> None:
        """One after the other into a state dict, which is then loaded."""
        state = {}
        for name, tensor in self.tensors.items():
            state[name] = torch.empty_like(tensor) if self.rank else tensor
            self.group.broadcast([state[name]], dist.BroadcastOptions()).wait()
        if self.rank:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
            self.model.load_state_dict(state)


def main(folder: Path, repeats: int, rank: int) -> int:
    """All three by turns."""
    torch.set_num_threads(1)
    end = End(folder, rank)
    ways = {"raw": end.raw, "weight sync": end.weight_sync, "broadcast": end.broadcast}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats + 1):
        for name, way in ways.items():
            end.together()
            began, used = time.monotonic(), time.process_time()
            way(number)
            end.together()
            if number:
                seconds[name].append(time.monotonic() - began)
                cpu[name].append(time.process_time() - used)
    both = [torch.tensor(list(cpu.values())) for _ in range(2)]
    end.group.allgather([both], [both[0].clone()]).wait()
    used_s = dict(zip(ways, (both[0] + both[1]).median(dim=1).values.tolist(), strict=True))
    if rank == 0:
        (folder / "found.json").write_text(json.dumps({**seconds, "bytes": end.bytes, "cpu": used_s}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
