"""Weights by step for weights.yaml: `rlmq up weights.yaml reward_controller=weights.py:by_step`"""


def by_step(step: int) -> dict[str, float]:
    """The cost of early letters counts from step 11 on."""
    return {"early": 0.0 if step <= 10 else -1.0}
