"""A flow of rollout, a safety filter and a reward, without a trainer:

python docs/tutorials/safety_node.py --prompts "['Name a bird: ', 'Paint a boat: ']" --max-tokens 16
"""

from __future__ import annotations

from rlmq import DataFlow, Node, load_hf_model

rollout = Node("rollout", model=load_hf_model("../../recipes/tiny_model.py:folder"))
reward = Node(
    "reward",
    forward_fn=lambda completions: [sum("a" <= c <= "z" for c in text) / max(1, len(text)) for text in completions],
)
flow = DataFlow([rollout, reward])

safety = Node(
    name="safety",
    reads=["prompt_text", "response_text"],
    writes={"safe": bool},
    forward_fn=lambda rows: ["paint" not in f"{prompt} {response}".lower() for prompt, response in rows],
    keep="safe",
    reason="unsafe",
)
flow.add_node(safety)
flow.add_edge(rollout, safety)
flow.add_edge(safety, reward)

if __name__ == "__main__":
    flow.main()
