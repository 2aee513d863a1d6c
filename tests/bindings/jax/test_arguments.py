# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments, closed groups, and what is not supported: an exception with a sentence."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from base import refused
from conftest import (
    DEVICE, EXPERTS, HIDDEN, SECONDS, TOKENS, TOP_K, make_mesh, moe, parameters, specs, tokens
)  # fmt: skip
from jax._src.dispatch import runtime_tokens
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import libep.jax
from libep import EpError


def indices(devices):
    return jnp.tile(jnp.arange(TOP_K, dtype=jnp.int32), (devices * TOKENS, 1))


def on_mesh(mesh, body, **options):
    """A program of body on each device of a mesh."""
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), **options))


def round_trip(ep, mesh):
    """A program: every token goes to experts 0, 1, 2 and comes back."""

    def body(x, idx):
        rows, _, plan = ep.dispatch(x, idx)
        return ep.combine(rows, plan)

    return on_mesh(mesh, body)


# ---- bootstrap ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text, fields", [
    (r"RANGE expected one of the mesh's axes \('ep',\), got 'expert'", {"axis": "expert"}),
    ("RANGE expected a multiple of the 2 devices along 'ep', got 7", {"num_experts": 7}),
    (r"TOP_K top_k: expected 1 \.\. 32, got 33", {"top_k": 33}),
    ("ROW_BYTES hidden: .* multiple of 16 .*, got 3 of float32: 12", {"hidden": 3}),
    ("ROW_BYTES hidden: expected rows of .* up to 65536, got", {"hidden": 2**40}),
    ("TYPE dtype: expected float32 or bfloat16 or float16, got int8", {"dtype": jnp.int8}),
    ("TYPE dtype: expected float32 or .*, got float64", {"dtype": np.float64}),
    ("TYPE dtype: expected float32 or .*, got 'wide'", {"dtype": "wide"}),
    ("TYPE num_experts: expected an integer, got True", {"num_experts": True}),
    ("TYPE num_experts: expected an integer, got '8'", {"num_experts": "8"}),
    ("TYPE max_recv_rows: expected an integer, got 8.0", {"max_recv_rows": 8.0}),
    ("ALIGNMENT alignment", {"alignment": 3}),
    ("TYPE axis: expected an axis of the mesh or a tuple .*, got None", {"axis": None}),
    ("UNSUPPORTED max_recv_rows: expected a number of rows, got 0", {"max_recv_rows": 0}),
    ("UNSUPPORTED backend: expected none, since .* mesh", {"backend": libep.Backend.HOST}),
    ("UNSUPPORTED device: expected none, since it follows from mesh, got 0", {"device": 0}),
    ("UNSUPPORTED max_row_bytes: expected none, since .* hidden", {"max_row_bytes": 64}),
    ("UNSUPPORTED mode: expected Mode.THROUGHPUT, got", {"mode": libep.Mode.LATENCY}),
    ("UNSUPPORTED mode: .*THROUGHPUT, got Mode.LATENCY", {"mode": "latency"}),
    ("UNSUPPORTED mode: .*THROUGHPUT, got Mode.AUTO", {"mode": "auto"}),
    ("RANGE mode: expected one of auto, .*, got 'fast'", {"mode": "fast"}),
    ("UNSUPPORTED layout: expected none, since libep.jax sets it, got", {"layout": "flat"}),
    ("TYPE mesh: expected a jax.sharding.Mesh, got", {"mesh": None}),
    ("TYPE mesh: expected a jax.sharding.Mesh, got", {"mesh": "abstract"}),
    ("TypeError max_tokenz", {"max_tokenz": 3}),
])  # fmt: skip
def test_bootstrap(bootstrap, text, fields):
    mesh = make_mesh(2)
    given = {"mesh": mesh, **fields}
    if given["mesh"] == "abstract":
        given["mesh"] = mesh.abstract_mesh
    with refused(text):
        bootstrap(**given)
    bootstrap(mesh)  # nothing was left behind


# ---- operations --------------------------------------------------------------------------------

@pytest.mark.parametrize("text, rows, weights", [
    (r"SHAPE expert_out: expected shape \[72, any\], got \[5, 16\]",
     ((5, HIDDEN), "float32"), None),
    ("TYPE expert_out: expected float32", ((72, HIDDEN), "int32"), None),
    (r"SHAPE recv_weights: expected shape \[72\]", ((72, HIDDEN), "float32"), ((5,), "float32")),
    ("TYPE recv_weights: expected float32", ((72, HIDDEN), "float32"), ((72,), "float16")),
])  # fmt: skip
def test_combine(bootstrap, text, rows, weights):
    mesh = make_mesh(2)
    ep = bootstrap(mesh)
    assert ep.max_recv_rows == 72

    def body(x, idx):
        _, _, plan = ep.dispatch(x, idx)
        return ep.combine(jnp.zeros(*rows), plan, weights and jnp.zeros(*weights))

    with refused(text):
        on_mesh(mesh, body)(tokens(1, 2), indices(2))


@pytest.mark.parametrize("text, bias", [
    (r"SHAPE combine: bias: expected shape \[12, 16\], got \[2, 16\]", jnp.zeros((2, HIDDEN))),
    ("TYPE combine: bias: expected float32, got bfloat16", jnp.zeros((12, HIDDEN), "bfloat16")),
    ("TYPE combine: bias: expected an array, got int", 3),
    ("SHAPE combine: bias: expected up to 2 arrays, got 3", [jnp.zeros((1, HIDDEN))] * 3),
])  # fmt: skip
def test_bias(bootstrap, text, bias):
    mesh = make_mesh(2)
    ep = bootstrap(mesh)

    def body(x, idx):
        rows, _, plan = ep.dispatch(x, idx)
        return ep.combine(rows, plan, bias=bias)

    with refused(text):
        on_mesh(mesh, body)(tokens(1, 2), indices(2))


def test_another_shard_map(bootstrap):
    ep = bootstrap(make_mesh(2))
    other = make_mesh(2, names=("other",))
    call = lambda x, idx: ep.dispatch(x, idx)[0]  # noqa: E731
    with refused(r"EpError dispatch: expected a call inside shard_map over .*'other'"):
        jax.shard_map(call, mesh=other, in_specs=P("other"), out_specs=P("other"))(
            tokens(1, 2), indices(2)
        )
    with refused("EpError expected 2 devices along .*, got 4"):
        jax.shard_map(call, mesh=make_mesh(4), in_specs=P("ep"), out_specs=P("ep"))(
            tokens(1, 4), indices(4)
        )


def test_arguments_that_are_no_arrays(bootstrap):
    ep = bootstrap(make_mesh(2))
    x, idx = tokens(1, 2), indices(2)
    with refused("EpError dispatch: expected arrays, got int"):
        ep.dispatch(x, idx.tolist())
    with refused("EpError dispatch: topk_idx: expected an array, got NoneType"):
        ep.dispatch(x, None)
    rows, _, plan = ep.dispatch(x, idx)
    for name, call in {
        "combine": lambda: ep.combine(rows, plan.bytes),
        "experts": lambda: ep.experts(lambda *a: a[0], rows, plan.bytes, (), ()),
    }.items():
        with refused(rf"EpError {name}: plan: expected the Plan of .*, got uint8\["):
            call()


@pytest.mark.parametrize("devices", [[2, 3], [1, 0], [0, 2]])
def test_another_mesh(bootstrap, devices):
    """Other devices, or the same in another order, are refused before the program runs."""
    make_mesh(4)  # or skip
    mesh = make_mesh(2)
    ep = bootstrap(mesh)
    other, x = Mesh(np.array(jax.devices())[devices], ("ep",)), tokens(1, 2)
    sentence = "prepare: expected a shard_map whose .*, got devices " + re.escape(str(devices))
    with refused(f"FOREIGN {sentence}"):
        round_trip(ep, other)(x, indices(2))
    with jax.set_mesh(other), pytest.raises(EpError, match=sentence):
        round_trip(ep, None)(x, indices(2))
    np.testing.assert_array_equal(round_trip(ep, mesh)(x, indices(2)), TOP_K * x)


def test_a_mesh_of_the_same_groups(bootstrap):
    """Other axes of a mesh may be others: the devices along the group's axis count."""
    one = make_mesh(2, 2, names=("data", "ep"))
    ep = bootstrap(one)
    turned = Mesh(one.devices[::-1], ("pipe", "ep"))
    program = jax.shard_map(
        lambda x, idx: ep.dispatch(x, idx)[0],
        mesh=turned,
        in_specs=P(("pipe", "ep")),
        out_specs=P(("pipe", "ep")),
    )
    assert jax.jit(program)(tokens(1, 4), indices(4)).shape == (4 * ep.max_recv_rows, HIDDEN)
    crossed = Mesh(np.stack([one.devices[0], one.devices[1, ::-1]]), ("data", "ep"))
    with refused(r"EpError got devices \[3, 2\]"):
        round_trip(ep, crossed)(tokens(1, 2), indices(2))


@pytest.mark.skipif(DEVICE != "cpu", reason="places of GPUs are not compared")
@pytest.mark.parametrize(
    "devices, sentence",
    [([1, 0], r"place \d in shard_map, as in"), ([2, 3], "a device of group")],
)
def test_another_mesh_that_is_abstract(bootstrap, devices, sentence):
    """A shard_map over an AbstractMesh has no devices before it runs."""
    mesh = make_mesh(2)
    ep = bootstrap(mesh)
    program, x = round_trip(ep, mesh.abstract_mesh), tokens(1, 2)
    split = NamedSharding(mesh, P("ep"))
    y = program(jax.device_put(x, split), jax.device_put(indices(2), split))
    np.testing.assert_array_equal(y, TOP_K * x)
    split = NamedSharding(Mesh(np.array(jax.devices())[devices], ("ep",)), P("ep"))
    with pytest.raises(JaxRuntimeError, match=f"expected .*{sentence}.*EP_ERR_FOREIGN"):
        jax.block_until_ready(program(jax.device_put(x, split), jax.device_put(indices(2), split)))


@pytest.mark.skipif(DEVICE != "cpu", reason="places of GPUs are not compared")
def test_set_mesh_of_a_compiled_program(bootstrap):
    """JAX lowers a program once for all meshes of jax.set_mesh that have the same axes."""
    mesh, x = make_mesh(2), tokens(1, 2)
    program = round_trip(bootstrap(mesh), None)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(program(x, indices(2)), TOP_K * x)
    with jax.set_mesh(Mesh(mesh.devices[::-1], ("ep",))):
        with pytest.raises(JaxRuntimeError, match="expected place .*EP_ERR_FOREIGN"):
            jax.block_until_ready(program(x, indices(2)))


def test_a_plan_that_is_none(bootstrap):
    mesh = make_mesh(2)
    ep = bootstrap(mesh)

    def body(x, idx):
        rows, _, plan = ep.dispatch(x, idx)
        plan = jax.tree.map(jnp.zeros_like, plan)
        return ep.combine(rows, plan)

    # On GPUs a program ends as usual, and the status of the group says that its results are void.
    sentence = "EP_ERR_NOT_PREPARED|given up|expected a plan, which ep_prepare writes"
    with pytest.raises((JaxRuntimeError, EpError), match=sentence):
        jax.block_until_ready(
            on_mesh(mesh, body)(
                tokens(1, 2), indices(2)
            )
        )
        ep.check()


def test_routing_errors(bootstrap):
    mesh = make_mesh(2)
    ep = bootstrap(mesh)
    idx = indices(2).at[5, 1].set(EXPERTS)
    y = round_trip(ep, mesh)(tokens(1, 2), idx).block_until_ready()
    np.testing.assert_array_equal(y[5], 2 * tokens(1, 2)[5])  # the entry counts as "no expert"
    with refused("ROUTING token 5"):
        ep.check()
    ep.check()


def test_routing_errors_of_several_ranks(bootstrap):
    """One check reports all ranks, so that a later one is not about this step."""
    mesh = make_mesh(2)
    ep = bootstrap(mesh)
    idx = indices(2).at[5, 1].set(EXPERTS).at[TOKENS + 7, 0].set(EXPERTS)
    round_trip(ep, mesh)(tokens(1, 2), idx).block_until_ready()
    places = [rf"group \d+, device {d.id} \(ep={r}\): rank {r}" for r, d in enumerate(mesh.devices)]
    sentence = f"{places[0]}: .*token 5.*; {places[1]}: .*token 7"
    with refused(f"ROUTING {sentence}"):
        ep.check()
    ep.check()


def test_what_is_not_supported(bootstrap):
    mesh = make_mesh(2)
    ep = bootstrap(mesh)
    params, x = parameters(1), tokens(1, 2)

    def layer(x):
        return moe(ep, params, x)

    def forward_mode(x):
        return jax.jvp(layer, (x,), (x,))[1]

    def mapped(x):
        return jax.vmap(layer)(jnp.stack([x, x]))[0]

    params = jax.tree.map(lambda a, spec: a[: a.shape[0] // 2] if spec else a, params, specs())
    for body, error, sentence in [
        (forward_mode, EpError, "expected reverse mode"),
        (mapped, NotImplementedError, "Batching rule for 'ep_prepare' not implemented"),
    ]:
        with pytest.raises(error, match=sentence):
            on_mesh(mesh, body)(x)


# ---- the end of a group ------------------------------------------------------------------------


def test_closed(bootstrap):
    """Arrays outlive the group; programs that call it get an error."""
    mesh = make_mesh(2)
    ep = bootstrap(mesh)
    program, x = round_trip(ep, mesh), tokens(1, 2)
    y = program(x, indices(2)).block_until_ready()
    ep.close()
    ep.close()
    np.testing.assert_array_equal(y, TOP_K * x)
    with pytest.raises(JaxRuntimeError, match=r"rank \d: prepare: the group is closed"):
        program(x, indices(2)).block_until_ready()
    with refused("EpError closed"):
        ep.check()


holds_programs = pytest.mark.skipif(DEVICE != "cpu", reason="calls of GPUs are only enqueued")


def held_program(ep, mesh):
    """A program whose rank 0 waits in the middle. Returns what runs it, and two events."""
    begun, go = threading.Event(), threading.Event()

    def hold(rank, rows):
        begun.set()
        if rank == 0:
            go.wait(15)
        return rows

    def body(x, idx):
        rows, _, plan = ep.dispatch(x, idx)
        rows = jax.pure_callback(hold, rows, jax.lax.axis_index("ep"), rows)
        return ep.combine(rows, plan)

    program = on_mesh(mesh, body, check_vma=False)
    return program, begun, go


@holds_programs
def test_closed_while_a_program_runs(bootstrap):
    """close waits for what has been enqueued."""
    mesh, x = make_mesh(2), tokens(1, 2)
    ep = bootstrap(mesh)
    program, _, go = held_program(ep, mesh)
    with ep:
        y = program(x, indices(2))
        threading.Timer(3, go.set).start()
    assert y.is_ready()
    np.testing.assert_array_equal(y, TOP_K * x)


@holds_programs
@pytest.mark.parametrize("leaves_by_error", [True, False])
def test_closed_while_a_rank_is_missing(bootstrap, leaves_by_error):
    """One rank is late, the other waits for it in libep: the wait ends."""
    mesh = make_mesh(2)
    ep = bootstrap(mesh, timeout_seconds=SECONDS if leaves_by_error else 2)
    program, begun, go = held_program(ep, mesh)
    y = program(tokens(1, 2), indices(2))
    assert begun.wait(15)
    time.sleep(0.5)
    start = time.monotonic()
    threading.Timer(4, go.set).start()
    if leaves_by_error:
        with pytest.raises(ZeroDivisionError), ep:
            raise ZeroDivisionError
    else:
        ep.close()
    assert time.monotonic() - start < 10
    with pytest.raises(JaxRuntimeError, match="closed" if leaves_by_error else "rank"):
        y.block_until_ready()
    runtime_tokens.clear()  # else JAX reports the callback's failed program when the process ends


@holds_programs
def test_a_callback_that_fails_on_one_device(bootstrap):
    """The other device, which waits for it, does not wait until the deadline."""
    mesh, x = make_mesh(2), tokens(1, 2)
    ep, other = bootstrap(mesh), bootstrap(mesh)

    def fail(rank, rows):
        if rank == 1:
            raise ValueError("no such rows")
        return rows

    def body(x, idx):
        rows, _, plan = ep.dispatch(x, idx)
        rows = jax.pure_callback(fail, rows, jax.lax.axis_index("ep"), rows)
        return ep.combine(rows, plan)

    program = on_mesh(mesh, body, check_vma=False)
    start = time.monotonic()
    with pytest.raises(JaxRuntimeError, match="no such rows"):
        program(x, indices(2)).block_until_ready()
    assert time.monotonic() - start < SECONDS / 2
    sentence = r"a program failed on group \d+, device 1 \(ep=1\): .*no such rows"
    with refused(f"ABORTED {sentence}"):
        ep.check()
    np.testing.assert_array_equal(round_trip(other, mesh)(x, indices(2)), TOP_K * x)
    runtime_tokens.clear()  # else JAX reports the callback's failed program when the process ends


@pytest.mark.skipif(DEVICE != "cpu", reason="GPUs report a bad plan later")
def test_fresh_after_a_failure(bootstrap):
    """A program that failed takes its group with it, and no other. Nobody need ask."""
    mesh, x = make_mesh(2), tokens(1, 2)
    ep, other = bootstrap(mesh), bootstrap(mesh)
    plan_of = on_mesh(mesh, lambda x, idx: ep.dispatch(x, idx)[2])
    plan = jax.tree.map(jnp.zeros_like, plan_of(x, indices(2)))
    failing = on_mesh(mesh, ep.combine)
    with pytest.raises(JaxRuntimeError, match="combine.*: plan"):
        jax.block_until_ready(failing(jnp.zeros((2 * ep.max_recv_rows, HIDDEN)), plan))
    np.testing.assert_array_equal(round_trip(other, mesh)(x, indices(2)), TOP_K * x)


def test_copies(bootstrap):
    """A copy of a model that holds an Ep shares it; none is saved."""
    mesh, x = make_mesh(2), tokens(1, 2)
    ep = bootstrap(mesh)
    assert copy.deepcopy({"ep": ep})["ep"] is ep and copy.copy(ep) is ep
    with pytest.raises(TypeError, match="Ep belongs to its process: .* call bootstrap anew"):
        pickle.dumps(ep)
    np.testing.assert_array_equal(round_trip(ep, mesh)(x, indices(2)), TOP_K * x)


def test_import_alone():
    """`import libep` brings no JAX."""
    code = "import sys, libep; assert 'jax' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert libep.jax.bootstrap
