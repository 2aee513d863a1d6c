# SPDX-License-Identifier: Apache-2.0
"""A layer in one line: what the layers of PyTorch and JAX have in common, which is its checks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Optional

from ._abi import Overflow, Quant, Status
from ._formats import FORMATS
from ._library import EpError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

SCORES = ("softmax", "sigmoid")
E4M3 = tuple(quant for quant, form in FORMATS.items() if form.values == "float8_e4m3fn")
"""The quantisations whose values are e4m3."""

LEAST_SUM = 1e-20
"""Added to the sum by which weights are divided."""


class Routing(NamedTuple):
    """How a router chooses the experts of a token, and weights them. As in DeepSeek-V3.

    The scores are `scores` of the router's products, in float32. The choice is by the scores plus
    the expert bias, if there is one. A group of experts counts as much as its best expert, with a
    bias as much as its best two. The experts are the top_k of the best top_groups groups. Their
    weights are their scores without bias, divided by their sum if `normalise`, times `scale`.
    """

    num_experts: int
    top_k: int
    scores: str = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    normalise: bool = False
    scale: float = 1.0


def refuse(status: Status, name: str, expected: object, got: object) -> NoReturn:
    raise EpError(status, f"moe: {name}: expected {expected}, got {got}")


def check_routing(given: Routing) -> Routing:
    """The routing. EpError for what no router can do."""
    experts, groups = given.num_experts, given.num_groups
    if given.scores not in SCORES:
        refuse(Status.RANGE, "scores", " or ".join(SCORES), repr(given.scores))
    if groups < 1 or experts % groups:
        refuse(Status.RANGE, "num_groups", f"a divisor of the {experts} experts", groups)
    if not 1 <= given.top_groups <= groups:
        refuse(Status.RANGE, "top_groups", f"1 .. {groups} (num_groups)", given.top_groups)
    most = given.top_groups * (experts // groups)
    if not 1 <= given.top_k <= most:
        of_groups = "" if groups == 1 else f", the experts of {given.top_groups} groups"
        refuse(Status.TOP_K, "top_k", f"1 .. {most}{of_groups}", given.top_k)
    return given


def count_capacity(
    factor: float, overflow: Overflow, tokens: int, top_k: int, experts: int, alignment: int
) -> int:
    """Rows of a rank: `factor` times those of an even routing, and the padding of `experts` slabs.
    A multiple of the alignment."""
    if not factor > 0:
        refuse(Status.RANGE, "capacity_factor", "a positive number", factor)
    if factor < 1 and overflow == Overflow.ERROR:
        refuse(
            Status.RANGE,
            "capacity_factor",
            "at least 1 with Overflow.ERROR, since even an even routing would lose rows",
            f"{factor}: choose Overflow.DROP to lose them",
        )
    rows = math.ceil(factor * tokens * top_k) + experts * (alignment - 1)
    return -(-rows // alignment) * alignment


def check_biases(present: Mapping[str, bool]) -> bool:
    """Whether the experts' matrices have biases: all of them, or none."""
    named = [name for name, is_there in present.items() if is_there]
    if named and len(named) < len(present):
        refuse(
            Status.SHAPE,
            "biases",
            f"all of {', '.join(present)}, or none",
            f"{', '.join(named)} alone",
        )
    return bool(named)


def check_shapes(
    arrays: Mapping[str, tuple[Optional[tuple[int, ...]], tuple[int, ...]]],
) -> None:
    """Compare shapes: for each name the given one, or None, and the expected one."""
    for name, (given, expected) in arrays.items():
        if given is not None and tuple(given) != expected:
            refuse(Status.SHAPE, name, list(expected), list(given))


def check_blocks(quant: Quant, lengths: Mapping[str, int]) -> None:
    """EpError unless values are e4m3, and the scales' blocks divide the lengths."""
    if quant not in E4M3:
        known = ", ".join(each.name for each in E4M3)
        refuse(Status.UNSUPPORTED, "quant", f"NONE or one of {known}", Quant(quant).name)
    block = FORMATS[quant].block
    for name, length in lengths.items():
        if length % block:
            refuse(Status.SHAPE, name, f"a multiple of {block}, the block of {quant.name}", length)
