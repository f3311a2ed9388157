"""rlmq: a message-queue decoupled pipeline for RL post-training of language models."""

from __future__ import annotations

import importlib
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlmq.common.dataflow import DataFlow as DataFlow
    from rlmq.common.dataflow import Node as Node
    from rlmq.common.lazy_model import load_hf_model as load_hf_model
    from rlmq.common.transfer import Transfer as Transfer
    from rlmq.common.transfer import register as register
    from rlmq.reward_client import RewardClient as RewardClient
    from rlmq.run import Run as Run
    from rlmq.trainers import GRPOTrainer as GRPOTrainer
    from rlmq.trainers import PPOTrainer as PPOTrainer

__version__ = _version("rlmq")

_PLACES = {
    "GRPOTrainer": "rlmq.trainers",
    "PPOTrainer": "rlmq.trainers",
    "RewardClient": "rlmq.reward_client",
    "Run": "rlmq.run",
    "DataFlow": "rlmq.common.dataflow",
    "Node": "rlmq.common.dataflow",
    "load_hf_model": "rlmq.common.lazy_model",
    "Transfer": "rlmq.common.transfer",
    "register": "rlmq.common.transfer",
}
"""Public name -> its module, which is imported when the name is used: `import rlmq` imports neither."""

__all__ = [
    "DataFlow",
    "GRPOTrainer",
    "Node",
    "PPOTrainer",
    "RewardClient",
    "Run",
    "Transfer",
    "__version__",
    "load_hf_model",
    "register",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'rlmq' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
