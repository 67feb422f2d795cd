"""The one measure of how far values of ranks are from one process, for tables, fuzzers and strangers."""

import torch
import torch.distributed as dist

from meshpar.testing import whole


def distance(want: torch.Tensor, have: torch.Tensor, floor: float = 0.0) -> float:
    """The largest difference relative to the largest expected value, at least ``floor``; no NaN is as expected."""
    want, have = want.double(), have.double()
    alike = want == have
    if alike.all():
        return 0.0
    scale = max(float(want.where(want.isfinite(), 0.0).abs().max()), floor, 1e-12)
    return float((want - have).abs().where(~alike, 0.0).nan_to_num(torch.inf, torch.inf).max()) / scale


def apart(name: str, want: torch.Tensor, have: torch.Tensor, tolerance: float, floor: float = 0.0) -> list[str]:
    """What is wrong with a tensor that may be off by ``tolerance`` of its largest value, by no bit where that is 0."""
    if want.shape != have.shape:
        return [f"{name}: shape {tuple(have.shape)}, expected {tuple(want.shape)}"]
    off = distance(want, have, floor)
    if not tolerance:
        return [] if torch.equal(in_bytes(want), in_bytes(have)) else [f"{name}: other bits, off by {off:.1e}"]
    return [] if off <= tolerance else [f"{name}: off by {off:.1e} of its largest value"]


def differing_bits(one, other):
    """The names of what differs by a bit; all are tensors, of the same names."""
    assert one.keys() == other.keys(), sorted(one.keys() ^ other.keys())
    return [name for name, value in one.items() if not torch.equal(in_bytes(value), in_bytes(other[name]))]


def in_bytes(value):
    """The bytes of a tensor, in which a zero has a sign, and NaN is equal to NaN."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def differences(expected, got, tolerance, floor):
    """Yield what differs by name, whose first word is the kind; ``floor`` is a part of the largest of a kind."""
    largest = {}
    for name, value in expected.items():
        kind = name.split()[0]
        largest[kind] = max(largest.get(kind, 0.0), float(value.double().abs().max()) if value.numel() else 0.0)
    for name in [*expected, *(set(got) - set(expected))]:
        none = torch.zeros_like(expected.get(name, got.get(name))) if name.startswith("gradient ") else None
        want, have = expected.get(name, none), got.get(name, none)
        if want is None or have is None:
            yield f"{name}: only {'got' if want is None else 'expected'}"
        else:
            yield from apart(name, want, have, tolerance, floor * largest.get(name.split()[0], 0.0))


def gradients(module):
    """The whole gradient of each parameter of a module, None where there is none. Collective."""
    return {
        name: None if parameter.grad is None else whole(parameter.grad) for name, parameter in module.named_parameters()
    }


def assert_gradients(module, alone, **tolerance):
    """The gradients of a module on ranks, of which a stage has a part, are those of one process."""
    have, want = gradients(module), gradients(alone)
    torch.testing.assert_close(have, {name: want[name] for name in have}, **tolerance)


def assert_weights(par, alone, **tolerance):
    """The whole state of a plan's module is that of one process."""
    torch.testing.assert_close(dict(par.state_dict(full=True, everywhere=True)), dict(alone.state_dict()), **tolerance)


def on_one_rank(compute):
    """What rank 0 computes, on every rank: the others leave the processor to it. Collective."""
    results = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(results)
    return results[0]
