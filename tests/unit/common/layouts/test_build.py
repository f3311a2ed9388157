"""Layouts by rule: against torch, numpy and the engine; closed forms of the strategies; deltas."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rlmq.common.engines.decoder_shape import DecoderShape, generation_places, places_of_mesh
from rlmq.common.layouts.build import Cut, even, flat_boxes, flat_sharded, fused, of_dtensors, sharded, stages
from rlmq.common.layouts.delta import apply, encode
from rlmq.common.layouts.layout import Box, Layout, MeshShape
from rlmq.common.layouts.zero_redundancy import STRATEGIES, Grouping, closed_form, generation_layout, switch_plan
from rlmq.common.weights import TensorSpec


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_boxes_of_a_flat_interval_are_its_elements_once(shape: list[int], data: st.DataObject) -> None:
    numbers = np.arange(prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, numbers.size))
    stop = data.draw(st.integers(start, numbers.size))

    boxes = flat_boxes(tuple(shape), start, stop)

    found = [n for box in boxes for n in numbers[tuple(map(slice, box.start, box.stop))].reshape(-1).tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape)


def test_a_fused_tensor_has_a_part_of_each_of_its_tensors() -> None:
    heads, kv = even(0, 8, 2, unit=2), Cut(0, (((0, 2),), ((0, 2),)))  # one KV head, which both ranks hold
    qkv = fused([heads, kv, kv], [8, 2, 2])
    layout = sharded([TensorSpec("qkv", (12, 3), "F32")], MeshShape(tp=2), {"qkv": qkv})

    assert layout.held["qkv"][1] == (Box((4, 0), (8, 3)), Box((8, 0), (10, 3)), Box((10, 0), (12, 3)))


@pytest.fixture
def four_ranks() -> object:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
def test_a_model_of_dtensors_lies_where_torch_puts_it() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    flat, square = DeviceMesh("cpu", list(range(4))), DeviceMesh("cpu", [[0, 1], [2, 3]])
    whole = torch.arange(5 * 6).reshape(5, 6)
    layout = of_dtensors(
        [
            ("rows", distribute_tensor(whole, flat, [Shard(0)])),
            ("both", distribute_tensor(whole, square, [Shard(1), Shard(0)])),
            ("copies", distribute_tensor(whole, square, [Replicate(), Shard(1)])),
            ("plain", whole),
        ],
        range(4),
    )

    chunks = {
        "rows": dict(enumerate(whole.chunk(4))),
        "both": {
            2 * i + j: part for i, half in enumerate(whole.chunk(2, 1)) for j, part in enumerate(half.chunk(2))
        },
        "copies": {2 * i + j: part for i in range(2) for j, part in enumerate(whole.chunk(2, 1))},
        "plain": dict.fromkeys(range(4), whole),
    }
    for name, parts in chunks.items():
        assert layout.held[name].keys() == parts.keys()
        for rank, part in parts.items():
            [box] = layout.held[name][rank]
            assert torch.equal(whole[tuple(map(slice, box.start, box.stop))], part)
    assert (
        layout.held["rows"] == flat_sharded([TensorSpec("rows", (5, 6), "I64")], range(4), rule="rows").held["rows"]
    )


SHAPES = [
    DecoderShape(48, 12, 24, 4, 12, 4, 1, 1e-5, True, frozenset(), False),
    DecoderShape(50, 12, 26, 5, 9, 3, 1, 1e-5, False, frozenset({"q", "k", "v"}), True),  # nothing divides
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("p", "t", "d", "p_g", "t_g"), [(1, 4, 2, 1, 2), (2, 4, 1, 1, 2), (4, 2, 1, 2, 2)])
def test_what_a_micro_dp_group_holds_is_the_engines_generation_shard(
    shape: DecoderShape, p: int, t: int, d: int, p_g: int, t_g: int
) -> None:
    mesh = MeshShape(p, t, d)
    grouping = Grouping(mesh, p_g, t_g)
    training = shape.layout(places_of_mesh(mesh), "F32")

    assert generation_layout(training, grouping).held == shape.layout(generation_places(grouping), "F32").held


def uniform(mesh: MeshShape) -> Layout:
    on = {
        f"{layer}.{part}": [s]
        for s, (a, b) in enumerate(stages(8, mesh.pp))
        for layer in range(a, b)
        for part in "xy"
    }
    cuts = {name: even("xy".index(name[-1]), 64, mesh.tp) for name in on}
    return sharded([TensorSpec(name, (64, 64), "BF16") for name in on], mesh, cuts, on)


@pytest.mark.parametrize(
    ("p", "t", "d", "p_g", "t_g", "ratio_to_v"),
    [
        (1, 4, 2, 1, 2, 1 / 3),
        (1, 8, 1, 1, 2, 3 / 7),
        (1, 8, 1, 1, 4, 1 / 7),
        (4, 8, 1, 1, 8, 3 / 31),
        (1, 4, 2, 1, 4, 0),
    ],
)
def test_a_uniform_model_moves_what_the_closed_forms_say(
    p: int, t: int, d: int, p_g: int, t_g: int, ratio_to_v: float
) -> None:
    grouping = Grouping(MeshShape(p, t, d), p_g, t_g)
    training = uniform(grouping.training)
    model = sum(spec.bytes for spec in training.tensors.values())
    received = {}
    for strategy in STRATEGIES:
        made = switch_plan(strategy, training, grouping)
        received[strategy] = max(made.received_bytes.values(), default=0)
        assert received[strategy] == model * closed_form(strategy, grouping).received
        assert max(made.sent_bytes.values(), default=0) <= 1.25 * received[strategy]
        held = max(sum(box.count for _, box in made.target.boxes(rank)) * 2 for rank in made.target.ranks)
        assert held == model * closed_form(strategy, grouping).peak
    assert received["zero_redundancy"] == pytest.approx(ratio_to_v * received["tp_pp_gather"])


def test_groups_are_those_of_the_papers_example() -> None:
    grouping = Grouping(MeshShape(1, 4, 2), 1, 2)
    assert grouping.tp_groups == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grouping.micro_dp_groups == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert Grouping(MeshShape(2, 4, 1), 1, 2).micro_dp_groups == [[0, 1, 4, 5], [2, 3, 6, 7]]


@given(st.integers(1, 3000), st.sampled_from([np.uint8, np.uint16, np.uint32]), st.floats(0, 1), st.integers(0, 99))
def test_a_delta_brings_any_array_to_any_other(size: int, dtype: type, share: float, seed: int) -> None:
    draw = np.random.default_rng(seed)
    old = draw.integers(0, 200, size).astype(dtype)
    new = np.where(draw.random(size) < share, old + 1, old).astype(dtype)
    blob, changed = encode(new, old)
    content = old.copy()

    used = apply(np.concatenate([blob, np.zeros(5, np.uint8)]), content, "t")

    assert used == blob.size and blob.size % 8 == 0
    assert (content == new).all()
    assert changed == int((new != old).sum())
    assert blob.size <= 32 + 7 + changed * (1 + np.dtype(dtype).itemsize) + size // 255
