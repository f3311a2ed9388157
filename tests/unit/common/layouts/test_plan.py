"""Plans against a brute force over elements, for layouts drawn at random."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmq.common.errors import UsageError
from rlmq.common.layouts.build import even, flat_boxes, replicated, sharded, stages
from rlmq.common.layouts.layout import Box, Layout, MeshShape
from rlmq.common.layouts.plan import Plan, lower_bound, plan
from rlmq.common.layouts.zero_redundancy import Grouping, generation_layout
from rlmq.common.weights import TensorSpec

Element = tuple[str, tuple[int, ...]]
ITEM = 4


def elements(name: str, box: Box) -> set[Element]:
    return {(name, place) for place in product(*map(range, box.start, box.stop))}


def held(layout: Layout) -> dict[int, set[Element]]:
    """Rank -> every element that it holds."""
    found: dict[int, set[Element]] = {}
    for rank in layout.ranks:
        found[rank] = set(chain.from_iterable(elements(name, box) for name, box in layout.boxes(rank)))
    return found


def run(made: Plan) -> tuple[dict[int, set[Element]], dict[int, int], int]:
    """Carry the moves out over elements: what ranks hold at the end, elements sent by rank, elements moved."""
    have: dict[int, set[Element]] = defaultdict(set, held(made.source))
    original = held(made.source)
    sent: dict[int, int] = defaultdict(int)
    moved = 0
    for move in made.moves:
        part = elements(move.name, move.box)
        assert part <= have[move.sender], "a rank sends what it does not have"
        assert move.hop > 0 or part <= original[move.sender]
        assert not part & have[move.receiver], "an element arrives where it is"
        have[move.receiver] |= part
        sent[move.sender] += len(part)
        moved += len(part)
    return have, sent, moved


def optimum(source: Layout, target: Layout) -> float:
    """The least largest number of elements that a holder sends, when only holders send: by Hall's condition the
    maximum, over sets of ranks, of the demand that only they can serve by the size of the set."""
    have = held(source)
    demand: dict[frozenset[int], int] = defaultdict(int)
    for rank, wanted in held(target).items():
        for element in wanted - have.get(rank, set()):
            demand[frozenset(r for r, own in have.items() if element in own)] += 1
    ranks = source.ranks
    sets = chain.from_iterable(combinations(ranks, size) for size in range(1, len(ranks) + 1))
    return max((sum(n for who, n in demand.items() if who <= set(some)) / len(some) for some in sets), default=0.0)


@st.composite
def layouts(draw: st.DrawFn, specs: list[TensorSpec], ranks: list[int], *, covers: bool) -> Layout:
    """Per tensor one of: replicated on some ranks, uneven slices of a dimension, flat shards, with extra copies."""
    holding: dict[str, dict[int, tuple[Box, ...]]] = {}
    for spec in specs:
        some = draw(st.lists(st.sampled_from(ranks), min_size=1, max_size=len(ranks), unique=True))
        kind = draw(st.sampled_from(["whole", "cut", "flat"]))
        by_rank: dict[int, tuple[Box, ...]] = {}
        if kind == "whole":
            by_rank = dict.fromkeys(some, (Box.whole(spec.shape),))
        else:
            dim = draw(st.integers(0, 1))
            size = spec.shape[dim] if kind == "cut" else spec.shape[0] * spec.shape[1]
            inner = draw(st.lists(st.integers(0, size), min_size=len(some) - 1, max_size=len(some) - 1))
            places = [0, *sorted(inner), size]
            for rank, low, high in zip(some, places, places[1:], strict=False):
                start, stop = [0, 0], list(spec.shape)
                start[dim], stop[dim] = low, high
                box = Box(tuple(start), tuple(stop))
                boxes = (box,) if kind == "cut" else flat_boxes(spec.shape, low, high)
                if all(one.count for one in boxes) and boxes:
                    by_rank[rank] = boxes
        if not covers and draw(st.booleans()):
            by_rank.pop(some[0], None)
        if covers and draw(st.booleans()):  # a copy beside the shards: boxes that overlap others
            by_rank[draw(st.sampled_from(ranks))] = (Box.whole(spec.shape),)
        holding[spec.name] = by_rank
    return Layout({spec.name: spec for spec in specs}, holding)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    specs = [TensorSpec(n, (draw(st.integers(1, 12)), draw(st.integers(1, 12))), "F32") for n in names]
    first = draw(st.integers(0, 5))  # 0: the same ranks, 5: others
    source = draw(layouts(specs, list(range(5)), covers=True))
    return source, draw(layouts(specs, list(range(first, first + 5)), covers=False))


@settings(max_examples=150, deadline=None)
@given(pairs())
def test_any_two_layouts(pair: tuple[Layout, Layout]) -> None:
    source, target = pair
    made = plan(source, target)
    have, sent, moved = run(made)

    original = held(source)
    missing = 0
    for rank, wanted in held(target).items():
        assert wanted <= have[rank]
        assert have[rank] <= wanted | original.get(rank, set()), "more arrives than is wanted"
        missing += len(wanted - original.get(rank, set()))
    assert moved * ITEM == made.bytes == lower_bound(source, target) == missing * ITEM
    # one slice of the longest dimension is never cut: at most 12 elements a set of holders
    best = optimum(source, target)
    assert max(sent.values(), default=0) <= 1.25 * best + 12
    assert plan(source, target).moves == made.moves


def layers(count: int, mesh: MeshShape, *, kv_rows: int = 12, tied: bool = True) -> Layout:
    """A small decoder: uneven and fused cuts are `test_build`'s; norms replicated, embeddings on both ends."""
    tp = mesh.tp
    specs = [TensorSpec("embed", (40, 8), "BF16")]
    cuts = {"embed": even(0, 40, tp)}
    on = {"embed": [0, mesh.pp - 1] if tied else [0]}
    for stage, (low, high) in enumerate(stages(count, mesh.pp)):
        for layer in range(low, high):
            for name, shape, dim in (
                ("q", (24, 8), 0),
                ("k", (kv_rows, 8), 0),
                ("o", (8, 24), 1),
                ("norm", (8,), None),
            ):
                specs.append(TensorSpec(f"{layer}.{name}", shape, "BF16"))
                on[f"{layer}.{name}"] = [stage]
                if dim is not None:
                    cuts[f"{layer}.{name}"] = even(dim, shape[dim], tp)
    return sharded(specs, mesh, cuts, on)


@pytest.mark.parametrize(
    ("p", "t", "d", "p_g", "t_g"),
    [(1, 4, 2, 1, 2), (2, 4, 1, 1, 2), (4, 2, 1, 2, 1), (1, 3, 2, 1, 1), (2, 2, 2, 2, 2)],
)
def test_zero_redundancy_meets_the_bound_on_a_model_that_is_not_uniform(
    p: int, t: int, d: int, p_g: int, t_g: int
) -> None:
    training = layers(5, MeshShape(p, t, d), kv_rows=12)
    target = generation_layout(training, Grouping(MeshShape(p, t, d), p_g, t_g))
    made = plan(training, target)
    have, _, moved = run(made)

    assert moved * 2 == lower_bound(training, target)
    for rank, wanted in held(target).items():
        assert wanted == have[rank], "a rank keeps more than its generation shard"


def test_copies_for_many_receivers_go_along_a_chain() -> None:
    specs = [TensorSpec(str(i), (64, 64), "F32") for i in range(6)]
    source, target = replicated(specs, [0]), replicated(specs, range(1, 9))
    made = plan(source, target)
    have, sent, moved = run(made)

    model = 6 * 64 * 64
    assert moved == 8 * model
    assert all(have[rank] == have[0] for rank in range(1, 9))
    assert max(sent.values()) == model, "the holder sends each byte once"


def test_two_plans_of_the_same_layouts_are_the_same_whatever_the_order_of_ranks_in_them() -> None:
    training = layers(4, MeshShape(2, 2, 2))
    turned = Layout(
        training.tensors, {name: dict(reversed(by.items())) for name, by in training.held.items()}, training.aliases
    )
    target = replicated(training.tensors.values(), range(8))

    assert plan(training, target).moves == plan(turned, target).moves


def test_a_plan_for_70b_on_128_ranks_is_small() -> None:
    names = [("q", (64, 64)), ("k", (8, 64)), ("v", (8, 64)), ("o", (64, 64))]
    names += [
        ("gate", (224, 64)),
        ("up", (224, 64)),
        ("down", (224, 64)),
        ("n1", (64,)),
        ("n2", (64,)),
        ("bias", (64,)),
    ]
    mesh = MeshShape(8, 8, 2)
    specs, cuts, on = [], {}, {}
    for stage, (low, high) in enumerate(stages(80, 8)):
        for layer in range(low, high):
            for name, shape in names:
                specs.append(TensorSpec(f"{layer}.{name}", shape, "BF16"))
                on[specs[-1].name] = [stage]
                if len(shape) > 1:
                    cuts[specs[-1].name] = even(0, shape[0], 8)
    training = sharded(specs, mesh, cuts, on)
    target = generation_layout(training, Grouping(mesh, 1, 8))
    made = plan(training, target)

    assert made.bytes == lower_bound(training, target)
    assert len(made.moves) <= 128 * 700 * 1.1, "boxes are cut only to balance"
    assert max(made.sent_bytes.values()) <= 1.25 * made.bytes / 128


def test_a_tied_name_is_served_by_the_tensor_that_it_is() -> None:
    embed = TensorSpec("embed", (6, 4), "F32")
    source = replicated([embed], [0], aliases={"head": "embed"})
    target = replicated([TensorSpec("head", (6, 4), "F32")], [1])

    assert [move.name for move in plan(source, target).moves] == ["head"]
    assert lower_bound(source, target) == 6 * 4 * 4


def test_what_cannot_be_brought_is_refused() -> None:
    spec = TensorSpec("w", (4, 4), "F32")
    half = Layout({"w": spec}, {"w": {0: (Box((0, 0), (2, 4)),)}})

    with pytest.raises(UsageError, match=r"tensor w.*8 of 16"):
        plan(half, replicated([spec], [1]))
    with pytest.raises(UsageError, match=r"tensor w.*F32 \[4, 4\].*BF16 \[4, 4\]"):
        plan(replicated([spec], [0]), replicated([TensorSpec("w", (4, 4), "BF16")], [1]))
    with pytest.raises(UsageError, match=r"tensor v.*no such tensor"):
        plan(replicated([spec], [0]), replicated([TensorSpec("v", (4, 4), "F32")], [1]))
    with pytest.raises(UsageError, match="rank 1 twice"):
        replicated([spec], [0, 1, 1])
    with pytest.raises(UsageError, match="2 units of 8"):
        even(0, 16, 4, unit=8, of="KV heads")
    with pytest.raises(UsageError, match="pp 4 for 3 layers"):
        stages(3, 4)
    with pytest.raises(UsageError, match="generation layout"):
        Grouping(MeshShape(1, 4, 1), 1, 3)
