"""rlmq: a message-queue decoupled pipeline for RL post-training of language models."""

from __future__ import annotations

import importlib
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlmq.common.dataflow import DataFlow as DataFlow
    from rlmq.common.dataflow import Node as Node
    from rlmq.common.lazy_model import load_hf_model as load_hf_model
    from rlmq.reward_client import RewardClient as RewardClient

__version__ = _version("rlmq")

_PLACES = {
    "DataFlow": "rlmq.common.dataflow",
    "Node": "rlmq.common.dataflow",
    "RewardClient": "rlmq.reward_client",
    "load_hf_model": "rlmq.common.lazy_model",
}
"""Public name -> its module, which is imported when the name is used: `import rlmq` imports neither."""

__all__ = ["DataFlow", "Node", "RewardClient", "__version__", "load_hf_model"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'rlmq' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
