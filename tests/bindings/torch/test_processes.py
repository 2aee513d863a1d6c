# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes: process groups, disagreement, Ctrl-C, forks, and how processes end."""

import signal
import time

import pytest
import torch_processes
from conftest import DEVICE
from processes import check, finish, good
from torch_processes import run

GROUPS = """
initialize()
both = dist.new_group([1, 2])
with group() as g, group() as h:
    handles = ep.Handle(g), ep.Handle(h)
    y = layer(handles[1], layer(handles[0], x))
    y.sum().backward()
    assert torch.equal(y, x) and torch.equal(x.grad, torch.ones_like(x))
    say(g.rank, g.size, g.first_expert, g.num_local_experts, g.device.type)
if rank == 0:
    try:
        group(both)
    except TypeError as error:
        say(error)
else:
    with group(both, max_recv_rows=None) as g:
        y = layer(ep.Handle(g), x)
        y.sum().backward()
        assert torch.equal(y, x) and torch.equal(x.grad, 2 * torch.ones_like(x))
        say(g.rank, g.size)
dist.barrier()  # with rank 0 the others' store would end
dist.destroy_process_group()
"""


def test_process_groups(nodes):
    """The default process group, and two others; a rank outside is told so."""
    ends = ".*belongs to.*", "0 2\n", "1 2\n"
    expected = [f"{r} 3 {2 * r} 2 {DEVICE}\n{end}" for r, end in enumerate(ends)]
    check(run(GROUPS, GROUPS, GROUPS), expected)


# The keys of one process group are still in the store when the next one begins.
STORE = """
from datetime import timedelta
from torch.testing._internal.distributed import fake_pg  # ranks meet through libep alone
initialize()
ports = [None]
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
if rank == 0:
    ports = [store.port]
dist.broadcast_object_list(ports)
if rank:
    store = dist.TCPStore("127.0.0.1", ports[0], timeout=timedelta(seconds=60))
dist.destroy_process_group()
for turn in range(3):
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    for number in range(2):
        with group() as g:
            for k in range(turn + number):
                time.sleep(0.2 * rank)
                ep.ReceiveMemory(g, 4096 * (k + 1)).free()
            assert torch.equal(layer(ep.Handle(g), x), x)
    dist.destroy_process_group()
say("good")
"""
# Two layers in one program on each of two ranks, with another number of tokens on each, or none.
COMPILED = """
initialize()
def two(x, idx, weights):
    for handle in handles:
        received = ep.dispatch(handle, x, idx, weights)
        rows = torch.cat([received.tokens, received.tokens], 1)[:, 8:24].contiguous()
        x = ep.combine(handle, received.plan, rows, received.topk_weights)
    return x
with group(max_recv_rows=None) as g:
    handles = ep.Handle(g), ep.Handle(g)
    program = torch.compile(two, fullgraph=True, backend="aot_eager")
    for count in (4 - rank, 2 + rank, 4 * rank, 0):
        results = []
        for call in (two, program):
            data = [t[:count].detach().clone() for t in (x, idx, weights)]
            data[0].requires_grad_(), data[2].requires_grad_()
            y = call(*data)
            y.backward(torch.cos(torch.arange(y.numel(), device=device)).view_as(y))
            results.append((y.detach(), data[0].grad, data[2].grad))
        assert all(torch.equal(a, b) for a, b in zip(*results)), results
    say("equal")
"""
FORK = """
(boot,) = libep.Bootstrap.local(1)
g = group(boot)
handle = ep.Handle(g)
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forks while threads run
child = os.fork()
if child == 0:
    # PyTorch has no GPU in a child.
    tell(lambda: layer(handle, x) if device == "cpu" else ep.Handle(g))
    g.close()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
y = layer(handle, x)
assert torch.equal(y, x)
g.close()
"""
MISSING = """
initialize()
if rank == 0:
    tell(lambda: group(timeout_seconds=1))
dist.barrier()
"""
PROGRAMS = dict(
    store=([STORE, STORE], ["good\n", "good\n"]),
    compiled=([COMPILED, COMPILED], ["equal\n", "equal\n"]),
    fork=([FORK], ["DESTROYED .*forked.*"]),
    missing=([MISSING, MISSING], ["TIMEOUT .*rank 1 did not arrive within 1 s.*", ""]),
)  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    sources, expected = PROGRAMS[name]
    check(run(*sources), expected)


def test_end_with_everything_alive():
    """Handles, plans, receive memory with tensors, a pending phase, a graph of autograd."""
    source = """
initialize()
g = group(mode=libep.Mode.AUTO, max_recv_rows=None)
handle = ep.Handle(g, mode=libep.Mode.THROUGHPUT)
memory = ep.ReceiveMemory(g, 100000)
recv = memory.tensor((handle.capacity, 16), torch.float32)
received = ep.dispatch(handle, x, idx, weights, recv_tokens=recv)
y = ep.combine(handle, received.plan, received.tokens, received.topk_weights)
late = ep.Handle(g, layout=libep.Layout.BATCHED, rows_per_expert=16)
with torch.no_grad():
    pending = ep.dispatch_send(late, x, idx)
say("leaves", recv.shape[1], time.monotonic())
"""
    outs = [good(result).split() for result in run(source, source)]
    end = time.monotonic()
    for leaves, hidden, begin in outs:
        assert (leaves, hidden) == ("leaves", "16") and end - float(begin) < 12


def test_ctrl_c_in_backward():
    """Rank 0 waits in backward for rank 1, which has other things to do."""
    waits = """
initialize()
with group() as g:
    y = layer(ep.Handle(g), x)
    say("waits")
    try:
        y.sum().backward()
        while device == "cuda": time.sleep(0.01)
    except KeyboardInterrupt:
        say(time.monotonic())
        raise
"""
    sleeps = """
initialize()
with group() as g:
    y = layer(ep.Handle(g), x)
    sys.stdin.readline()
    try:
        y.sum().backward()
        while device == "cuda" and not g.status().status: time.sleep(0.01)
        if device == "cuda": raise EpError(g.status().status, g.status().sentence)
    except EpError as error:
        say(error.status.name, error)
"""
    first, second = torch_processes.start_all(waits, sleeps)
    assert first.stdout.readline() == "waits\n"
    time.sleep(0.3)
    begin = time.monotonic()
    first.send_signal(signal.SIGINT)
    assert float(first.stdout.readline()) - begin < 1
    second.stdin.write("\n")
    status, _, err = finish(first)
    assert status != 0 and "KeyboardInterrupt" in err
    check([finish(second)], ["(PEER|ABORTED).*(KeyboardInterrupt|Ctrl-C).*"])
