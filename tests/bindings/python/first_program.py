# SPDX-License-Identifier: Apache-2.0
"""A step of two ranks without NumPy: what an installed package needs to work."""

import array
import threading

import libep


def matrix(code, values, width):
    memory = array.array(code, values)
    kind = {"i": libep.Type.INT32, "f": libep.Type.FP32}[code]
    return memory, libep.Tensor(memory.buffer_info()[0], kind, (len(values) // width, width))


def play(bootstrap):
    with libep.Group(
        bootstrap,
        num_experts=4,
        max_tokens=2,
        max_top_k=1,
        max_row_bytes=16,
        backend=libep.Backend.HOST,
    ) as group:
        layer = libep.Handle(group)
        idx_memory, topk_idx = matrix("i", [0, 3], 1)
        x_memory, x = matrix("f", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 4)
        out_memory, out = matrix("f", [0.0] * 8, 4)
        layer.prepare(topk_idx)
        recv_memory, recv = matrix("f", [0.0] * 4 * layer.info().recv_rows, 4)
        layer.dispatch(x, recv_tokens=recv)
        layer.combine(recv, out=out)
        assert list(out_memory) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], out_memory
        print(f"rank {group.rank}: {layer.info().recv_rows} rows arrived")


threads = [threading.Thread(target=play, args=(b,)) for b in libep.Bootstrap.local(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
