# SPDX-License-Identifier: Apache-2.0
"""ep.h, ep_quant.h and ep_mesh.h in ctypes: the structs, enums, constants and functions, with their names and
order.

A test compares every size, offset, number and initial value with what the C compiler says.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint,
    c_void_p,
)
from enum import IntEnum, IntFlag

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    AnyStruct = TypeVar("AnyStruct", bound=Structure)

# ---- constants --------------------------------------------------------------------------------

DEFAULT = -1
"""Use the default, in fields that allow it."""

MAX_DIMS = 3
LATENCY_TOKENS = 256
MAX_LATENCY_SETS = 16
MAX_EXPERTS = 16777216
MAX_TOP_K = 32
MAX_ROW_BYTES = 65536
MAX_RANKS = 1024
MAX_WINDOWS = 32
MAX_ADOPTED_WINDOWS = 64
MAX_HANDLE_ID = 4095
WINDOW_PAIRED = -1
"""In place of the id of an adopted window: its ranks receive in it together."""
MESH_MAX_AXES = 16
AXIS_NAME_BYTES = 32
SPEC_MAX_DIMS = 8

# ---- enums ------------------------------------------------------------------------------------


class Status(IntEnum):
    """What a call returned: EP_OK, or EP_ERR_... without that prefix."""

    OK = 0
    NULL = 1
    STRUCT_SIZE = 2
    RANGE = 3
    NDIM = 4
    TYPE = 5
    SHAPE = 6
    ROW_BYTES = 7
    ADDRESS = 8
    TOKENS = 9
    TOP_K = 10
    ALIGNMENT = 11
    BUFFER_SIZE = 12
    ROUTING = 13
    OVERFLOW = 14
    NOT_PREPARED = 15
    DESTROYED = 16
    HANDLE_MEMORY = 17
    FOREIGN = 18
    MISMATCH = 19
    ORDER = 20
    TIMEOUT = 21
    PEER = 22
    NO_MEMORY = 23
    SETTING = 24
    UNSUPPORTED = 25
    BOOTSTRAP = 26
    SYSTEM = 27
    ABORTED = 28


class Type(IntEnum):
    """Element types of tensors."""

    BF16 = 1
    FP16 = 2
    FP32 = 3
    FP8_E4M3 = 4
    FP8_E5M2 = 5
    UINT8 = 6
    INT32 = 7
    INT64 = 8


class Backend(IntEnum):
    """What moves the bytes: HOST takes plain memory, CUDA memory that the rank's GPU reaches."""

    AUTO = 1
    HOST = 2
    CUDA = 3


class Overflow(IntEnum):
    """Whether status() reports slots past the capacity (ERROR), or the plan only counts them."""

    ERROR = 1
    DROP = 2


class Mode(IntEnum):
    """THROUGHPUT for any number of tokens, LATENCY for the few tokens of a decoding step."""

    AUTO = 1
    THROUGHPUT = 2
    LATENCY = 3


class Duplicates(IntEnum):
    """The slots of an expert that a token names twice: two (KEEP), or one (MERGE)."""

    KEEP = 1
    MERGE = 2


class Layout(IntEnum):
    """The order of slots in the receive buffer: see EpLayout in ep.h."""

    EXPERT_MAJOR = 1
    FLAT = 2
    BATCHED = 3
    RANK_MAJOR = 4


class Rows(IntFlag):
    """Flags of max_recv_rows."""

    DUPLICATES = 1


class Quant(IntEnum):
    """How dispatch quantises rows before it sends them."""

    NONE = 1
    FP8 = 2
    FP8_UE8M0 = 3
    MXFP8 = 4
    FP8_POW2 = 5


class ScaleOrder(IntEnum):
    """The memory order of recv_scales."""

    BY_ROW = 1
    BY_COLUMN = 2


class Blocks(IntEnum):
    """The elements that share a scale."""

    ROWS = 1
    TILES = 2


class ExpertIds(IntEnum):
    """The numbers of experts in recv_topk_idx."""

    LOCAL = 1
    GLOBAL = 2


class RowWeights(IntEnum):
    """Which of the K weights of a rank-major row dispatch delivers."""

    HERE = 0
    ALL = 1


class Tail(IntEnum):
    """What becomes of the receive rows past the last slab."""

    KEEP = 0
    ZERO = 1
    IDS = 2


class Padding(IntEnum):
    """Whether padding, the rows of a slab behind its last slot, becomes zero or is not written."""

    ZERO = 1
    KEEP = 2


class Plans(IntEnum):
    """Whether a handle has a plan of its own, or each call names one."""

    OWNED = 1
    NAMED = 2


class AxisRole(IntEnum):
    """What ranks along an axis of a mesh have: see EpAxisRole in ep_mesh.h."""

    OTHER = 1
    DATA = 2
    FSDP = 3
    EXPERT = 4


class TensorKind(IntEnum):
    """A weight outside the experts, a weight of the experts [E, ...], or an activation."""

    WEIGHT = 1
    EXPERT_WEIGHT = 2
    ACTIVATION = 3


# ---- structs ----------------------------------------------------------------------------------


class EpTensor(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("data", c_void_p),
        ("type", c_int),
        ("ndim", c_int32),
        ("shape", c_int64 * MAX_DIMS),
    ]


ALLGATHER = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_size_t, c_double)
BARRIER = CFUNCTYPE(c_int, c_void_p, c_double)


class EpBootstrap(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rank", c_int32),
        ("size", c_int32),
        ("context", c_void_p),
        ("allgather", ALLGATHER),
        ("barrier", BARRIER),
        # Python fills in none of the functions that follow.
        ("share", c_void_p),
        ("share_free", c_void_p),
        ("isend", c_void_p),
        ("irecv", c_void_p),
        ("test", c_void_p),
        ("cancel", c_void_p),
        ("destroy", c_void_p),
    ]


class EpGroupConfig(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_experts", c_int32),
        ("max_tokens", c_int32),
        ("max_top_k", c_int32),
        ("max_row_bytes", c_int64),
        ("max_scale_bytes", c_int64),
        ("alignment", c_int32),
        ("max_recv_rows", c_int64),
        ("overflow", c_int),
        ("backend", c_int),
        ("timeout_seconds", c_double),
        ("nccl_comm", c_void_p),
        ("device", c_int32),
        ("mode", c_int),
        ("num_sms", c_int32),
        ("duplicates", c_int),
        ("latency_sets", c_int32),
        ("num_nodes", c_int32),
    ]


class EpGroupMemory(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("feasible", c_int32),
        ("backend", c_int),
        ("shared_bytes", c_int64),
        ("private_bytes", c_int64),
        ("handle_bytes", c_int64),
        ("reason", c_char * 256),
    ]


class EpGroupInfo(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rank", c_int32),
        ("size", c_int32),
        ("num_experts", c_int32),
        ("first_expert", c_int32),
        ("num_local_experts", c_int32),
        ("backend", c_int),
        ("node", c_int32),
        ("num_nodes", c_int32),
        ("numa_node", c_int32),
        ("num_cpus", c_int32),
        ("library_bytes", c_int64),
        ("device", c_int32),
        ("bound", c_int32),
        ("gpu", c_char * 64),
        ("reason", c_char * 256),
        ("mode", c_int),
        ("reserved", c_int32),
        ("within", c_char * 48),
        ("between", c_char * 48),
    ]


class EpHandleConfig(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("layout", c_int),
        ("top_k", c_int32),
        ("alignment", c_int32),
        ("max_recv_rows", c_int64),
        ("rows_per_expert", c_int64),
        ("overflow", c_int32),
        ("zero_tail", c_int32),
        ("mode", c_int32),
        ("quant", c_int),
        ("scale_order", c_int),
        ("num_sms", c_int32),
        ("plans", c_int),
        ("id", c_int32),
        ("expert_ids", c_int),
        ("row_weights", c_int32),
        ("padding", c_int),
        ("sum_quant", c_int),
    ]


class EpHandleCost(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("mode", c_int),
        ("reserved", c_int32),
        ("plan_bytes", c_int64),
        ("buffer_bytes", c_int64),
    ]


class EpHandleInfo(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("step", c_int64),
        ("num_tokens", c_int64),
        ("top_k", c_int64),
        ("recv_rows", c_int64),
        ("needed_rows", c_int64),
        ("dropped_slots", c_int64),
        ("remote_rows_sent", c_int64),
        ("remote_rows_received", c_int64),
        ("local_rows", c_int64),
        ("num_local_experts", c_int32),
        ("expert_counts", POINTER(c_int32)),
        ("expert_padded", POINTER(c_int32)),
        ("expert_offsets", POINTER(c_int32)),
        ("mode", c_int),
        ("reserved", c_int32),
    ]


class EpPlanTensors(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("expert_counts", POINTER(EpTensor)),
        ("expert_padded", POINTER(EpTensor)),
        ("expert_offsets", POINTER(EpTensor)),
        ("totals", POINTER(EpTensor)),
        ("source_counts", POINTER(EpTensor)),
        ("recv_rows", POINTER(EpTensor)),
        ("needed_rows", POINTER(EpTensor)),
        ("dropped_slots", POINTER(EpTensor)),
        ("source_rows", POINTER(EpTensor)),
    ]


class EpPrepare(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("topk_idx", POINTER(EpTensor)),
        ("num_tokens", POINTER(EpTensor)),
        ("out", POINTER(EpPlanTensors)),
    ]


class EpRowsForm(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("quant", c_int),
        ("blocks", c_int),
        ("transposed", c_int32),
        ("scale_order", c_int),
    ]


class EpFinding(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("status", c_int),
        ("rank", c_int32),
        ("peer", c_int32),
        ("token", c_int64),
        ("k", c_int64),
        ("expected", c_int64),
        ("seen", c_int64),
        ("count", c_int64),
        ("phase", c_char * 24),
    ]


class EpSetting(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("type", c_char_p),
        ("default_value", c_char_p),
        ("value", c_char_p),
        ("doc", c_char_p),
    ]


class EpAxis(Structure):
    _fields_ = [("name", c_char * AXIS_NAME_BYTES), ("size", c_int32), ("role", c_int)]


class EpAxes(Structure):
    _fields_ = [("num", c_int32), ("axis", c_int32 * MESH_MAX_AXES)]


class EpMesh(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_axes", c_int32),
        ("axes", EpAxis * MESH_MAX_AXES),
        ("grid", POINTER(c_int32)),
    ]


class EpSpec(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("ndim", c_int32),
        ("dims", EpAxes * SPEC_MAX_DIMS),
    ]


class EpSharding(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("ndim", c_int32),
        ("stored", c_int64 * SPEC_MAX_DIMS),
        ("used", c_int64 * SPEC_MAX_DIMS),
        ("gathered", EpAxes * SPEC_MAX_DIMS),
        ("kept", EpAxes * SPEC_MAX_DIMS),
        ("scattered", EpAxes),
        ("summed", EpAxes),
        ("amax", EpAxes),
        ("amax_per_expert", EpAxes),
    ]


VISIT = CFUNCTYPE(None, POINTER(EpSetting), c_void_p)

# What EP_..._INIT sets, where it is not zero. struct_size is always set.
INITIAL_VALUES: dict[type, dict[str, Any]] = {
    EpGroupConfig: {
        "alignment": 1,
        "overflow": Overflow.ERROR,
        "backend": Backend.AUTO,
        "timeout_seconds": DEFAULT,
        "device": DEFAULT,
        "mode": Mode.THROUGHPUT,
        "num_sms": DEFAULT,
        "duplicates": Duplicates.KEEP,
        "latency_sets": DEFAULT,
    },
    EpGroupMemory: {"backend": Backend.AUTO},
    EpGroupInfo: {"backend": Backend.AUTO, "device": -1, "mode": Mode.AUTO},
    EpHandleConfig: {
        "layout": Layout.EXPERT_MAJOR,
        "top_k": DEFAULT,
        "alignment": DEFAULT,
        "max_recv_rows": DEFAULT,
        "rows_per_expert": DEFAULT,
        "overflow": DEFAULT,
        "mode": DEFAULT,
        "quant": Quant.NONE,
        "scale_order": ScaleOrder.BY_ROW,
        "num_sms": DEFAULT,
        "plans": Plans.OWNED,
        "expert_ids": ExpertIds.LOCAL,
        "padding": Padding.ZERO,
        "sum_quant": Quant.NONE,
    },
    EpHandleCost: {"mode": Mode.AUTO},
    EpHandleInfo: {"mode": Mode.AUTO},
    EpRowsForm: {
        "quant": Quant.FP8,
        "blocks": Blocks.ROWS,
        "scale_order": ScaleOrder.BY_ROW,
    },
    EpMesh: {"axes": (EpAxis * MESH_MAX_AXES)(EpAxis(role=AxisRole.OTHER))},
    EpFinding: {"rank": -1, "peer": -1, "token": -1, "k": -1, "expected": -1, "seen": -1},
}


def initialized(struct: type[AnyStruct]) -> AnyStruct:
    """Make a struct with the values of its EP_..._INIT."""
    value = struct(struct_size=ctypes.sizeof(struct))
    for name, initial in INITIAL_VALUES.get(struct, {}).items():
        setattr(value, name, initial)
    return value


# ---- functions --------------------------------------------------------------------------------

_tensor = POINTER(EpTensor)
_mesh, _axes, _spec = POINTER(EpMesh), POINTER(EpAxes), POINTER(EpSpec)

# name: (what it returns, its arguments). Objects (EpGroup, EpHandle) and streams are addresses.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ep_version": (c_int, []),
    "ep_status_string": (c_char_p, [c_int]),
    "ep_last_error": (c_char_p, []),
    "ep_set_last_error": (c_int, [c_int, c_char_p]),
    "ep_type_bytes": (c_size_t, [c_int]),
    "ep_bootstrap_local": (c_int, [c_int32, POINTER(EpBootstrap)]),
    "ep_bootstrap_nccl": (c_int, [c_void_p, POINTER(EpBootstrap)]),
    "ep_bootstrap_destroy": (None, [POINTER(EpBootstrap)]),
    "ep_poll_abort": (c_int, []),
    "ep_group_create": (c_int, [POINTER(EpBootstrap), POINTER(EpGroupConfig), POINTER(c_void_p)]),
    "ep_group_destroy": (None, [c_void_p]),
    "ep_group_abort": (c_int, [c_void_p, c_char_p]),
    "ep_group_query": (c_int, [c_void_p, POINTER(EpGroupInfo)]),
    "ep_group_relay": (c_int, [c_void_p, c_int32, POINTER(c_int32)]),
    "ep_group_status": (c_int, [c_void_p, POINTER(EpFinding)]),
    "ep_group_memory": (c_int, [POINTER(EpGroupConfig), c_int32, POINTER(EpGroupMemory)]),
    "ep_expert_range": (c_int, [c_int32, c_int32, c_int32, POINTER(c_int32), POINTER(c_int32)]),
    "ep_max_recv_rows": (
        c_int,
        [POINTER(EpGroupConfig), c_int32, c_int32, c_int, c_uint, POINTER(c_int64)],
    ),
    "ep_mem_alloc": (c_int, [c_void_p, c_size_t, POINTER(c_void_p)]),
    "ep_mem_free": (c_int, [c_void_p, c_void_p]),
    "ep_window_register": (c_int, [c_void_p, c_void_p, c_size_t]),
    "ep_window_deregister": (c_int, [c_void_p, c_void_p]),
    "ep_window_adopt": (c_int, [c_void_p, c_void_p, c_int32, c_void_p, c_size_t]),
    "ep_window_release": (c_int, [c_void_p, c_void_p]),
    "ep_window_locate": (c_int, [c_void_p, c_void_p, POINTER(c_void_p), POINTER(c_size_t)]),
    "ep_handle_memory": (c_int, [c_void_p, POINTER(EpHandleConfig), POINTER(c_size_t)]),
    "ep_handle_cost": (c_int, [c_void_p, POINTER(EpHandleConfig), POINTER(EpHandleCost)]),
    "ep_handle_create": (c_int, [c_void_p, POINTER(EpHandleConfig), POINTER(c_void_p)]),
    "ep_handle_destroy": (None, [c_void_p]),
    "ep_handle_plan": (c_int, [c_void_p, _tensor]),
    "ep_handle_info": (c_int, [c_void_p, POINTER(EpHandleInfo)]),
    "ep_plan_sources": (c_int, [c_void_p, _tensor, c_void_p, c_int64, c_void_p, c_void_p]),
    "ep_prepare": (
        c_int,
        [c_void_p, _tensor, _tensor, _tensor, c_void_p, POINTER(EpPlanTensors)],
    ),
    "ep_dispatch": (
        c_int,
        [c_void_p, _tensor, POINTER(EpPrepare), *[_tensor] * 3, c_void_p, *[_tensor] * 4],
    ),
    "ep_combine": (c_int, [c_void_p, *[_tensor] * 4, c_void_p, _tensor]),
    "ep_dispatch_backward": (c_int, [c_void_p, *[_tensor] * 3, c_void_p, *[_tensor] * 2]),
    "ep_combine_backward": (c_int, [c_void_p, *[_tensor] * 4, c_void_p, *[_tensor] * 2]),
    "ep_dispatch_send": (
        c_int,
        [c_void_p, _tensor, POINTER(EpPrepare), *[_tensor] * 3, c_void_p],
    ),
    "ep_dispatch_wait": (c_int, [c_void_p, c_void_p, *[_tensor] * 4]),
    "ep_combine_send": (c_int, [c_void_p, *[_tensor] * 4, c_void_p]),
    "ep_combine_wait": (c_int, [c_void_p, c_void_p, _tensor]),
    "ep_settings": (c_int, [VISIT, c_void_p]),
    # ep_mesh.h
    "ep_mesh_parse": (c_int, [c_char_p, POINTER(EpMesh)]),
    "ep_mesh_ranks": (c_int, [_mesh, POINTER(c_int32)]),
    "ep_mesh_axes": (c_int, [_mesh, c_char_p, _axes]),
    "ep_mesh_role_axes": (c_int, [_mesh, c_int, _axes]),
    "ep_mesh_coordinates": (c_int, [_mesh, c_int32, POINTER(c_int32)]),
    "ep_mesh_group": (c_int, [_mesh, _axes, c_int32, *[POINTER(c_int32)] * 3]),
    "ep_bootstrap_mesh": (
        c_int,
        [POINTER(EpBootstrap), _mesh, _axes, POINTER(EpBootstrap)],
    ),
    "ep_spec_parse": (c_int, [_mesh, c_char_p, _spec]),
    "ep_spec_format": (c_int, [_mesh, _spec, c_char_p, c_size_t]),
    "ep_spec_shard": (
        c_int,
        [_mesh, _spec, c_char_p, POINTER(c_int64), c_int32, *[POINTER(c_int64)] * 2],
    ),
    "ep_sharding": (
        c_int,
        [_mesh, _spec, c_int, c_char_p, POINTER(c_int64), POINTER(EpSharding)],
    ),
    "ep_sharding_format": (c_int, [_mesh, POINTER(EpSharding), c_char_p, c_size_t]),
    # ep_quant.h
    "ep_quantise_rows": (
        c_int,
        [c_void_p, c_void_p, _tensor, _tensor, c_void_p, _tensor, _tensor],
    ),
    # ep_weight.h, whose structs are opaque here
    "ep_mesh_comm_create": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "ep_mesh_comm_abort": (c_int, [c_void_p, c_char_p]),
    "ep_mesh_comm_status": (c_int, [c_void_p]),
    "ep_mesh_comm_destroy": (None, [c_void_p]),
    "ep_weight_create": (c_int, [c_void_p, c_void_p, c_void_p]),
    "ep_weight_destroy": (None, [c_void_p]),
    "ep_weight_sharding": (c_int, [c_void_p, c_void_p]),
    "ep_weight_sizes": (c_int, [c_void_p, c_void_p, c_void_p]),
    "ep_weight_gather": (
        c_int,
        [c_void_p, c_void_p, _tensor, _tensor, c_void_p, _tensor, _tensor],
    ),
    "ep_weight_reduce": (c_int, [c_void_p, _tensor, c_int, _tensor, c_void_p, _tensor]),
    "ep_weight_amax": (c_int, [c_void_p, c_int, c_void_p, _tensor]),
}


def declare(library: ctypes.CDLL) -> None:
    """Give every function of the library its types."""
    for name, (returned, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = returned
        function.argtypes = arguments
