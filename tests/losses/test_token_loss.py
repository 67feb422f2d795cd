"""The token loss is torch's cross entropy, value and gradient, in the dtype and memory that it promises."""

import pytest
import torch
import torch.nn.functional as F

from meshpar import token_loss
from meshpar.losses import token_loss as module

VOCAB = 37


@pytest.fixture(params=[2, 1 << 20], ids=["a few rows at a time", "all at once"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_rows", lambda logits: request.param)


def batch(dtype: torch.dtype, ignored: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(3, 5, VOCAB, generator=generator) * 8).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (3, 5), generator=generator)
    return logits, labels.masked_fill_(torch.rand(3, 5, generator=generator) < ignored, -100)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)])
def test_it_is_torchs_value_and_gradient(rows: None, dtype: torch.dtype, exact: float, reduction: str) -> None:
    logits, labels = batch(dtype)
    loss = token_loss(logits, labels, reduction=reduction)
    (loss * 3.0).backward()
    double = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(double.flatten(0, 1), labels.flatten(), reduction=reduction)
    (expected * 3.0).backward()
    assert loss.dtype == torch.float32 and logits.grad is not None and logits.grad.dtype == dtype
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(logits.grad.double(), double.grad, rtol=exact, atol=exact * 1e-3)
    assert torch.equal(logits.grad[labels == -100], torch.zeros_like(logits.grad[labels == -100]))


@pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_z_loss_is_the_squared_denominator_of_what_counts(rows: None, dtype: torch.dtype, exact: float) -> None:
    logits, labels = batch(dtype)
    (loss := token_loss(logits, labels, reduction="sum", z_loss=0.01)).backward()
    double = logits.detach().double().requires_grad_()
    squares = double.logsumexp(-1).square()[labels != -100].sum()
    expected = F.cross_entropy(double.flatten(0, 1), labels.flatten(), reduction="sum") + 0.01 * squares
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0.0)
    assert logits.grad is not None and double.grad is not None
    assert float((logits.grad - double.grad).abs().max()) <= exact * float(double.grad.abs().max())


def test_a_small_z_loss_is_not_rounded_away_where_a_probability_is_near_to_one(rows: None) -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 0] = 30.0
    token_loss(logits.requires_grad_(), torch.zeros(4, dtype=torch.long), reduction="sum", z_loss=1e-8).backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[:, 0], torch.full((4,), 2e-8 * 30.0), rtol=1e-4, atol=0.0)


def test_the_value_is_finite_whatever_does_not_count(rows: None) -> None:
    logits, labels = batch(torch.float32)
    with torch.no_grad():
        logits[labels == -100] = float("nan")
    assert bool(token_loss(logits, labels, reduction="sum").isfinite())
    none = torch.full_like(labels, -100)
    assert float(token_loss(logits.detach(), none, reduction="sum")) == 0.0
    assert bool(token_loss(logits.detach(), none).isnan())
    other = torch.where(none == -100, -1, none)
    assert float(token_loss(logits.detach(), other, ignore_index=-1, reduction="sum")) == 0.0


def test_large_logits_do_not_overflow_and_minus_infinity_is_no_chance(rows: None) -> None:
    logits, labels = torch.full((1, 2, VOCAB), -1e4), torch.tensor([[3, 4]])
    logits[..., 3], logits[..., 5:] = 3e4, float("-inf")
    logits.requires_grad_()
    loss = token_loss(logits, labels, reduction="sum")
    loss.backward()
    expected = F.cross_entropy(logits.detach().flatten(0, 1).double(), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss.double(), expected)
    assert logits.grad is not None and bool(logits.grad.isfinite().all())


@pytest.mark.parametrize("label", [VOCAB, -1])
def test_a_label_outside_of_the_vocabulary_is_an_error(label: int) -> None:
    logits, labels = batch(torch.float32)
    labels[0, 0] = label
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        token_loss(logits, labels)


def test_beside_the_logits_there_is_only_their_gradient() -> None:
    """What torch's own allocator counts: in bfloat16 two bytes a logit for the gradient, and a few rows in float32."""
    logits = torch.randn(1024, 4096, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, 4096, (1024,))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        token_loss(logits, labels).backward()
    now = most = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    assert logits.nbytes <= most < 1.4 * logits.nbytes
