# SPDX-License-Identifier: Apache-2.0
"""Meshes: axes, groups, shards and plans against loops over coordinates; groups made from them."""

import pickle

import numpy as np
import pytest
from base import refused, run_threads
from libep import AxisRole, Mesh, TensorKind
from processes import check, run

TEXT = "data=2,fsdp=3,expert=2"


# ---- axes and groups -----------------------------------------------------------------------------


def test_axes():
    mesh = Mesh("data=2,outer:expert=3,tensor=4,inner:expert=1")
    assert mesh.num_ranks == 24
    assert mesh.axes[1] == ("outer", 3, AxisRole.EXPERT)
    assert mesh.axes[2].role is AxisRole.OTHER
    assert mesh.role_axes(AxisRole.EXPERT) == ("outer", "inner")
    assert mesh.role_axes(AxisRole.FSDP) == ()
    assert repr(mesh) == "<libep.Mesh data:data=2,outer:expert=3,tensor:other=4,inner:expert=1>"
    many = Mesh(",".join(f"a{i}={1 + i % 2}" for i in range(16)))
    assert many.num_ranks == 256 and many.coordinates(255) == (0, 1) * 8
    assert many.group([f"a{i}" for i in range(16)], 7).place == 7


def test_groups():
    mesh = Mesh(TEXT)
    assert mesh.coordinates(9) == (1, 1, 1)
    assert mesh.group("expert", 9) == (1, (8, 9)) and mesh.group((), 9) == (0, (9,))
    assert mesh.group(("expert", "data"), 9) == (3, (2, 8, 3, 9))
    assert mesh.group("(fsdp,expert)", 1) == mesh.group(("fsdp", "expert"), 1) == (1, (*range(6),))
    made = Mesh("fsdp=2,expert=2", grid=[3, 1, 0, 2])
    for mesh in made, pickle.loads(pickle.dumps(made)):
        assert mesh.coordinates(0) == (1, 0) and mesh.group("expert", 3).ranks == (3, 1)


W1 = TensorKind.EXPERT_WEIGHT


@pytest.mark.parametrize("text, call", [
    ("RANGE data", lambda: Mesh("data")),
    ("SHAPE expected 2 ranks, got 1", lambda: Mesh("data=2", grid=[0])),
    ("RANGE grid", lambda: Mesh("data=2", grid=[0, 0])),
    ("RANGE tensor", lambda: Mesh(TEXT).group("tensor", 0)),
    ("RANGE data", lambda: Mesh(TEXT).group(("data", "data"), 0)),
    ("RANGE 12", lambda: Mesh(TEXT).coordinates(12)),
    ("NDIM expected 2", lambda: Mesh(TEXT).shard("fsdp,_", (3, 4, 5), 0)),
    ("SHAPE layers.3.w1", lambda: Mesh(TEXT).shard("fsdp,_", (4, 4), 0, "layers.3.w1")),
    ("UNSUPPORTED w1", lambda: Mesh(TEXT).sharding("(fsdp,expert),_", (6, 4), W1, "w1")),
])  # fmt: skip
def test_refused(text, call):
    with refused(text):
        call()


# ---- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", ["(fsdp,expert),data", (("fsdp", "expert"), "data"), [["fsdp", "expert"], ("data",)]]
)
def test_shards_cover_the_tensor(spec):
    mesh, whole = Mesh(TEXT), np.arange(12 * 4).reshape(12, 4)
    for rank in range(12):
        data, fsdp, expert = mesh.coordinates(rank)
        shard = mesh.shard(spec, whole.shape, rank)
        got = whole[tuple(slice(b, b + s) for b, s in zip(shard.begin, shard.shape))]
        expected = whole.reshape(3, 2, 2, 2, 2)[fsdp, expert, :, data]
        np.testing.assert_array_equal(got, expected)


def test_sharding():
    mesh = Mesh(TEXT)
    w1 = mesh.sharding(("expert", "fsdp", None), (8, 6, 5), W1, "w1")
    assert w1.stored == (4, 2, 5) and w1.used == (4, 6, 5)
    assert w1.gathered == ((), ("fsdp",), ()) and w1.kept == (("expert",), (), ())
    assert w1.scattered == ("fsdp",) and w1.summed == ("data",)
    assert set(w1.amax) == {"data", "fsdp", "expert"}
    assert set(w1.amax_per_expert) == {"data", "fsdp"}
    assert "gathered over fsdp (3)" in str(w1)
    dense = mesh.sharding("(fsdp,expert),_", (6, 5), TensorKind.WEIGHT)
    assert dense.used == (6, 5) and dense.scattered == ("fsdp", "expert")


# ---- groups --------------------------------------------------------------------------------------


def test_processes_of_a_mesh(tmp_path, nodes):
    """Over a store all groups of the mesh gather together."""
    source = """
mesh = libep.Mesh("fsdp=2,expert=2")
with bootstrap() as world, mesh.bootstrap(world, "expert") as own:
    with group(own) as g:
        layer = Handle(g)
        layer.prepare(idx)
        x = np.full((4, 4), rank + 1, np.float32)
        recv, out = np.zeros((layer.info().recv_rows, 4), np.float32), np.zeros_like(x)
        layer.dispatch(x, recv_tokens=recv)
        layer.combine(recv, out=out)
        assert (out == x).all() and sorted({*recv[:, 0]}) == [rank // 2 * 2 + 1, rank // 2 * 2 + 2]
        say(g.rank, g.size)
"""
    check(run(tmp_path, *[source] * 4), [f"{place} 2\n" for place in (0, 1, 0, 1)])


def test_different_meshes():
    def body(bootstrap):
        mesh = Mesh("fsdp=2" if bootstrap.rank else "expert=2")
        with refused("MISMATCH"):
            mesh.bootstrap(bootstrap, ())
        with Mesh("fsdp=2").bootstrap(bootstrap, "fsdp") as own:
            assert (own.rank, own.size) == (bootstrap.rank, 2)
            with refused("EpError bootstraps of a mesh"):
                bootstrap.close()

    run_threads(2, body)
