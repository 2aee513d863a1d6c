# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's released nccl.ep package as a client of libnccl_ep.so.0 on libep.

    LD_PRELOAD=build/emulated/libnccl_ep.so python client.py     two ranks on emulated GPUs
    LD_PRELOAD=build/libep/nccl_ep/lib/libnccl_ep.so.0 python client.py --gpus 4

Ranks are threads, since emulated GPUs belong to one process. The expected results come from a walk
over all ranks' inputs in numpy.
"""

import argparse
import ctypes
import os
import sys
import threading

import numpy as np

import nccl.ep as ep

EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, ALIGNMENT = 7, 3, 136, 37, 8
INT32, INT64, FLOAT32 = 2, 4, 7  # numbers of NCCL's data types
TYPES = {np.dtype(np.int32): INT32, np.dtype(np.int64): INT64, np.dtype(np.float32): FLOAT32}
NAMES = {ep.Layout.EXPERT_MAJOR: "expert-major", ep.Layout.RANK_MAJOR: "rank-major",
         ep.Layout.FLAT: "flat"}


class Emulated:
    """Memory and communicators of the emulated GPUs. Their memory is plain memory."""

    def __init__(self):
        self.library = ctypes.CDLL(None)
        self.library.emulated_communicator.restype = ctypes.c_void_p
        self.library.emulated_allocate.restype = ctypes.c_void_p

    def open(self, rank):
        """Called by the rank's thread before all else."""

    def communicator(self, rank, name):
        comm = self.library.emulated_communicator(RANKS, rank, name.encode())
        assert comm, "no communicator"
        return comm

    def destroy(self, comm):
        self.library.emulated_destroy(ctypes.c_void_p(comm))

    def synchronize(self):
        assert self.library.emulated_synchronize() == 0

    def array(self, values):
        """A device array with these values, as numpy sees it, and its tensor for nccl.ep."""
        values = np.ascontiguousarray(values)
        address = self.library.emulated_allocate(ctypes.c_size_t(max(values.nbytes, 1)))
        assert address, "no memory"
        buffer = (ctypes.c_char * max(values.nbytes, 1)).from_address(address)
        array = np.frombuffer(buffer, dtype=values.dtype, count=values.size).reshape(values.shape)
        array[...] = values
        return array, ep.Tensor(address, dtype=TYPES[values.dtype], shape=values.shape)


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


def open_library(name, package):
    """A shared library of the system, or else of NVIDIA's Python package."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        folder = __import__(package, fromlist=["__path__"]).__path__[0]
        return ctypes.CDLL(os.path.join(folder, "lib", name))


class Gpus:
    """Memory and communicators of real GPUs, one for each rank. An array is a copy of its device
    memory, made anew by synchronize()."""

    def __init__(self):
        self.cuda = open_library("libcudart.so.13", "nvidia.cu13")
        self.nccl = open_library("libnccl.so.2", "nvidia.nccl")
        self.local = threading.local()
        self.id = UniqueId()
        assert self.nccl.ncclGetUniqueId(ctypes.byref(self.id)) == 0

    def call(self, function, *args):
        error = getattr(self.cuda, function)(*args)
        assert error == 0, f"{function} returned {error}"

    def open(self, rank):
        self.call("cudaSetDevice", rank)
        self.local.arrays = []

    def communicator(self, rank, name):
        comm = ctypes.c_void_p()
        error = self.nccl.ncclCommInitRank(ctypes.byref(comm), RANKS, self.id, rank)
        assert error == 0, f"ncclCommInitRank returned {error}"
        return comm.value

    def destroy(self, comm):
        assert self.nccl.ncclCommDestroy(ctypes.c_void_p(comm)) == 0
        for _, address in self.local.arrays:
            self.call("cudaFree", address)

    def synchronize(self):
        self.call("cudaDeviceSynchronize")
        for array, address in self.local.arrays:
            self.copy(array.ctypes.data, address.value, array.nbytes)

    def copy(self, to, source, size):
        default = 4  # cudaMemcpyDefault
        self.call("cudaMemcpy", ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(size),
                  default)

    def array(self, values):
        array, address = np.array(values, order="C"), ctypes.c_void_p()
        self.call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(max(array.nbytes, 1)))
        self.copy(address.value, array.ctypes.data, array.nbytes)
        self.local.arrays.append((array, address))
        return array, ep.Tensor(address.value, dtype=TYPES[array.dtype], shape=array.shape)


class Communicator:
    """What nccl.ep needs of an nccl.core.Communicator."""

    def __init__(self, ptr):
        self.ptr = ptr


# ---- inputs and expected results ----------------------------------------------------------------

parser = argparse.ArgumentParser()
parser.add_argument("--gpus", type=int, default=0, help="ranks, each on a real GPU (0: emulated)")
options = parser.parse_args()
RANKS = options.gpus or 2
FIRST = [-(-EXPERTS * r // RANKS) for r in range(RANKS + 1)]  # each rank's first expert


def make_inputs(seed):
    """Routing, weights, tokens of all ranks; later ranks have fewer tokens."""
    random = np.random.default_rng(seed)
    inputs = []
    for rank in range(RANKS):
        tokens = MAX_TOKENS - 11 * rank
        idx = np.stack([random.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)]).astype(np.int64)
        idx[random.random(idx.shape) < 0.1] = -1
        inputs.append((idx, random.random(idx.shape, dtype=np.float32),
                       random.standard_normal((tokens, HIDDEN), dtype=np.float32)))
    return inputs


def slots_of(inputs, rank):
    """(expert, source, token, k) of this rank's slots, in their order."""
    found = []
    for expert in range(FIRST[rank], FIRST[rank + 1]):
        for source, (idx, _, _) in enumerate(inputs):
            found += [(expert, source, t, k) for t, k in zip(*np.where(idx == expert))]
    return found


def rows_of(inputs, rank):
    """(source, token) of this rank's rows."""
    mine = lambda row: ((row >= FIRST[rank]) & (row < FIRST[rank + 1])).any()
    return [(s, t) for s, (idx, _, _) in enumerate(inputs) for t in range(len(idx)) if mine(idx[t])]


def combined(inputs, rank, value_of, per_row, weighted):
    """Sums in the order that libep defines: on each rank by k, then over ranks."""
    idx, weights, tokens = inputs[rank]
    out = np.zeros_like(tokens)
    for t in range(len(tokens)):
        for peer in range(RANKS):
            mine = [k for k in range(TOP_K) if FIRST[peer] <= idx[t, k] < FIRST[peer + 1]]
            part = np.zeros(HIDDEN, dtype=np.float64)
            for k in mine[:1] if per_row else mine:
                scale = np.float64(weights[t, k]) if weighted else 1.0
                part += scale * value_of(peer, rank, t, k)
            out[t] += part
    return out


def expert_value(peer, source, token, k, per_row):
    """An expert's output row: a number that tells where it belongs, for each element."""
    number = peer * 7919 + source * 104 + token * 3 + (0 if per_row else k)
    return ((np.arange(HIDDEN) * 31 + number) % 251).astype(np.float32)


def check(name, got, expected, exact=True):
    same = np.array_equal(got, expected) if exact else np.allclose(got, expected, rtol=1e-5, atol=1e-4)
    assert same, f"{name}: {np.sum(got != expected)} of {got.size} numbers are wrong"


# ---- high throughput ------------------------------------------------------------------------


def high_throughput(device, comm, rank, layout, eager):
    inputs = make_inputs(10 * int(layout) + eager)
    idx, weights, tokens = inputs[rank]
    flat = layout == ep.Layout.FLAT
    slots, rows = slots_of(inputs, rank), rows_of(inputs, rank)
    local = FIRST[rank + 1] - FIRST[rank]
    counts = np.array([sum(s[0] == FIRST[rank] + e for s in slots) for e in range(local)])
    padded = -(-counts // ALIGNMENT) * ALIGNMENT
    offsets = np.concatenate([[0], np.cumsum(padded)[:-1]])
    total = len(rows) if flat else int(padded.sum())
    capacity = RANKS * MAX_TOKENS * TOP_K + EXPERTS * ALIGNMENT
    group = ep.Group.create(Communicator(comm), ep.GroupConfig(
        algorithm=ep.Algorithm.HIGH_THROUGHPUT, num_experts=EXPERTS, num_topk=TOP_K,
        max_dispatch_tokens_per_rank=MAX_TOKENS, max_token_bytes=4 * HIDDEN,
        max_recv_tokens_per_rank=0 if eager else capacity))
    got_counts, counts_t = device.array(np.full(local, -7, np.int32))
    got_total, total_t = device.array(np.full(1, -7, np.int32))
    got_offsets, offsets_t = device.array(np.full(local, -7, np.int32))
    info = ep.LayoutInfo(expert_counters=counts_t, recv_total_counter=total_t,
                         expert_offsets=None if flat else offsets_t)
    idx_a, idx_t = device.array(idx)
    handle = group.create_handle(
        layout, idx_t, layout_info=info, stream=0,
        config=ep.HandleConfig(dispatch_output_per_expert_alignment=0 if flat else ALIGNMENT))
    device.synchronize()
    check("total", got_total, [total])
    check("counts", got_counts, counts if flat else padded)
    if not flat:
        check("offsets", got_offsets, offsets)

    # Dispatch.
    shape = total if eager else capacity
    recv, recv_t = device.array(np.full((shape, HIDDEN), 5, np.float32))
    recv_w, recv_w_t = device.array(np.full((shape, TOP_K) if flat else shape, 5, np.float32))
    recv_i, recv_i_t = device.array(np.full((shape, TOP_K), 5, np.int64))
    tokens_a, tokens_t = device.array(tokens)
    weights_a, weights_t = device.array(weights)
    handle.dispatch(
        ep.DispatchInputs(tokens=tokens_t, topk_weights=weights_t),
        ep.DispatchOutputs(tokens=recv_t, topk_weights=recv_w_t, topk_idx=recv_i_t if flat else None),
        layout_info=ep.LayoutInfo(recv_topk_idx_kind=ep.ExpertIdKind.GLOBAL) if flat else None,
        stream=0)
    device.synchronize()
    want, want_w = np.full_like(recv, 5), np.full_like(recv_w, 5)
    want_i = np.full_like(recv_i, -1)
    out = np.full_like(recv, np.nan)
    if flat:
        for row, (source, token) in enumerate(rows):
            named = inputs[source][0][token]
            mine = (named >= FIRST[rank]) & (named < FIRST[rank + 1])
            want[row] = inputs[source][2][token]
            want_w[row] = np.where(mine, inputs[source][1][token], 0)
            want_i[row] = np.where(mine, named, -1)
            out[row] = expert_value(rank, source, token, 0, True)
        check("expert ids", recv_i, want_i)
    else:
        want[:total], want_w[:total] = 0, 0
        next_row = dict(zip(range(FIRST[rank], FIRST[rank + 1]), offsets))
        for expert, source, token, k in slots:
            row = next_row[expert]
            next_row[expert] += 1
            want[row] = inputs[source][2][token]
            want_w[row] = inputs[source][1][token, k]
            out[row] = expert_value(rank, source, token, k, False)
    check("tokens", recv, want)
    check("weights", recv_w, want_w)

    # Combine, and its gradient, which is a dispatch of the gradient's rows.
    out_a, out_t = device.array(out)
    sums, sums_t = device.array(np.full_like(tokens, 5))
    handle.combine(ep.CombineInputs(tokens=out_t), ep.CombineOutputs(tokens=sums_t), stream=0)
    grad, grad_t = device.array(np.full_like(recv, 5))
    handle.dispatch(ep.DispatchInputs(tokens=tokens_t), ep.DispatchOutputs(tokens=grad_t),
                    config=ep.DispatchConfig(pass_direction=ep.PassDir.BWD), stream=0)
    device.synchronize()
    value = lambda peer, source, t, k: expert_value(peer, source, t, 0 if flat else k, flat)
    check("sums", sums, combined(inputs, rank, value, flat, False))
    check("gradient", grad, want)
    handle.destroy()
    group.destroy()


# ---- low latency ----------------------------------------------------------------------------


def low_latency(device, comm, rank, layout, send_only):
    inputs = make_inputs(100 + 10 * int(layout) + send_only)
    idx, weights, tokens = inputs[rank]
    rank_major = layout == ep.Layout.RANK_MAJOR
    slots, rows = slots_of(inputs, rank), rows_of(inputs, rank)
    local = FIRST[rank + 1] - FIRST[rank]
    group = ep.Group.create(Communicator(comm), ep.GroupConfig(
        algorithm=ep.Algorithm.LOW_LATENCY, num_experts=EXPERTS,
        max_dispatch_tokens_per_rank=MAX_TOKENS, max_token_bytes=4 * HIDDEN))
    idx_a, idx_t = device.array(idx.astype(np.int32))
    handle = group.create_handle(layout, idx_t, stream=0)
    blocks, room = (RANKS, MAX_TOKENS) if rank_major else (local, RANKS * MAX_TOKENS)
    recv, recv_t = device.array(np.full((blocks, room, HIDDEN), 5, np.float32))
    recv_w, recv_w_t = device.array(np.full((blocks, room, TOP_K), 5, np.float32))
    recv_i, recv_i_t = device.array(np.full((blocks, room, TOP_K), 5, np.int32))
    counts, counts_t = device.array(np.full(blocks, -7, np.int32))
    tokens_a, tokens_t = device.array(tokens)
    weights_a, weights_t = device.array(weights)
    info = (ep.LayoutInfo(src_rank_counters=counts_t) if rank_major
            else ep.LayoutInfo(expert_counters=counts_t))
    handle.dispatch(
        ep.DispatchInputs(tokens=tokens_t, topk_weights=weights_t if rank_major else None),
        ep.DispatchOutputs(tokens=recv_t, topk_weights=recv_w_t if rank_major else None,
                           topk_idx=recv_i_t if rank_major else None),
        layout_info=info, config=ep.DispatchConfig(send_only=send_only), stream=0)
    if send_only:
        handle.complete(stream=0)
    device.synchronize()
    want, out = np.full_like(recv, 5), np.full_like(recv, np.nan)
    want_w, want_i = np.full_like(recv_w, 5), np.full_like(recv_i, -1)
    filled = np.zeros(blocks, np.int32)
    for item in rows if rank_major else slots:
        block, source, token, k = (item[0], *item, 0) if rank_major else (item[0] - FIRST[rank], *item[1:])
        at = (block, filled[block])
        filled[block] += 1
        want[at] = inputs[source][2][token]
        out[at] = expert_value(rank, source, token, k, rank_major)
        if rank_major:
            named = inputs[source][0][token]
            mine = (named >= FIRST[rank]) & (named < FIRST[rank + 1])
            want_w[at] = inputs[source][1][token]
            want_i[at] = np.where(mine, named - FIRST[rank], -1)
    check("counts", counts, filled)
    check("tokens", recv, want)
    if rank_major:
        check("weights", recv_w, want_w)
        check("expert ids", recv_i, want_i)
    out_a, out_t = device.array(out)
    sums, sums_t = device.array(np.full_like(tokens, 5))
    handle.combine(ep.CombineInputs(tokens=out_t),
                   ep.CombineOutputs(tokens=sums_t, topk_weights=None if rank_major else weights_t),
                   config=ep.CombineConfig(send_only=send_only), stream=0)
    if send_only:
        handle.complete(stream=0)
    device.synchronize()
    value = lambda peer, source, t, k: expert_value(peer, source, t, 0 if rank_major else k, rank_major)
    expected = combined(inputs, rank, value, rank_major, not rank_major)
    check("sums", sums, expected, exact=rank_major)
    handle.destroy()
    group.destroy()


# ---- ranks ----------------------------------------------------------------------------------


def tests():
    for layout in (ep.Layout.EXPERT_MAJOR, ep.Layout.FLAT):
        for eager in (0, 1):
            sizes = "exact" if eager else "static"
            yield f"high throughput, {NAMES[layout]}, {sizes} sizes", high_throughput, layout, eager
    for layout in (ep.Layout.EXPERT_MAJOR, ep.Layout.RANK_MAJOR):
        for send_only in (0, 1):
            calls = "halves" if send_only else "whole calls"
            yield f"low latency, {NAMES[layout]}, {calls}", low_latency, layout, send_only


def run(name, body, *args):
    """Run a test on all ranks; returns whether it passed."""
    device, failures = Gpus() if options.gpus else Emulated(), []

    def rank_body(rank):
        try:
            device.open(rank)
            comm = device.communicator(rank, name)
            body(device, comm, rank, *args)
            device.destroy(comm)
        except BaseException as error:  # an assertion, or nccl.ep's own error
            failures.append(f"rank {rank}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=rank_body, args=(r,), daemon=True) for r in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if any(thread.is_alive() for thread in threads):
        failures.append("some rank did not end within 60 s")
    print(f"[{'FAIL' if failures else 'PASS'}] {name}", *failures, sep="\n  ", flush=True)
    return not failures


def main():
    print(f"nccl.ep is served by {ep.get_lib_path()}, version {ep.get_lib_version()};",
          f"{RANKS} ranks on {'real' if options.gpus else 'emulated'} GPUs")
    passed = [run(*test) for test in tests()]
    print(f"{sum(passed)} passed, {len(passed) - sum(passed)} failed")
    sys.stdout.flush()
    os._exit(0 if all(passed) else 1)  # threads that hang must not keep the process


main()
