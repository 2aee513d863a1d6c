# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's released nccl.ep package as a client of libnccl_ep.so.0 on libep.

    LD_PRELOAD=build/emulated/libnccl_ep.so python client.py     two ranks on emulated GPUs
    LD_PRELOAD=build/libep/nccl_ep/lib/libnccl_ep.so.0 python client.py --gpus 4

Ranks are threads, since emulated GPUs belong to one process. The expected results come from a walk
over all ranks' inputs in numpy.
"""

import argparse
import ctypes
import itertools
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


def is_mine(named, rank):
    """Which experts are a rank's."""
    return (named >= FIRST[rank]) & (named < FIRST[rank + 1])


def entries_of(inputs, rank):
    """(source, token, k, expert) of this rank's slots, by expert and then as they stand."""
    return [(source, t, k, expert) for expert in range(FIRST[rank], FIRST[rank + 1])
            for source, (idx, *_) in enumerate(inputs) for t, k in zip(*np.where(idx == expert))]


def check(name, got, expected, exact=True):
    near = dict(rtol=1e-5, atol=1e-4)
    same = np.array_equal(got, expected) if exact else np.allclose(got, expected, **near)
    assert same, f"{name}: {np.sum(got != expected)} of {got.size} numbers are wrong"


# ---- a step ---------------------------------------------------------------------------------


def step(device, comm, rank, layout, is_latency, option):
    """option: exact sizes in high throughput; calls in halves in low latency."""
    inputs = make_inputs(100 * is_latency + 10 * int(layout) + option)
    idx, weights, tokens = inputs[rank]
    per_row, is_flat = layout != ep.Layout.EXPERT_MAJOR, layout == ep.Layout.FLAT
    entries, local = entries_of(inputs, rank), FIRST[rank + 1] - FIRST[rank]
    counts = np.bincount([e - FIRST[rank] for *_, e in entries], minlength=local)
    rows = sorted({(source, t) for source, t, *_ in entries})
    # (block, source, token, k) of the rows that come, and the first row of each block.
    came = [(0 if is_flat else s, s, t, 0) for s, t in rows] if per_row else [
        (e - FIRST[rank], s, t, k) for s, t, k, e in entries]
    padded = counts if is_flat else -(-counts // ALIGNMENT) * ALIGNMENT
    offsets = np.concatenate([[0], np.cumsum(padded)[:-1]])
    total = len(rows) if is_flat else int(padded.sum())
    capacity = RANKS * MAX_TOKENS * TOP_K + EXPERTS * ALIGNMENT
    is_exact, is_split = option and not is_latency, option and is_latency
    blocks, room = (RANKS, MAX_TOKENS) if per_row else (local, RANKS * MAX_TOKENS)
    lead = (blocks, room) if is_latency else (total if is_exact else capacity,)
    sizes = dict(num_experts=EXPERTS, max_dispatch_tokens_per_rank=MAX_TOKENS,
                 max_token_bytes=4 * HIDDEN)
    if not is_latency:
        sizes.update(num_topk=TOP_K, max_recv_tokens_per_rank=0 if is_exact else capacity)
    modes = ep.Algorithm.HIGH_THROUGHPUT, ep.Algorithm.LOW_LATENCY
    config = ep.GroupConfig(algorithm=modes[is_latency], **sizes)
    group = ep.Group.create(Communicator(comm), config)

    def filled(shape, value, dtype=np.float32):
        return device.array(np.full(shape, value, dtype))

    kind = np.int32 if is_latency else np.int64
    idx_a, idx_t = device.array(idx.astype(kind))
    got_counts, counts_t = filled(blocks if is_latency else local, -7, np.int32)
    if is_latency:
        name = "src_rank_counters" if per_row else "expert_counters"
        handle = group.create_handle(layout, idx_t, stream=0)
        info = ep.LayoutInfo(**{name: counts_t})
    else:
        got_total, total_t = filled(1, -7, np.int32)
        got_offsets, offsets_t = filled(local, -7, np.int32)
        handle = group.create_handle(
            layout, idx_t, stream=0, layout_info=ep.LayoutInfo(
                expert_counters=counts_t, recv_total_counter=total_t,
                expert_offsets=None if is_flat else offsets_t),
            config=ep.HandleConfig(
                dispatch_output_per_expert_alignment=0 if is_flat else ALIGNMENT))
        info = ep.LayoutInfo(recv_topk_idx_kind=ep.ExpertIdKind.GLOBAL) if is_flat else None
        device.synchronize()
        check("total", got_total, [total])
        check("counts", got_counts, padded)
        if not is_flat:
            check("offsets", got_offsets, offsets)

    # Dispatch.
    recv, recv_t = filled((*lead, HIDDEN), 5)
    recv_w, recv_w_t = filled((*lead, TOP_K) if per_row else lead, 5)
    recv_i, recv_i_t = filled((*lead, TOP_K), 5, kind)
    tokens_a, tokens_t = device.array(tokens)
    weights_a, weights_t = device.array(weights)
    has_weights = per_row or not is_latency
    handle.dispatch(
        ep.DispatchInputs(tokens=tokens_t, topk_weights=weights_t if has_weights else None),
        ep.DispatchOutputs(tokens=recv_t, topk_weights=recv_w_t if has_weights else None,
                           topk_idx=recv_i_t if per_row else None), layout_info=info, stream=0,
        config=ep.DispatchConfig(send_only=is_split) if is_latency else None)
    if is_split:
        handle.complete(stream=0)
    device.synchronize()
    want, want_w, out = np.full_like(recv, 5), np.full_like(recv_w, 5), np.full_like(recv, np.nan)
    want_i, used = np.full_like(recv_i, -1), np.zeros(max(blocks, local), np.int32)
    if not is_latency and not per_row:
        want[:total], want_w[:total] = 0, 0
    for block, source, token, k in came:
        at = (block, used[block]) if is_latency else offsets[block] + used[block]
        used[block] += 1
        named, theirs, row = (array[token] for array in inputs[source])
        want[at], out[at] = row, row * (rank + 1)
        here = is_mine(named, rank)
        want_w[at] = (np.where(here | is_latency, theirs, 0)) if per_row else theirs[k]
        want_i[at] = np.where(here, named - FIRST[rank] * is_latency, -1)
    if is_latency:
        check("counts", got_counts, used[:blocks])
    check("tokens", recv, want)
    if has_weights:
        check("weights", recv_w, want_w)
    if per_row:
        check("expert ids", recv_i, want_i)

    # Combine; in high throughput its gradient, too, which is a dispatch of the gradient's rows.
    weighted = is_latency and not per_row
    out_a, out_t = device.array(out)
    sums, sums_t = filled(tokens.shape, 5)
    handle.combine(ep.CombineInputs(tokens=out_t),
                   ep.CombineOutputs(tokens=sums_t, topk_weights=weights_t if weighted else None),
                   config=ep.CombineConfig(send_only=is_split) if is_latency else None, stream=0)
    if is_split:
        handle.complete(stream=0)
    grad, grad_t = filled(recv.shape, 5)
    if not is_latency:
        handle.dispatch(ep.DispatchInputs(tokens=tokens_t), ep.DispatchOutputs(tokens=grad_t),
                        config=ep.DispatchConfig(pass_direction=ep.PassDir.BWD), stream=0)
    device.synchronize()
    # Each expert has multiplied by its rank's number plus one; of a row all experts together.
    factors = np.zeros(len(tokens))
    for peer in range(RANKS):
        mine = is_mine(idx, peer)
        shares = mine.any(1) if per_row else (mine * (weights if weighted else 1)).sum(1)
        factors += (peer + 1) * shares
    check("sums", sums, factors[:, None] * tokens, exact=False)
    if not is_latency:
        check("gradient", grad, want)
    handle.destroy()
    group.destroy()


# ---- ranks ----------------------------------------------------------------------------------


def tests():
    for is_latency, layouts, options in (
        (False, (ep.Layout.EXPERT_MAJOR, ep.Layout.FLAT), ("static sizes", "exact sizes")),
        (True, (ep.Layout.EXPERT_MAJOR, ep.Layout.RANK_MAJOR), ("whole calls", "halves")),
    ):
        mode = "low latency" if is_latency else "high throughput"
        for layout, option in itertools.product(layouts, (0, 1)):
            yield f"{mode}, {NAMES[layout]}, {options[option]}", layout, is_latency, option


def run(name, *args):
    """Run a test on all ranks; returns whether it passed."""
    device, failures = Gpus() if options.gpus else Emulated(), []

    def rank_body(rank):
        try:
            device.open(rank)
            comm = device.communicator(rank, name)
            step(device, comm, rank, *args)
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
