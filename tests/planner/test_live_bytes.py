"""Counting living bytes and operations: worked by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from flowgrpo_rc.planner import live_bytes
from flowgrpo_rc.planner.live_bytes import LiveBytes


def test_a_storage_counts_once_and_as_long_as_it_is_alive():
    weights = torch.ones(1000)
    with LiveBytes([weights]) as live:
        first = torch.zeros(100)  # 400 bytes
        view = first[10:].view(9, 10).t()  # of the same storage
        assert live.live == 400
        second = torch.ones(50, dtype=torch.float64)  # 400 more
        assert live.live == 800
        del first
        assert live.live == 800
        del view
        assert live.live == 400
        changed = weights.mul_(2)  # not counted: it was there
        assert (live.live, live.peak) == (400, 800)
        del second, changed
    assert (live.live, live.peak) == (0, 800)


def test_each_stretch_has_its_own_peak():
    with LiveBytes() as live:
        kept = torch.zeros(10)
        live.enter("a")
        del kept
        live.enter("b")
        _ = torch.zeros(5)
        live.enter("b")
        _ = torch.zeros(1)
    assert [(s.label, s.peak) for s in live.stretches] == [(None, 40), ("a", 40), ("b", 24)]


def test_operations_of_products():
    """A product (m, k) x (k, n) is 2 m k n."""
    layer = nn.Linear(7, 11, bias=False)
    with LiveBytes(layer.parameters()) as live:
        layer(torch.ones(3, 7, requires_grad=True)).sum().backward()
    assert live.stretches[0].flops == 3 * (2 * 3 * 7 * 11)  # forward, gradient of the input, gradient of the weight
    assert live.stretches[0].recorded_flops == 2 * 3 * 7 * 11


def as_in_torch_2_11(count):
    """torch's own count, of shapes with equally many heads alone."""

    def counted(*shapes):
        assert len({shape[1] for shape in shapes}) == 1
        return count(*shapes)

    return counted


@pytest.mark.parametrize("shared", [4, 2])
def test_operations_of_attention(monkeypatch, shared):
    """Two products of S x S x D for each head of the query, and five backward, if heads share keys or not."""
    for name in ("sdpa_flop_count", "sdpa_backward_flop_count"):
        monkeypatch.setattr(live_bytes, name, as_in_torch_2_11(getattr(live_bytes, name)))
    q = torch.ones(2, 4, 16, 8, requires_grad=True)
    k, v = torch.ones(2, 2, shared, 16, 8, requires_grad=True).unbind()
    one = 2 * 2 * 4 * 16 * 16 * 8
    with LiveBytes() as live:
        out = F.scaled_dot_product_attention(q, k, v, torch.ones(16, 16, dtype=torch.bool), enable_gqa=True)
        assert live.stretches[0].flops == 2 * one
        live.enter("backward")
        out.sum().backward()
    assert live.stretches[1].flops == 5 * one


def test_recomputed_operations_are_told_from_the_backward():
    layer = nn.Linear(8, 8, bias=False)
    x = torch.ones(4, 8, requires_grad=True)
    with LiveBytes() as live:
        out = checkpoint(lambda x: layer(layer(x)), x, use_reentrant=False)
        live.enter("backward")
        out.sum().backward()
    product = 2 * 4 * 8 * 8
    assert live.stretches[0].flops == 2 * product
    assert live.stretches[1].recorded_flops in (product, 2 * product)  # whether the last one is run again or not
    assert live.stretches[1].flops - live.stretches[1].recorded_flops == 4 * product
