# SPDX-License-Identifier: Apache-2.0
"""Groups over several processes, the example, and the programs of docs/jax.md."""

import os
import signal
import time

import processes
import pytest
from base import DEVICE, TREE
from conftest import FLAGS
from processes import finish, finish_all, free_port, spawn
from programs import programs

HERE = os.path.dirname(os.path.abspath(__file__))
SECONDS = 300

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="starts CPU devices of its own")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.setattr(processes, "PRELOADED", ["jax", "jax.numpy"])
    monkeypatch.setenv("XLA_FLAGS", FLAGS)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)


def run(*arguments):
    """Run Python, and return the lines that it printed."""
    status, out, err = finish(spawn(*arguments), SECONDS)
    assert status == 0 and "libep" not in err, err
    return out.splitlines()


def start_two(arguments):
    """Start two processes of Python. arguments(address, number): the address is where they meet."""
    address = f"127.0.0.1:{free_port()}"
    return [spawn(*arguments(address, str(number))) for number in range(2)]


@pytest.mark.parametrize("devices, topology", [(1, ""), (2, ""), (2, "2")])
def test_processes(devices, topology, monkeypatch):
    """Of one node, or of two."""
    monkeypatch.setenv("LIBEP_TOPOLOGY", topology)
    monkeypatch.setenv("LIBEP_INTERFACE", "lo")
    program = os.path.join(HERE, "process.py")
    started = start_two(lambda address, number: [program, address, "2", number, str(devices)])
    results = finish_all(started, SECONDS)
    assert [status for status, *_ in results] == [0, 0], results
    # The line before may be that of a library which JAX uses.
    assert [out.splitlines()[-1] for _, out, _ in results] == [
        f"process {n}: {devices} of {2 * devices} devices" for n in range(2)
    ]


WAITING = """
import os, signal, sys, time
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, numpy as np, libep.jax
from jax.sharding import PartitionSpec as P

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells may start tests without one
number = int(sys.argv[2])
jax.distributed.initialize(sys.argv[1], 2, number)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ep",))
ep = libep.jax.bootstrap(mesh, "ep", num_experts=2, max_tokens=4, hidden=8, top_k=1)
if number == 1:
    time.sleep(60)  # it never comes
body = lambda: ep.dispatch(jnp.ones((4, 8)), jnp.zeros((4, 1), jnp.int32))[0]
program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=P("ep")))
print("waiting", flush=True)
try:
    jax.block_until_ready(program())
finally:
    print("ended", flush=True)
    os._exit(0)  # without a word to the other process, which sleeps
"""


def test_ctrl_c_in_a_wait():
    """A process that waits for another one in a program ends within seconds after SIGINT."""
    first, second = start_two(lambda *where: ["-c", WAITING, *where])
    try:
        assert first.stdout.readline() == "waiting\n"
        time.sleep(3)  # until it waits
        begin = time.monotonic()
        first.send_signal(signal.SIGINT)
        assert first.stdout.readline() == "ended\n"
        assert time.monotonic() - begin < 5
    finally:
        for process in first, second:
            process.kill()
            process.communicate()


FORKS = """
import multiprocessing, os
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, libep.jax
mesh = jax.sharding.Mesh(jax.devices(), ("ep",))
ep = libep.jax.bootstrap(mesh, "ep", num_experts=2, max_tokens=4, hidden=8, top_k=1)
rows = lambda: ep.dispatch(jnp.ones((8, 8)), jnp.zeros((8, 1), jnp.int32))[0]
child = multiprocessing.get_context("fork").Process(target=ep.close)
child.start()
child.join(200)
child.kill()
print(child.exitcode, int(rows().sum()))
"""


def test_fork():
    """A child leaves the groups alone, and ends."""
    assert run("-c", FORKS) == ["0 64"]


@pytest.mark.parametrize("program, options", [
    ("moe_jax.py", ["2"]), ("moe_mesh_jax.py", []),
    ("moe_mesh_jax.py", ["fsdp=2,expert=2", "--fp8"]),
])  # fmt: skip
def test_examples(program, options):
    lines = run(os.path.join(TREE, "bindings/jax/examples", program), *options)
    losses = [float(line.split()[-1]) for line in lines]
    assert len(losses) >= 4 and losses[-1] < 0.8 * losses[0]


def test_docs():
    found = [text for text in programs("docs/jax.md") if text.startswith("import ")]
    assert found
    for program in found:
        assert run("-c", program)[-1] == "every token came back"
