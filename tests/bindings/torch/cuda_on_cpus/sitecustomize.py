# SPDX-License-Identifier: Apache-2.0
"""Lets programs for GPUs run on CPUs: in PYTHONPATH, it makes the device "cuda" the CPU.

A GEMM that only fills time on a GPU becomes small, and gloo gathers what nccl would.
"""

import torch
from torch.overrides import TorchFunctionMode

_LARGE, _SMALL = (8192, 8192), (64, 64)


class _OnCpus(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.randn and args[:1] == (_LARGE,):
            args = (_SMALL,)
        if func.__name__ == "all_gather_into_tensor":  # gloo wants one long first dimension
            out, given = args
            args = (out.view(-1, *given.shape[1:]), given)
        return func(*args, **kwargs)


if not torch.cuda.is_available():
    _OnCpus().__enter__()
    torch.cuda.synchronize = lambda *_: None
