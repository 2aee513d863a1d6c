# SPDX-License-Identifier: Apache-2.0
"""What becomes of a layer's inputs: which are quantised in dispatch, and which after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import swizzle_mxfp8_scale
from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

from .._abi import Quant

if TYPE_CHECKING:
    from typing import Optional

    from torch import Tensor
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

BLOCK = 128
"""Elements that have one scale in fp8."""


def choose(config: FusedMoEQuantConfig, hidden: int, defer: bool) -> Quant:
    """How dispatch quantises.

    defer  whether the experts quantise
    """
    if defer:
        return Quant.NONE
    if config.quant_dtype == "mxfp8":
        is_padded = config.mx_alignment and hidden % config.mx_alignment
        return Quant.NONE if is_padded or hidden % 32 else Quant.MXFP8
    is_fp8 = config.quant_dtype == torch.float8_e4m3fn
    if is_fp8 and config.block_shape is not None and config.block_shape[1] == BLOCK:
        return Quant.FP8_POW2 if is_deep_gemm_e8m0_used() else Quant.FP8
    return Quant.NONE


def finish(
    config: FusedMoEQuantConfig, defer: bool, rows: Tensor, scales: Optional[Tensor]
) -> tuple[Tensor, Optional[Tensor]]:
    """The rows and scales that the experts take, of those that dispatch delivered."""
    if scales is not None:
        if config.quant_dtype == "mxfp8":
            scales = scales.view(torch.uint8)
            if config.is_scale_swizzled:
                scales = swizzle_mxfp8_scale(scales, M=rows.shape[0], K=rows.shape[1])
        return rows, scales
    if defer or not rows.numel():
        return rows, None
    quantised: tuple[Tensor, Optional[Tensor]] = moe_kernel_quantize_input(
        rows,
        config.a1_gscale if config.quant_dtype == "nvfp4" else config.a1_scale,
        quant_dtype=config.quant_dtype,
        per_act_token_quant=config.per_act_token_quant,
        block_shape=config.block_shape,
        is_scale_swizzled=config.is_scale_swizzled,
        mx_alignment=config.mx_alignment,
    )
    return quantised
