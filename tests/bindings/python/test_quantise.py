# SPDX-License-Identifier: Apache-2.0
"""Group.quantise_rows, whose bytes the tests of libep.torch and libep.jax compare; and NVFP4."""

from base import refused
import libep
import numpy as np
import pytest
from libep import Backend, Quant, ScaleOrder, Type


@pytest.fixture
def group():
    (bootstrap,) = libep.Bootstrap.local(1)
    fields = dict(num_experts=2, max_tokens=4, max_top_k=1, max_row_bytes=128, alignment=128)
    with libep.Group(bootstrap, backend=Backend.HOST, **fields) as made:
        yield made


def test_nvfp4_of_dispatch(group):
    """The numbers of runtime/quant.c's tests: with the largest at 6 and a global scale of 1."""
    rows, idx = np.zeros((1, 32), np.float32), np.zeros((1, 1), np.int32)
    rows[0, :4], rows[0, 16:18] = (6, -3, 5, 2.5), (np.nan, np.inf)
    out, scales = np.zeros((128, 16), np.uint8), np.full((128, 4), 9, np.uint8)
    fields = dict(quant=Quant.NVFP4, scale_order=ScaleOrder.SWIZZLED, max_recv_rows=128)
    handle = libep.Handle(group, **fields)
    handle.prepare(idx)
    outputs = dict(recv_tokens=out, recv_scales=scales)
    with refused("NULL extras.global_scale"):
        handle.dispatch(rows, **outputs)
    with refused("RANGE extras.global_scale: expected a number from 2\\^-64 to 2\\^64, got nan"):
        given = libep.Extras(global_scale=np.full(1, np.nan, np.float32))
        handle.dispatch(rows, extras=given, **outputs)
    assert (scales == 9).all()
    handle.dispatch(rows, extras=libep.Extras(global_scale=np.ones(1, np.float32)), **outputs)
    assert out[0, :2].tolist() == [0xD7, 0x46] and out[0, 8] == 0x77
    assert scales[0].tolist() == [0x38, 0, 0, 0]


def test_rows_that_are_not_there(group):
    rows = np.ones((256, 128), np.float32)
    out, scales = np.full((256, 128), 9, np.uint8), np.full((256, 1), 9, np.float32)
    count = np.array([130], np.int32)
    group.quantise_rows(rows, count, out=libep.tensor(out, Type.FP8_E4M3), scales=scales)
    assert (out[:130] != 9).all() and (out[130:] == 9).all() and (scales[130:] == 9).all()


def test_refusals(group):
    rows, out = np.zeros((128, 128), np.float32), np.zeros((128, 128), np.uint8)
    good = dict(out=libep.tensor(out, Type.FP8_E4M3), scales=np.zeros((128, 1), np.float32))
    for text, changed in [
        ("scales: expected size = 1 in dimension 1, got 128", dict(scales=rows + 0)),
        ("form.quant: expected an EpQuant other than", dict(quant=Quant.NONE)),
        ("out: expected fp8_e4m3, got uint8", dict(out=out)),
    ]:
        with refused(f"EpError {text}"):
            group.quantise_rows(rows, **{**good, **changed})
