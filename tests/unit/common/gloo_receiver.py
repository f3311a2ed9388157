"""One receiving process: `gloo_receiver.py MEETING MANIFEST MEMBER FOLDER BEHAVIOUR`.

Behaviours: `whole`; `killed` and `stopped` (by its own signal, after the first tensor); `late` (never joins);
`flips` (one bit of every bucket as if the wire had done it).
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

from rlmq.common import weight_buckets
from rlmq.common.errors import RlmqError
from rlmq.common.gloo import GlooTransport
from rlmq.common.weights import Rendezvous, WeightManifest

TAKEN: dict[str, torch.Tensor] = {}


def flip_bits() -> None:
    """Damage arriving buffers before they are looked at."""
    check = weight_buckets.Bucket.is_whole

    def after_a_flip(bucket: weight_buckets.Bucket, payload_bytes: int, number: int) -> bool:
        bucket.payload[payload_bytes // 2] ^= 0x10
        return check(bucket, payload_bytes, number)

    weight_buckets.Bucket.is_whole = after_a_flip  # type: ignore[method-assign]


def main() -> int:
    meeting = msgspec.json.decode(sys.argv[1], type=Rendezvous)
    manifest = msgspec.json.decode(sys.argv[2], type=WeightManifest)
    member, folder, behaviour = sys.argv[3], Path(sys.argv[4]), sys.argv[5]
    if behaviour == "late":
        time.sleep(60)
    if behaviour == "flips":
        flip_bits()

    def take(name: str, tensor: torch.Tensor) -> None:
        TAKEN[name] = tensor.clone()
        if behaviour == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)

    try:
        GlooTransport().receive(meeting, member, manifest, take)
    except RlmqError as error:
        print(error, flush=True)
        return int(error.exit_code)
    save_file(TAKEN, folder / f"{member}.safetensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
