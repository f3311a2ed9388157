"""Log-probs and entropy of tokens: their gradients are those of plain float64 autograd."""

from __future__ import annotations

import pytest
import torch

from rlmq.common.engines import token_logprobs as module


@pytest.mark.timeout(60)
@pytest.mark.parametrize("parts", [(1.0, 0.0), (0.0, 1.0), (1.0, -0.3)])
@pytest.mark.parametrize("piece_values", [1 << 20, 14])
def test_gradients_are_autograds(
    parts: tuple[float, float], piece_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE_VALUES", piece_values)
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 7, generator=draw).mul(2).requires_grad_()
    source, tokens = torch.tensor([4, 0, 0, 2]), torch.tensor([6, 1, 1, 3])
    weights = torch.randn(2, 4, generator=draw)

    logprobs, entropy = module.token_logprobs(logits, source, tokens, 0.7)
    terms = [
        share * (weight * one).sum() for share, weight, one in zip(parts, weights, (logprobs, entropy), strict=True)
    ]
    sum(term for term, share in zip(terms, parts, strict=True) if share).backward()  # type: ignore[union-attr]

    plain = logits.detach().double().requires_grad_()
    every = torch.log_softmax(plain[source] / 0.7, dim=-1)
    chosen = every.gather(1, tokens[:, None])[:, 0]
    expected_entropy = -(every.exp() * every).sum(dim=-1)
    (parts[0] * (weights[0] * chosen).sum() + parts[1] * (weights[1] * expected_entropy).sum()).backward()
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=0, check_dtype=False)
    assert logits.grad is not None and plain.grad is not None
    torch.testing.assert_close(logits.grad.double(), plain.grad, atol=1e-6, rtol=1e-5)
