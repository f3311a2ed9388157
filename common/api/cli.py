"""The command `rlmq`."""

from __future__ import annotations


def main() -> None:
    """Entry point."""
