"""One receiving process: `weight_receiver.py MEETING MANIFEST MEMBER FOLDER BEHAVIOUR`.

Behaviours: `whole`; `killed` and `stopped` (by its own signal, after the first tensor); `late` (never joins);
`flips` (one bit of every message, as if the wire had done it).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from rlmq.common.errors import RlmqError
from rlmq.common.layouts import exchange
from rlmq.common.layouts.layout import Box
from rlmq.common.layouts.part import whole_part
from rlmq.common.layouts.sealing import Words
from rlmq.common.layouts.weight_sync import WeightReceiver
from rlmq.common.weights import Rendezvous, WeightManifest

TAKEN: dict[str, torch.Tensor] = {}


def flip_bits() -> None:
    """Damage arriving messages before they are looked at."""
    check = exchange.is_whole

    def after_a_flip(message: Words, number: int) -> bool:
        message[message.size // 2] ^= 0x10
        return check(message, number)

    exchange.is_whole = after_a_flip  # type: ignore[assignment]


def main() -> int:
    meeting = msgspec.json.decode(sys.argv[1], type=Rendezvous)
    manifest = msgspec.json.decode(sys.argv[2], type=WeightManifest)
    member, folder, behaviour = sys.argv[3], Path(sys.argv[4]), sys.argv[5]
    (folder / f"{member}.imported").touch()
    if behaviour == "late":
        time.sleep(60)
    if behaviour == "flips":
        flip_bits()

    def take(name: str, _: Box, tensor: torch.Tensor) -> None:
        TAKEN[name] = tensor.clone()
        if not tensor.numel():
            return  # it comes before the others join
        if behaviour == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)

    try:
        WeightReceiver(member).receive(meeting, whole_part(manifest), take)
    except RlmqError as error:
        print(error, flush=True)
        return int(error.exit_code)
    save_file(TAKEN, folder / f"{member}.safetensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
