"""Layouts of engines that own their storage, against what their ranks hold by hand-made examples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlmq.common.engines.decoder_shape import EMBEDDING, HEAD, DecoderShape
from rlmq.common.engines.vllm_layout import vllm_layout, vllm_shards
from rlmq.common.errors import UsageError
from rlmq.common.layouts.build import flat_sharded, flat_views, replicated
from rlmq.common.layouts.layout import Box, MeshShape
from rlmq.common.layouts.plan import lower_bound, plan
from rlmq.common.weights import TensorSpec

TINY = DecoderShape(
    vocabulary=70,
    hidden=8,
    intermediate=12,
    layers=5,
    heads=4,
    kv_heads=2,
    head_dim=2,
    epsilon=1e-5,
    tied=True,
    biases=frozenset({"q", "k", "v"}),
    head_norms=False,
)


def whole() -> dict[str, torch.Tensor]:
    """Each element a number of its own."""
    found, at = {}, 0
    for one in TINY.tensors():
        count = int(np.prod(one.shape))
        found[one.name] = torch.arange(at, at + count, dtype=torch.float32).reshape(one.shape)
        at += count
    return found


def vllm_rank(tp: int, layer: int, rows: list[int]) -> dict[str, torch.Tensor]:
    """What one tensor rank of four has, put together by hand: q head `tp`, key head `tp // 2`, 3 rows of gate."""
    model, p = whole(), f"model.layers.{layer}"
    q, kv, mlp = slice(2 * tp, 2 * tp + 2), slice(tp // 2 * 2, tp // 2 * 2 + 2), slice(3 * tp, 3 * tp + 3)
    attention, feed = f"{p}.self_attn", f"{p}.mlp"
    own = {}
    for kind in ("weight", "bias"):
        q_, k_, v_ = (model[f"{attention}.{name}_proj.{kind}"] for name in "qkv")
        own[f"{attention}.qkv_proj.{kind}"] = torch.cat([q_[q], k_[kv], v_[kv]])
    gate, up = model[f"{feed}.gate_proj.weight"], model[f"{feed}.up_proj.weight"]
    own[f"{feed}.gate_up_proj.weight"] = torch.cat([gate[mlp], up[mlp]])
    own[f"{attention}.o_proj.weight"] = model[f"{attention}.o_proj.weight"][:, q].clone()
    own[f"{feed}.down_proj.weight"] = model[f"{feed}.down_proj.weight"][:, mlp].clone()
    for norm in ("input_layernorm", "post_attention_layernorm"):
        own[f"{p}.{norm}.weight"] = model[f"{p}.{norm}.weight"].clone()
    embedding = torch.zeros(32, 8)  # 70 rows, padded to 128, over 4 ranks
    embedding[: len(rows)] = model[EMBEDDING][rows]
    return own | {EMBEDDING: embedding}


ROWS = {0: range(32), 1: range(32, 64), 2: range(64, 70), 3: range(0)}


@pytest.mark.parametrize("tp", [0, 1, 2, 3])
def test_vllms_fused_tensors_and_padded_vocabulary_are_boxes_under_hugging_face_names(tp: int) -> None:
    # 5 layers over 3 stages are 2, 2 and 1: rank tp is on the first, which has layers 0 and 1
    layout = vllm_layout(TINY, MeshShape(pp=3, tp=4), "F32")
    named = vllm_rank(tp, 0, list(ROWS[tp])) | vllm_rank(tp, 1, list(ROWS[tp]))

    shards, model = vllm_shards(layout, tp, named), whole()

    held = {name for name, by in layout.held.items() if by.get(tp)}
    assert {name.split(".")[2] for name in held if "layers" in name} == {"0", "1"}
    assert (EMBEDDING in held, "model.norm.weight" in held) == (tp < 3, False)
    for name in held:
        (box,) = layout.held[name][tp]
        view = shards[name, box]
        assert torch.equal(view, model[name][tuple(map(slice, box.start, box.stop))]), name
    key = "model.layers.0.self_attn.k_proj.weight"
    assert layout.held[key][tp] == (Box((tp // 2 * 2, 0), (tp // 2 * 2 + 2, 8)),)
    shards[key, layout.held[key][tp][0]].zero_()  # what arrives there is in vLLM's own tensor
    assert not named["model.layers.0.self_attn.qkv_proj.weight"][2:4].any()


def test_stages_ends_and_numbers_are_vllms() -> None:
    layout = vllm_layout(TINY, MeshShape(pp=3, tp=2, dp=2), "F32", ranks=range(10, 22))

    def stages(name: str) -> set[int]:
        return {(rank - 10) // 2 % 3 for rank, boxes in layout.held[name].items() if boxes}

    assert [stages(f"model.layers.{n}.mlp.up_proj.weight") for n in range(5)] == [{0}, {0}, {1}, {1}, {2}]
    assert (stages(EMBEDDING), stages("model.norm.weight"), layout.aliases) == ({0, 2}, {2}, {HEAD: EMBEDDING})
    made = plan(replicated(layout.tensors.values(), [0]), layout)
    assert made.bytes == lower_bound(made.source, layout)
    with pytest.raises(UsageError, match="query heads: got 4 over 3"):
        vllm_layout(TINY, MeshShape(tp=3), "F32")


def test_zero_3_partitions_are_stretches_of_the_flattened_tensor() -> None:
    # 3 x 5 over 4 ranks: 4 elements each, the last one padded; a scalar and 2 elements over 4 ranks
    tensors = {"w": torch.arange(15.0).reshape(3, 5), "s": torch.tensor(7.0), "b": torch.tensor([1.0, 2.0])}
    specs = [TensorSpec(name, tuple(t.shape), "F32") for name, t in tensors.items()]
    layout = flat_sharded(specs, [0, 1, 2, 3], rule="elements")

    assert layout.held["w"] == {
        0: (Box((0, 0), (1, 4)),),
        1: (Box((0, 4), (1, 5)), Box((1, 0), (2, 3))),
        2: (Box((1, 3), (2, 5)), Box((2, 0), (3, 2))),
        3: (Box((2, 2), (3, 5)),),
    }
    for rank in range(4):
        flat = {}
        for name, tensor in tensors.items():
            each = -(-tensor.numel() // 4)
            padded = torch.zeros(4 * each)
            padded[: tensor.numel()] = tensor.reshape(-1)
            flat[name] = padded[rank * each : (rank + 1) * each]  # as DeepSpeed's ds_tensor
        shards = flat_views(layout, rank, flat)
        for name, by in layout.held.items():
            for box in by.get(rank, ()):
                assert torch.equal(shards[name, box], tensors[name][tuple(map(slice, box.start, box.stop))])
    shards[("w", Box((2, 2), (3, 5)))].zero_()
    assert flat["w"].tolist() == [0, 0, 0, 0]
    with pytest.raises(UsageError, match="partition of w on rank 3: got 2 elements, expected at least 3"):
        flat_views(layout, 3, flat | {"w": torch.zeros(2)})
