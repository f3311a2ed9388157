"""Processes that add rows or columns: prompts, rollout, reward, reference."""
