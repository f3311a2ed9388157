"""rlmq: a message-queue decoupled pipeline for RL post-training of language models."""

from __future__ import annotations

from importlib.metadata import version as _version

__version__ = _version("rlmq")
__all__ = ["__version__"]
