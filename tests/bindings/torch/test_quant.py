# SPDX-License-Identifier: Apache-2.0
"""Rows that dispatch quantises, against the formulas of ep.h."""

import pytest
import torch
from base import refused
from conftest import on_ranks

import libep.torch as ep
from libep import Blocks, Mode, Quant, ScaleOrder

HIDDEN, TOKENS = 400, 9  # 400: the last block is not full
E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
orders = pytest.mark.parametrize("order", [ScaleOrder.BY_ROW, ScaleOrder.BY_COLUMN])


def quantise(x, quant):
    """(values, scales) of rows [T, H], as ep.h defines them; scales as float32."""
    block = 32 if quant == Quant.MXFP8 else 128
    count = -(-x.shape[1] // block)
    padded = torch.nn.functional.pad(x.float(), (0, count * block - x.shape[1]))
    blocks = padded.view(len(x), count, block)
    amax = blocks.abs().amax(-1).clamp(min=2.0**-100)
    # Not 448 / amax, for which PyTorch rounds twice: 1 / amax, times 448.
    scale, inverse = amax / 448, torch.full_like(amax, 448) / amax
    if quant != Quant.FP8:
        mantissa, exponent = torch.frexp(scale)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
        inverse = 1 / scale
    values = (blocks * inverse[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values.flatten(1)[:, : x.shape[1]], scale


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def quantise_fp4(x, factor):
    """(bytes, scales) of rows [T, H] with the global scale `factor`; scales as uint8."""
    factor = torch.tensor(factor)
    blocks = x.float().view(len(x), -1, 16)
    amax = blocks.abs().amax(-1).clamp(min=2.0**-100)
    scale = (factor * (amax * torch.tensor(1 / 6))).clamp(max=448).to(torch.float8_e4m3fn)
    step = scale.float() * (1 / factor)
    scaled = blocks * torch.where(step == 0, step, 1 / step)[..., None]
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    above = scaled.abs()[..., None] - middles
    codes = ((above > 0) | ((above == 0) & (torch.arange(7) % 2 == 1))).sum(-1)
    codes = (codes | (torch.signbit(scaled) * 8)).to(torch.uint8).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale.view(torch.uint8)


def by_row(tiles, rows, count):
    """Scales [rows, count] of swizzled ones [rows / 128, count / 4 tiles]."""
    tiles = tiles.view(-1, tiles.shape[-1] // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1, tiles.shape[-2] * 4)[:rows, :count]


def as_float(scales):
    """Scales as float32 on the CPU, whatever their type."""
    if scales.dtype == torch.float32:
        return scales.cpu()
    return torch.ldexp(torch.ones(scales.shape), scales.view(torch.uint8).cpu().int() - 127)


def assert_same_bytes(values, expected):
    assert torch.equal(values.cpu().view(torch.uint8), expected.view(torch.uint8))


SIZES = dict(num_experts=4, max_tokens=TOKENS, hidden=HIDDEN, max_recv_rows=32)


@orders
@pytest.mark.parametrize("quant", [Quant.FP8, Quant.FP8_UE8M0, Quant.MXFP8, Quant.FP8_POW2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@on_ranks(max_scale_bytes=64, **SIZES)
def test_rows_and_scales(group, seed, quant, order, dtype):
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed + group.rank))
    x = (x * torch.logspace(-8, 8, TOKENS, base=2)[:, None]).to(dtype)
    idx = torch.full((TOKENS, 2), 2 * group.rank)  # experts of this rank alone
    idx[:, 1] += 1
    handle = ep.Handle(group, quant=quant, scale_order=order)
    received = ep.dispatch(handle, x.to(group.device), idx.to(group.device))
    assert received.tokens.dtype == torch.float8_e4m3fn
    is_float = quant in (Quant.FP8, Quant.FP8_POW2)
    assert received.scales.dtype == (torch.float32 if is_float else E8M0)
    scales = as_float(received.scales)
    if order == ScaleOrder.BY_COLUMN:
        scales = scales.t()
    values, expected = quantise(x, quant)
    for rows in slice(TOKENS), slice(TOKENS, 2 * TOKENS):
        assert torch.equal(scales[rows], expected)
        assert_same_bytes(received.tokens[rows], values)


@pytest.mark.parametrize("order", [ScaleOrder.BY_ROW, ScaleOrder.SWIZZLED])
@pytest.mark.parametrize("mode", [Mode.THROUGHPUT, Mode.LATENCY])
@on_ranks(num_experts=2, max_tokens=9, hidden=416, max_recv_rows=128, alignment=128, latency_sets=1)
def test_nvfp4(group, seed, mode, order):
    """H = 416: 26 scales, so the last word of four is not full."""
    x = torch.randn(TOKENS, 416, generator=torch.Generator().manual_seed(seed))
    factor = 2688 / x.abs().max()
    idx = torch.tensor([[group.rank, -1]] * TOKENS, device=group.device)
    handle = ep.Handle(group, quant=Quant.NVFP4, scale_order=order, mode=mode)
    given, scale = (x.to(group.device), idx), factor.reshape(1).to(group.device)
    received = ep.dispatch(handle, *given, global_scale=scale)
    if mode == Mode.LATENCY:
        received, hook = ep.dispatch_send(handle, *given, global_scale=scale)
        hook()
    values, scales = quantise_fp4(x, float(factor))
    assert torch.equal(received.tokens[:TOKENS].cpu(), values)
    got = received.scales.cpu()
    if order == ScaleOrder.SWIZZLED:
        assert got.shape == (128, 28) and not by_row(got, TOKENS, 28)[:, 26:].any()
        got = by_row(got, TOKENS, 26)
    assert torch.equal(got[:TOKENS], scales)
    decoded = E2M1[(values[:, :8] & 7).int()] * scales[:, :1].view(torch.float8_e4m3fn).float()
    assert torch.allclose(decoded / factor, x[:, :16:2].abs(), atol=x.abs().max() / 5)
    for text, wrong in [
        ("NULL global_scale: expected one", None),
        ("TypeError global_scale", scale.double()),
        ("SHAPE one number = 1", scale.repeat(2)),
    ]:
        with refused(text):
            ep.dispatch(handle, *given, global_scale=wrong)


@orders
@pytest.mark.parametrize("quant", [Quant.FP8, Quant.MXFP8])
@on_ranks(**SIZES)
def test_gradients(group, seed, quant, order):
    """Gradients of a combine travel as e4m3; the op gives both parts of them."""
    torch.manual_seed(seed + group.rank)
    x, grad_out = torch.randn(2, TOKENS, HIDDEN).to(group.device)
    idx = torch.full((TOKENS, 2), 2 * group.rank, device=group.device)
    idx[:, 1] += 1
    handle = ep.Handle(group, grad_quant=quant, scale_order=order)
    received = ep.dispatch(handle, x, idx, torch.ones(TOKENS, 2, device=group.device))
    rows = received.tokens.detach().requires_grad_()
    ep.combine(handle, received.plan, rows, bias=x).backward(grad_out)
    values, scales = quantise(grad_out.cpu(), quant)
    each = scales.repeat_interleave(32 if quant == Quant.MXFP8 else 128, -1)[:, :HIDDEN]
    wanted = (values.float() * each).repeat(2, 1)
    assert torch.equal(rows.grad[: 2 * TOKENS].cpu(), wanted) and not rows.grad[2 * TOKENS :].any()
    with refused("UNSUPPORTED weights: expected None on a handle with a grad_quant"):
        ep.combine(handle, received.plan, rows, received.topk_weights)
    with refused("NULL since the handle's grad_quant is given"):
        plan, out = received.plan.bytes, values.new_empty(rows.shape).to(group.device)
        torch.ops.libep.combine_backward(handle.key, plan, grad_out, None, None, out, None)


def test_global_scale_of_another_format(alone):
    group = alone(hidden=128)
    x, one = torch.ones(2, 128, device=group.device), torch.ones(1, device=group.device)
    idx = torch.zeros(2, 1, dtype=torch.int64, device=group.device)
    with refused("UNSUPPORTED global_scale: expected None, since the handle's quant is FP8"):
        ep.dispatch(ep.Handle(group, quant=Quant.FP8), x, idx, global_scale=one)
    with refused("ROW_BYTES a multiple of 32 elements"):
        handle = ep.Handle(group, quant=Quant.NVFP4)
        ep.dispatch(handle, x[:, :48].contiguous(), idx, global_scale=one)


@orders
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("quant", [Quant.FP8, Quant.MXFP8])
def test_rows_between_experts(alone, seed, quant, transposed, order):
    group = alone(alignment=128)
    x = torch.randn(256, 144, generator=torch.Generator().manual_seed(seed))
    options = dict(quant=quant, transposed=transposed, scale_order=order)
    values, scales = ep.quantise_rows(group, x.to(group.device), **options)
    wanted, wanted_scales = quantise(x.t().contiguous() if transposed else x, quant)
    assert_same_bytes(values, wanted)
    got = as_float(scales)
    assert torch.equal(got.t() if order == ScaleOrder.BY_COLUMN else got, wanted_scales)


def test_tiles_between_experts(alone, seed):
    group = alone(alignment=128)
    x = torch.randn(2, 128, 200, generator=torch.Generator().manual_seed(seed))
    count = torch.tensor([128, 5], dtype=torch.int32, device=group.device)
    values, scales = ep.quantise_rows(group, x.to(group.device), count, blocks=Blocks.TILES)
    assert values.shape == x.shape and scales.shape == (2, 1, 2)
    x[1, 5:] = 0
    amax = torch.stack([x[..., :128].abs().amax((1, 2)), x[..., 128:].abs().amax((1, 2))], 1)
    assert torch.equal(scales.cpu(), (amax / 448)[:, None])


def test_rows_that_are_refused(alone):
    group, loose = alone(alignment=128), alone()
    x = torch.ones(128, 16, device=group.device)
    for text, meeting, given in [
        ("TypeError rows: expected a torch.Tensor, got .*list", group, dict(rows=x.tolist())),
        ("EpError rows: expected 2 or 3 dimensions, got 1", group, dict(rows=x[0])),
        ("UNSUPPORTED rows: .*without gradient", group, dict(rows=x.clone().requires_grad_())),
        ("TypeError num_rows: expected a torch.Tensor, got .*int", group, dict(num_rows=3)),
        ("TypeError quant: expected one of .*FP8.*, got .*NONE", group, dict(quant=Quant.NONE)),
        ("TypeError quant: expected one of .*FP8.*, got 'fp9'", group, dict(quant="fp9")),
        ("TypeError rows.*float64", group, dict(rows=x.double())),
        ("ALIGNMENT", loose, dict(transposed=True)),
    ]:
        with refused(text):
            ep.quantise_rows(meeting, **{"rows": x, **given})
    with torch.no_grad():
        ep.quantise_rows(group, x.clone().requires_grad_())


def test_no_gradient(alone):
    handle = ep.Handle(alone(hidden=128, max_scale_bytes=16), quant=Quant.FP8)
    x = torch.ones(2, 128, device=handle.device, requires_grad=True)
    idx = torch.tensor([[0, 1]] * 2, device=x.device)
    with refused("UNSUPPORTED without gradient"):
        ep.dispatch(handle, x, idx)
    received = ep.dispatch(handle, x.detach(), idx)
    assert received.scales.shape[1] == 1
    # The way for autograd functions of one's own: gradients travel as they are.
    grad, out = torch.ones(handle.capacity, 128, device=x.device), torch.zeros_like(x)
    with torch.no_grad():
        torch.ops.libep.dispatch_backward(handle.key, received.plan.bytes, grad, None, out, None)
    assert torch.equal(out, torch.full_like(x, 2))
