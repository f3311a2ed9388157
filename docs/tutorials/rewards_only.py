"""Only the reward part: scorers in processes of their own, for rows that somebody else generated."""

from typing import Any

import rlmq

ROWS: list[dict[str, Any]] = [
    {"prompt": "2 + 2 = ", "response": "4", "answer": "4"},
    {"prompt": "2 + 2 = ", "response": "about five", "answer": "4"},
    {"prompt": "2 / 0 = ", "response": "0", "answer": None},
]


def correct(completions: list[str], answer: list[str | None], **_: Any) -> list[float | None]:
    """TRL's signature. None is no verdict: the row has no answer to compare with."""
    return [
        None if wanted is None else float(text == wanted) for text, wanted in zip(completions, answer, strict=True)
    ]


def compute_score(data_source: Any, solution_str: str, ground_truth: Any = None, extra_info: Any = None) -> Any:
    """verl's signature, once a row; further fields beside the score are kept."""
    return {"score": 1.0 / max(1, len(solution_str)), "characters": len(solution_str)}


if __name__ == "__main__":
    with rlmq.RewardClient([correct, {"function": compute_score, "weight": 0.1}]) as client:
        scores = client.score(ROWS)
    for row, reward in zip(ROWS, scores.rewards, strict=True):
        print(f"{row['response']}: {reward:g}")
    print(scores.components)
    print(scores.fields)
