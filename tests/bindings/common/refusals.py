# SPDX-License-Identifier: Apache-2.0
"""Dispatches that are refused, each with a sentence, over all faces. After any the group works.

face.dispatcher() is a context in which a function dispatches and combines NumPy arrays.
"""

from typing import Any, Callable, NamedTuple, Optional

import face
import numpy as np
import pytest
from base import refused

T, HIDDEN, TOP_K, MAX_TOKENS = 3, 16, 2, 8
GOOD = dict(
    tokens=np.ones((T, HIDDEN), np.float32),
    topk_idx=np.array([[0, 1]] * T, np.int32),
    topk_weights=np.ones((T, TOP_K), np.float32),
    num_tokens=None,
)


class Refusal(NamedTuple):
    """An argument, what is done to it, and what each face says of it; None: it takes that."""

    argument: str
    spoil: Callable[[Any], Any]
    ctypes: Optional[str]
    torch: Optional[str] = None
    jax: Optional[str] = None


def typed(dtype):
    return lambda array: array.astype(dtype)


R = Refusal
FLOATS = "TYPE tokens: expected float32 or bfloat16 or float16, got "
INTS = "TYPE topk_idx: expected int32 or int64, got "
STRIDED = "TypeError ^tokens: .*C-contiguous"
REFUSALS = [
    R("tokens", typed("f8"), "TypeError ^tokens: .*one of the types BF16, .*, got float64",
      "TypeError tokens.*float64"),
    R("tokens", typed("c8"), "TypeError ^tokens: .*got complex64", "TypeError tokens.*complex64",
      FLOATS + "complex64"),
    R("tokens", typed(bool), "TypeError ^tokens: .*got bool", "TypeError tokens.*bool", FLOATS),
    R("tokens", typed("i4"), "TYPE ep_dispatch", None, FLOATS + "int32"),
    R("tokens", typed("i1"), "TypeError got int8", "TypeError tokens.*int8", FLOATS + "int8"),
    R("tokens", typed(">f4"), "TypeError ^tokens: .*got >f4"),
    R("tokens", lambda x: x[0], "NDIM ep_dispatch", "EpError tokens",
      r"SHAPE tokens: expected shape \[any, any\], got \[16\]"),
    R("tokens", lambda x: x[None, None], "TypeError ^tokens: .*1 to 3 dimensions, got 4",
      "EpError tokens", "SHAPE tokens: expected shape"),
    R("tokens", lambda x: np.float32(1), "TypeError ^tokens: .*1 to 3 dimensions, got 0", None,
      "SHAPE tokens: expected shape"),
    R("tokens", lambda x: x[:2], "SHAPE ep_dispatch", "EpError tokens",
      r"SHAPE topk_idx: expected shape \[2, 2\], got \[3, 2\]"),
    R("tokens", lambda x: np.ones((T, 6), "f4"), "ROW_BYTES ep_dispatch", "ROW_BYTES tokens.*16",
      "ROW_BYTES multiple of 16 bytes up to 64 .*, got 24"),
    R("tokens", lambda x: np.ones((T, 32), "f4"), "ROW_BYTES ep_dispatch", "ROW_BYTES tokens.*row",
      r"ROW_BYTES up to 64 \(bootstrap's hidden, 16 of float32\), got 128 \(32 of float32\)"),
    R("tokens", lambda x: np.ones((9, HIDDEN), "f4"), "SHAPE ep_dispatch", "EpError tokens",
      "TOKENS at most 8 tokens .*, got 9"),
    R("tokens", lambda x: x.T.copy().T, 
      STRIDED + r" tensor, got strides \(4, 12\) for shape \(3, 16"),
    R("tokens", lambda x: np.ones((T, 32), "f4")[:, ::2], STRIDED),
    R("tokens", lambda x: x[::-1], STRIDED),
    R("tokens", lambda x: np.broadcast_to(np.float32(1), x.shape), STRIDED),
    R("tokens", lambda x: x.tolist(), "TypeError ^tokens: expected a tensor, got builtins.list",
      "TypeError tokens: expected .*, got ", "TYPE tokens: expected an array, got list"),
    R("tokens", lambda x: "tokens", "TypeError ^tokens: expected a tensor, got builtins.str",
      "TypeError tokens: expected .*, got ", "EpError tokens: expected an array, got str"),
    R("tokens", lambda x: 7, "TypeError ^tokens: expected a tensor, got builtins.int",
      "TypeError tokens: expected .*, got "),
    R("tokens", lambda x: None, "NULL ep_dispatch", "TypeError tokens: expected .*, got ",
      "EpError tokens: expected an array, got NoneType"),
    R("topk_idx", typed("f4"), "TYPE topk_idx", "TYPE topk_idx", INTS + "float32"),
    R("topk_idx", typed("i2"), "TypeError topk_idx: .*got int16",
      "TypeError topk_idx: expected int32 or int64, got torch.int16", INTS + "int16"),
    R("topk_idx", lambda i: np.tile(i, 2), "TOP_K topk_idx", "EpError topk_idx",
      r"SHAPE topk_idx: expected shape \[3, 2\], got \[3, 4\]"),
    R("topk_idx", lambda i: i[:2], "SHAPE ep_dispatch", "EpError tokens",
      r"SHAPE topk_idx: expected shape \[3, 2\], got \[2, 2\]"),
    R("topk_idx", lambda i: np.tile(i, (4, 1)), "TOKENS topk_idx", "EpError topk_idx|tokens",
      "SHAPE topk_idx"),
    R("topk_idx", lambda i: None, "NULL topk_idx", "TypeError topk_idx: expected .*, got ",
      "EpError topk_idx: expected an array, got NoneType"),
    R("topk_idx", lambda i: i.tolist(), "TypeError topk_idx: expected a tensor",
      "TypeError topk_idx: expected .*, got ", "TYPE topk_idx: expected an array, got list"),
    R("topk_weights", typed("f2"), "TYPE ep_dispatch", None, "TYPE topk_weights: expected float32"),
    R("topk_weights", typed("f8"), "TypeError topk_weights: .*float64",
      "TypeError topk_weights: expected .*float64"),
    R("topk_weights", lambda w: w[:2], "SHAPE ep_dispatch", "EpError topk_weights",
      r"SHAPE topk_weights: expected shape \[3, 2\], got \[2, 2\]"),
    R("topk_weights", lambda w: w[:, 0].copy(), "NDIM ep_dispatch", "EpError topk_weights",
      r"SHAPE topk_weights: expected shape \[3, 2\], got \[3\]"),
    R("topk_weights", lambda w: w.tolist(), "TypeError topk_weights: expected a tensor",
      "TypeError weights: expected .*, got ", "TYPE topk_weights: expected an array, got list"),
    R("num_tokens", lambda n: np.ones(T, "i4"), "SHAPE num_tokens", "SHAPE num_tokens",
      r"SHAPE num_tokens: expected shape \[1\], got \[3\]"),
    R("num_tokens", lambda n: np.ones(1, "f4"), "TYPE num_tokens", "TYPE num_tokens",
      "TYPE num_tokens: expected int32 or int64, got float32"),
    R("num_tokens", lambda n: 3, "TypeError num_tokens: expected a tensor, got builtins.int",
      "TypeError num_tokens: expected .*, got "),
]  # fmt: skip


@pytest.fixture(scope="module")
def dispatcher():
    with face.dispatcher() as call:
        yield call


@pytest.mark.parametrize(
    "row", [row for row in REFUSALS if getattr(row, face.NAME)], ids=lambda row: row.argument
)
def test_refused(dispatcher, row):
    """Before any row travels."""
    with refused(getattr(row, face.NAME)):
        dispatcher(**{**GOOD, row.argument: row.spoil(GOOD[row.argument])})
    np.testing.assert_array_equal(dispatcher(**GOOD), 2 * GOOD["tokens"])
