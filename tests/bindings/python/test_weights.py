# SPDX-License-Identifier: Apache-2.0
"""Sharded weights: gathered, reduced, quantised, and their magnitudes; ranks are threads."""

from __future__ import annotations

import numpy as np
import pytest
from base import refused, run_threads

import libep
from libep import AmaxScope, Blocks, Mesh, MeshComm, Quant, Type, Weight

SHAPE, SPEC = (4, 384, 160), "expert,fsdp,_"  # a block of 128 lies in two shards
MESH = "fsdp=2,expert=2"


def shard_of(mesh, whole, rank):
    found = mesh.shard(SPEC, SHAPE, rank)
    places = tuple(slice(b, b + n) for b, n in zip(found.begin, found.shape))
    return np.ascontiguousarray(whole[places])


def on_ranks(body):
    """body(comm, weight) on each rank of the mesh."""

    def play(bootstrap):
        with MeshComm(bootstrap, Mesh(MESH), backend=libep.Backend.HOST) as comm:
            result = body(comm, Weight(comm, "w1", SPEC, SHAPE, type=Type.FP32))
            comm.check()
            return result

    return run_threads(4, play)


def space(size):
    memory = np.zeros(size + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:size] if size else None


def test_gather_reduce_amax(seed):
    generator = np.random.default_rng(seed)
    whole = generator.integers(-9, 9, SHAPE).astype(np.float32)
    grads = generator.integers(-9, 9, (4, 2, *SHAPE[1:])).astype(np.float32)

    def body(comm, weight):
        mesh, sizes = comm.mesh, weight.sizes()
        full, shard = np.empty(sizes.shape, np.float32), shard_of(mesh, whole, comm.rank)
        weight.gather(None, shard, space(sizes.gather_workspace), out=full)
        expert = mesh.coordinates(comm.rank)[1]
        np.testing.assert_array_equal(full, whole[2 * expert : 2 * expert + 2])
        out = np.ones_like(shard)
        weight.reduce(grads[comm.rank], True, space(sizes.reduce_workspace), out=out)
        total = sum(grads[r] for r in range(4) if mesh.coordinates(r)[1] == expert)
        half = SHAPE[1] // 2 * mesh.coordinates(comm.rank)[0]
        np.testing.assert_array_equal(out, 1 + total[:, half : half + SHAPE[1] // 2])
        ours = np.abs(shard).max((1, 2))
        for scope, amax in ((AmaxScope.EXPERT, ours), (AmaxScope.TENSOR, ours.max(keepdims=True))):
            weight.amax(scope, amax=amax)
            of = full if scope == AmaxScope.EXPERT else whole[None]
            np.testing.assert_array_equal(amax, np.abs(of).max((1, 2) if len(of) == 2 else None))

    on_ranks(body)


@pytest.mark.parametrize("quant, blocks, transposed", [
    (Quant.FP8, Blocks.ROWS, True), (Quant.MXFP8, Blocks.ROWS, False),
    (Quant.FP8, Blocks.TILES, True),
])  # fmt: skip
def test_quantised(seed, quant, blocks, transposed):
    """The bytes and scales of the gathered weight, quantised."""
    whole = np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)

    def body(comm, weight):
        form = Weight.form(quant, blocks, transposed)
        sizes, shard = weight.sizes(form), shard_of(comm.mesh, whole, comm.rank)
        values = np.empty(sizes.shape, np.uint8)
        kind = np.float32 if sizes.scale_type == Type.FP32 else np.uint8
        scales = np.empty(sizes.scale_shape, kind)
        out = libep.tensor(values, Type.FP8_E4M3)
        weight.gather(form, shard, space(sizes.gather_workspace), out=out, scales=scales)
        return comm.mesh.coordinates(comm.rank)[1], values, scales

    def quantise(bootstrap):
        fields = dict(num_experts=2, max_tokens=1, max_top_k=1, max_row_bytes=16)
        with libep.Group(bootstrap, backend=libep.Backend.HOST, **fields) as group:
            for expert, values, scales in got:
                wanted = np.empty_like(values), np.empty_like(scales)
                out = libep.tensor(wanted[0], Type.FP8_E4M3)
                rows = whole[2 * expert : 2 * expert + 2]
                form = dict(quant=quant, blocks=blocks, transposed=transposed)
                group.quantise_rows(rows, out=out, scales=wanted[1], **form)
                np.testing.assert_array_equal(scales, wanted[1])
                np.testing.assert_array_equal(values, wanted[0])

    got = on_ranks(body)
    run_threads(1, quantise)


def test_refused():
    def body(comm, weight):
        with refused("UNSUPPORTED .*MXFP8.*|UNSUPPORTED .*blocks"):
            weight.sizes(Weight.form(Quant.MXFP8, Blocks.TILES))
        with refused("SHAPE .*amax"):
            weight.amax(AmaxScope.EXPERT, amax=np.zeros(3, np.float32))
        return weight, repr(weight)

    (weight, text), *_ = on_ranks(body)
    assert text.startswith("<libep.Weight w1: ")
    with refused("DESTROYED w1: the mesh_comm is closed"):
        weight.sizes()
