# SPDX-License-Identifier: Apache-2.0
"""Configurations of groups and handles: keyword arguments become the structs of ep.h."""

from __future__ import annotations

from ctypes import byref, c_double, c_int32, c_int64
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from ._abi import (
    Backend,
    CopyChoice,
    Duplicates,
    EpGroupConfig,
    EpHandleConfig,
    ExpertIds,
    Late,
    Layout,
    Mode,
    Overflow,
    Padding,
    Plans,
    Quant,
    Rows,
    RowWeights,
    ScaleOrder,
    Sums,
    Tail,
    initialized,
)
from ._library import check, library

if TYPE_CHECKING:
    from ctypes import Structure
    from enum import IntEnum
    from typing import Any, Iterable, Mapping, Optional, TypeVar

    from typing_extensions import Unpack

    AnyStruct = TypeVar("AnyStruct", bound=Structure)


class GroupFields(TypedDict, total=False):
    """Configuration of a group. ep.h (EpGroupConfig) describes each field.

    num_experts, max_tokens, max_top_k and max_row_bytes are required. A member of an enum may be
    given by its name ("host"). Fields marked = have the same value on every rank.
    """

    num_experts: int  # = experts of all ranks together
    max_tokens: int  # = most tokens of a rank in one step
    max_top_k: int  # = most experts per token
    max_row_bytes: int  # = bytes of the largest row, gradients included; a multiple of 16
    max_scale_bytes: int  # = bytes of the largest row of scales (0: no scales)
    alignment: int  # = slabs are padded to multiples of this many rows (1)
    max_recv_rows: int  # = receive capacity in rows; 0: exact sizing (0)
    overflow: Overflow  # = slots past the capacity (ERROR)
    backend: Backend  # = (AUTO)
    timeout_seconds: float  # deadline of every wait (LIBEP_TIMEOUT)
    nccl_comm: int  # address of a borrowed ncclComm_t, 0 for none (0)
    device: int  # this rank's CUDA device (the current one)
    mode: Mode  # = of handles that do not choose their own (THROUGHPUT)
    num_sms: int  # multiprocessors that operations may use (LIBEP_NUM_SMS)
    duplicates: Duplicates  # = an expert that a token names twice (KEEP)
    latency_sets: int  # = operations of latency mode in flight
    num_nodes: int  # = nodes that the ranks are on; another number is refused; 0: any (0)
    sums: Sums  # = BY_ENTRY: a token's rank adds all of its rows (BY_RANK)
    node_rows: int  # = room in a rank's message to another node, in tokens; 0: max_tokens (0)
    num_physical: int  # = places for copies of experts: see Group.place (no placement)
    choice: CopyChoice  # = which copy of an expert a token takes (NEAR)
    masks: int  # = 1: ranks may be masked (Group.mask); on GPUs of one node or on CPUs (0)
    on_late: Late  # = MASK: latency mode cuts late ranks; needs masks (FAIL)
    late_us: int  # = how long it waits for them (0)
    max_ranks: int  # = places for ranks that may join (Group.join); needs masks (nobody joins)
    place: int  # with max_ranks: this rank's place (its rank in the bootstrap)


class HandleFields(TypedDict, total=False):
    """Configuration of a handle. ep.h (EpHandleConfig) describes each field; all have defaults."""

    layout: Layout  # (EXPERT_MAJOR)
    top_k: int  # experts per token in every step (any, up to the group's max_top_k)
    alignment: int  # (the group's)
    max_recv_rows: int  # capacity in rows, 0 for exact sizing (the group's)
    rows_per_expert: int  # BATCHED: rows of each slab
    overflow: Overflow  # (the group's)
    zero_tail: Tail  # (KEEP)
    mode: Mode  # (the group's)
    quant: Quant  # (NONE)
    scale_order: ScaleOrder  # (BY_ROW)
    num_sms: int  # (the group's)
    plans: Plans  # (OWNED)
    id: int  # a number that ranks compare and that sentences name; 0: none (0)
    expert_ids: ExpertIds  # (LOCAL)
    row_weights: RowWeights  # RANK_MAJOR: ALL for weights of other ranks' experts, too (HERE)
    padding: Padding  # (ZERO)
    sum_quant: Quant  # how partial sums travel: NONE or FP8 (NONE)
    grad_quant: Quant  # how combine_backward quantises rows: any but NVFP4 (NONE)


_ENUMS: dict[str, type[IntEnum]] = {
    "backend": Backend,
    "choice": CopyChoice,
    "duplicates": Duplicates,
    "expert_ids": ExpertIds,
    "grad_quant": Quant,
    "layout": Layout,
    "mode": Mode,
    "on_late": Late,
    "overflow": Overflow,
    "padding": Padding,
    "plans": Plans,
    "quant": Quant,
    "row_weights": RowWeights,
    "scale_order": ScaleOrder,
    "sum_quant": Quant,
    "sums": Sums,
    "zero_tail": Tail,
}
"""The fields whose values are members of an enum."""


def _member(name: str, text: str) -> int:
    """The member that a text names, in lower or upper case."""
    if name not in _ENUMS:
        raise TypeError(f"{name}: expected a number, got {text!r}")
    members = _ENUMS[name].__members__
    if text.upper() not in members:
        names = ", ".join(member.lower() for member in members)
        raise ValueError(f"{name}: expected one of {names}, got {text!r}")
    return members[text.upper()]


def name_members(fields: Any) -> None:
    """Put members of enums in the place of their names, in a dictionary of fields."""
    for name, value in fields.items():
        if isinstance(value, str) and name in _ENUMS:
            fields[name] = _member(name, value)


def _fill(struct: type[AnyStruct], fields: Mapping[str, Any]) -> AnyStruct:
    config = initialized(struct)
    known = [field[0] for field in struct._fields_ if field[0] not in ("struct_size", "reserved")]
    for name, value in fields.items():
        if name not in known:
            names = ", ".join(known)
            raise TypeError(f"expected fields of {struct.__name__} ({names}), got {name}")
        if isinstance(value, str):
            value = _member(name, value)
        try:
            setattr(config, name, value)
        except TypeError:
            raise TypeError(f"{name}: expected a number, got {value!r}") from None
        # ctypes cuts integers that are too large for the field.
        if (getattr(config, name) or 0) != value:
            raise OverflowError(f"{name}: {value} does not fit into the field")
    return config


def group_config(fields: Mapping[str, Any]) -> EpGroupConfig:
    """The struct for the keyword arguments of a group."""
    for name in ("num_experts", "max_tokens", "max_top_k", "max_row_bytes"):
        if name not in fields:
            raise TypeError(
                f"a group takes num_experts, max_tokens, max_top_k and max_row_bytes: "
                f"{name} is missing"
            )
    return _fill(EpGroupConfig, fields)


def handle_config(fields: Mapping[str, Any]) -> EpHandleConfig:
    """The struct for the keyword arguments of a handle."""
    return _fill(EpHandleConfig, fields)


class ExpertRange(NamedTuple):
    """The experts of a rank: first .. first + count - 1."""

    first: int
    count: int  # type: ignore[assignment]


def expert_range(num_experts: int, num_ranks: int, rank: int) -> ExpertRange:
    """Compute which experts a rank owns. EpError RANGE for a rank or numbers out of range."""
    first, count = c_int32(), c_int32()
    check(library.ep_expert_range(num_experts, num_ranks, rank, byref(first), byref(count)))
    return ExpertRange(first.value, count.value)


def placement_balance(
    load: Iterable[float], num_physical: int, num_ranks: int, nodes: Optional[Iterable[int]] = None
) -> list[int]:
    """Make a map for Group.place from the experts' loads: the expert of each place. Local.

    load          of each expert, such as the rows that came for it
    num_physical  places of all ranks together, at least one for each expert
    nodes         the node of each rank; None: all are on one

    Equal inputs give equal maps. See ep_placement_balance in ep.h.
    """
    loads = [float(value) for value in load]
    ranks = None if nodes is None else [int(node) for node in nodes]
    if ranks is not None and len(ranks) != num_ranks:
        raise ValueError(f"nodes: expected {num_ranks} numbers, got {len(ranks)}")
    out = (c_int32 * max(num_physical, 0))()
    check(
        library.ep_placement_balance(
            (c_double * len(loads))(*loads),
            len(loads),
            num_physical,
            num_ranks,
            None if ranks is None else (c_int32 * num_ranks)(*ranks),
            out,
        )
    )
    return list(out)


def max_recv_rows(
    num_ranks: int,
    rank: int,
    layout: Layout = Layout.EXPERT_MAJOR,
    flags: Rows = Rows(0),
    **fields: Unpack[GroupFields],
) -> int:
    """Compute the most rows that a rank can receive in one step, padding included.

    With this max_recv_rows (BATCHED: rows_per_expert) nothing overflows. The group of these
    `fields` need not exist. Take the most over all ranks, since a group's capacity is equal on all.
    """
    rows = c_int64()
    config = group_config(fields)
    check(library.ep_max_recv_rows(byref(config), num_ranks, rank, layout, flags, byref(rows)))
    return rows.value
