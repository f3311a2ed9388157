"""Graphs of nodes: three ways to write one, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from rlmq.common.dataflow import DataFlow, Node
from rlmq.common.errors import UsageError
from rlmq.common.flow_drawing import as_svg, as_text
from rlmq.common.lazy_model import load_hf_model


def parts() -> tuple[Node, Node, Node]:
    rollout = Node("rollout", model="model")
    safety = Node("safety", ["response_text"], {"safe": bool}, forward_fn=lambda rows: [True] * len(rows))
    reward = Node("reward", reads=["safe"], forward_fn=lambda completions: [0.0] * len(completions))
    return rollout, safety, reward


def test_one_graph_is_written_by_columns_by_list_and_by_connect() -> None:
    # given the same nodes, with edges that follow from columns, from a list, and from connect
    by_columns = DataFlow(parts())
    rollout, safety, reward = parts()
    by_list = DataFlow([rollout, safety, reward], [(rollout, safety), ("safety", "reward")])
    rollout, safety, reward = parts()
    by_connect = DataFlow([rollout, safety, reward])
    by_connect.connect(rollout.output, safety.input)
    by_connect.connect(safety.output, reward.input)
    # then their drawings are equal, as text and as SVG
    graphs = [flow.graph() for flow in (by_columns, by_list, by_connect)]
    assert len({as_text(graph) for graph in graphs}) == 1
    assert len({as_svg(graph) for graph in graphs}) == 1
    assert "safety\n  -> reward: safe\n" in as_text(graphs[0])
    boxes = [one.text for one in ElementTree.fromstring(as_svg(graphs[0])).iter("{http://www.w3.org/2000/svg}text")]
    assert boxes == ["prompts", "rollout", "safety", "reward"]


def test_what_does_not_feed_a_keeping_node_waits_for_it() -> None:
    # given two filters and a node that feeds the second
    flow = DataFlow(
        [
            Node("rollout"),
            Node("length", reads=["response_ids"], writes={"n": int}),
            Node("short", reads=["n"], writes={"is_short": bool}, keep="is_short"),
            Node("polite", reads=["response_text"], writes={"is_polite": bool}, keep="is_polite"),
            Node("reward"),
        ]
    )
    # then the reward waits for both, the later filter for the earlier one, and its feeder for neither
    waits = {(edge.source, edge.target) for edge in flow.graph().edges}
    assert {("short", "reward"), ("polite", "reward"), ("short", "polite")} <= waits
    assert not waits & {("polite", "short"), ("short", "length"), ("short", "rollout")}


def test_a_cycle_is_named_inside_a_step_and_legal_across_it() -> None:
    def nodes() -> list[Node]:
        return [
            Node("first", reads=["prompt_text", "b"], writes={"a": int}),
            Node("second", reads=["a"], writes={"b": int}),
        ]

    with pytest.raises(UsageError, match=r"a cycle first -> second -> first|a cycle second -> first -> second"):
        DataFlow(nodes()).graph()
    # the weights that the actor makes are those of the next step
    flow = DataFlow([Node("rollout"), Node("reward"), Node("actor")])
    flow.add_edge("actor", "rollout", next_step=True)
    assert "~> rollout: in the next step" in as_text(flow.graph())
    flow.add_edge("actor", "rollout")
    with pytest.raises(UsageError, match="a cycle"):
        flow.graph()


def test_missing_and_doubly_written_columns_and_strangers_are_named() -> None:
    with pytest.raises(UsageError, match=r"node a reads: got 'nothing'"):
        DataFlow([Node("a", reads=["nothing"], writes={"x": int})]).graph()
    with pytest.raises(UsageError, match="column x: got two writers, a and b"):
        DataFlow([Node(name, reads=["prompt_text"], writes={"x": int}) for name in ("a", "b")]).graph()
    with pytest.raises(UsageError, match="no node 'ghost'"):
        DataFlow([Node("rollout")], [("rollout", "ghost")]).graph()
    with pytest.raises(UsageError, match="two of the name 'a'"):
        DataFlow([Node("a"), Node("a")])
    with pytest.raises(UsageError, match="node a keeps by"):
        DataFlow([Node("a", reads=["prompt_text"], writes={"x": int}, keep="y")]).graph()
    a = Node("rollout")
    with pytest.raises(UsageError, match=r"expected a.output, b.input"):
        DataFlow([a]).connect(a.input, a.output)


def test_a_column_that_nobody_reads_is_told() -> None:
    flow = DataFlow([Node("a", reads=["prompt_text"], writes={"noted": str})])
    assert "noted" in flow.graph().unread
    assert "read by no node: noted" in as_text(flow.graph())


def test_a_model_that_is_named_is_not_built(tmp_path: Path) -> None:
    # a name that could not be built shows that nothing was tried
    model = load_hf_model(str(tmp_path / "no-such-model"), device_map="auto")
    flow = DataFlow([Node("a", reads=["prompt_text"], writes={"x": str}, model=model)])
    flow.graph()
    assert not model.built
    with pytest.raises(UsageError):
        model.chat("hello")


def test_a_flow_called_as_a_reward_function_gives_only_what_the_function_names() -> None:
    flow = DataFlow([Node("reward", forward_fn=lambda completions: [float(len(one)) for one in completions])])
    assert flow(prompts=["p"], completions=["four"], other=[1]) == [4.0]
