"""Algorithms: one file each (columns, advantages, loss, loop)."""
