"""Processes that consume batches: actor, recorder, evaluation."""
