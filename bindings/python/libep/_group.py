# SPDX-License-Identifier: Apache-2.0
"""Groups: the ranks that share experts, and the memory that they reach."""

from __future__ import annotations

from _thread import allocate_lock, get_ident
from ctypes import byref, c_int32, c_size_t, c_uint32, c_void_p, create_string_buffer, sizeof
from time import time
from typing import TYPE_CHECKING, NamedTuple

from . import _abi, _process
from ._abi import Backend, Blocks, CopyChoice, Mode, Quant, ScaleOrder, Status
from ._bootstrap import Bootstrap
from ._config import group_config
from ._library import EpError, OfProcess, check, library, public_name
from ._tensor import read, written

if TYPE_CHECKING:
    from ctypes import Array
    from typing import Any, Callable, Iterable, Optional, Sequence, TypeVar

    from typing_extensions import Self, Unpack

    from ._config import GroupFields
    from ._tensor import TensorLike

    AnyGroup = TypeVar("AnyGroup", bound="Shared")


class GroupInfo(NamedTuple):
    """Facts about a group. See EpGroupInfo in ep.h."""

    rank: int
    size: int
    num_experts: int
    first_expert: int
    num_local_experts: int
    backend: Backend
    node: int
    num_nodes: int
    numa_node: int
    num_cpus: int
    library_bytes: int
    device: int
    bound: bool
    gpu: str
    reason: str
    mode: Mode
    within: str
    between: str
    num_physical: int
    choice: CopyChoice
    tuning: str


class GroupMemory(NamedTuple):
    """The memory that a configuration takes, in bytes per rank, and whether it is feasible."""

    feasible: bool
    backend: Backend
    shared_bytes: int
    private_bytes: int
    handle_bytes: int
    reason: str


class Finding(NamedTuple):
    """What Group.status found; numbers that do not apply are -1. See EpFinding in ep.h."""

    status: Status
    sentence: str
    rank: int
    peer: int
    token: int
    k: int
    expected: int
    seen: int
    count: int  # type: ignore[assignment]
    phase: str


class Located(NamedTuple):
    """Where a window lies: its start, and the bytes from there to the end of its allocation."""

    memory: int
    bytes: int


class Shared(OfProcess):
    """What all ranks create and close together, one thread at a time in its calls."""

    kind: str = "group"
    """How sentences and the functions of the library name it."""

    is_thread: bool
    """Whether its ranks are threads of this process."""

    caller: int = 0
    """The thread that is in a call on it, or 0."""

    began: float = 0.0
    """When that call began, by time.time()."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        self.bootstrap = bootstrap
        self.rank, self.size = bootstrap.rank, bootstrap.size
        self.is_thread = bootstrap.is_thread
        self._lock = allocate_lock()
        self._lost = "is closed"
        self.pointer: Optional[int] = None

    # ---- calls --------------------------------------------------------------------------------

    def require(self) -> int:
        """The address of what the library made. EpError if it is closed."""
        if self.pointer is None:
            raise EpError(Status.DESTROYED, f"rank {self.rank}: the {self.kind} {self._lost}")
        return self.pointer

    def run(self, function: Callable[..., int], *arguments: object) -> int:
        """Call a function of the library on it, alone, and return its status."""
        if not self._lock.acquire(False):
            raise self._second_caller(function)
        self.began = time()
        self.caller = get_ident()
        try:
            return function(*arguments)
        finally:
            self.caller = 0
            self._lock.release()

    def _second_caller(self, function: Callable[..., int]) -> RuntimeError:
        return RuntimeError(
            f"rank {self.rank}: expected one thread at a time in the {self.kind}'s calls, got a "
            f"{function.__name__} while another thread is in a call"
        )

    def _collective(self, function: Callable[..., int], *arguments: object) -> None:
        status = self.run(function, self.require(), *arguments)
        self.bootstrap.check(status)

    def call(self, function: Callable[..., int], *arguments: object) -> None:
        """Call a function of the library on it. EpError if it fails."""
        check(self.run(function, *arguments))

    # ---- the end ------------------------------------------------------------------------------

    def abort(self, sentence: str) -> None:
        """End all waits of this rank, now and later; peers get the sentence.

        Any thread may call it. Does not wait. The first abort counts. Does nothing once it is
        closed.
        """
        pointer = self.pointer
        if pointer is not None:
            getattr(library, f"ep_{self.kind}_abort")(pointer, sentence.encode())

    def close(self) -> None:
        """Destroy it, with its handles or weights. A second call does nothing.

        Each rank waits, up to the deadline, until its peers close it, too. What has failed or
        was aborted is closed at once.
        """
        if self.pointer is not None:
            self.run(self._destroy)
            self.bootstrap.check(Status.OK)

    def _destroy(self) -> int:
        try:
            getattr(library, f"ep_{self.kind}_destroy")(self.pointer)
        finally:
            self.lose("is closed")
            _process.open_groups.pop(self, None)
        return Status.OK

    def leave(self) -> None:
        """Close it at the end of the process, unless a thread is still in a call on it."""
        if not self.caller:
            self.close()

    def lose(self, why: str) -> None:
        """Forget it, without destroying it. Later calls raise EpError with this reason."""
        self.pointer = None
        self._lost = why

    def __enter__(self: AnyGroup) -> AnyGroup:
        return self

    def __exit__(self, kind: object, error: Optional[BaseException], _: object) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()


class Group(Shared):
    """A set of ranks that share experts. Creating and closing it are collective.

    bootstrap  how the ranks meet; the group keeps it alive
    fields     the configuration: see GroupFields

    Waits for the other ranks, up to the deadline. A failure on any rank is an EpError on all. One
    thread at a time uses a group; abort alone may be called by any thread.

    A group stays open until close(), or the end of the `with` block: it is not closed when the last
    reference goes, since ranks close it together. If the block ends by an exception, the group is
    aborted first, and the peers get the exception's text.
    """

    _enter: Callable[..., int] = library.ep_group_create

    def __init__(self, bootstrap: Bootstrap, **fields: Unpack[GroupFields]) -> None:
        config, out = group_config(fields), c_void_p()
        bootstrap.require_open()
        super().__init__(bootstrap)
        self.orphans: list[int] = []
        """Handles that were dropped without close(). See Handle.__del__."""
        bootstrap.check(self._enter(byref(bootstrap.struct), byref(config), byref(out)))
        self.pointer = out.value
        _process.add(self)
        info = self.query()
        self.rank, self.size = info.rank, info.size
        self.facts = (
            f"backend {info.backend.name.lower()}, {config.num_experts} experts, "
            f"{info.num_local_experts} of them here from {info.first_expert} on, at most "
            f"{config.max_tokens} tokens, top-{config.max_top_k}, rows of up to "
            f"{config.max_row_bytes} bytes"
        )
        """What the group was made for, in words."""

    @classmethod
    def join(cls, bootstrap: Bootstrap, **fields: Unpack[GroupFields]) -> Self:
        """Take a place in a group that exists: `place`, which is empty, or whose rank is masked.

        bootstrap  of the living ranks, which call admit(), and all newcomers, in order of place.
                   It may be closed once this group is closed, or has admitted others
        fields     the group's configuration, with max_ranks, and this rank's place

        This rank is masked until mask(). See ep_group_admit.
        """
        group = cls.__new__(cls)
        group._enter = library.ep_group_join
        cls.__init__(group, bootstrap, **fields)
        return group

    def admit(self, bootstrap: Bootstrap) -> None:
        """Let newcomers take places of the group, which has max_ranks. They call join().

        bootstrap  of all ranks that shall go on, and the newcomers, in order of place. The group
                   keeps it alive, in place of the one that it had

        Newcomers are masked until mask(). On an EpError the group is as it was. See ep_group_admit.
        """
        bootstrap.require_open()
        bootstrap.check(self.run(library.ep_group_admit, self.require(), byref(bootstrap.struct)))
        self.bootstrap = bootstrap

    def __repr__(self) -> str:
        end = "" if self.pointer is not None else f"; it {self._lost}"
        return f"<{public_name(self)}: rank {self.rank} of {self.size}, {self.facts}{end}>"

    # ---- facts --------------------------------------------------------------------------------

    def query(self) -> GroupInfo:
        """Read the facts about the group. Local."""
        info = _abi.initialized(_abi.EpGroupInfo)
        self.call(library.ep_group_query, self.require(), byref(info))
        values = {name: getattr(info, name) for name in GroupInfo._fields}
        values.update(
            backend=Backend(info.backend),
            bound=bool(info.bound),
            mode=Mode(info.mode),
            choice=CopyChoice(info.choice),
            gpu=info.gpu.decode(),
            reason=info.reason.decode(),
            within=info.within.decode(),
            between=info.between.decode(),
            tuning=info.tuning.decode(),
        )
        return GroupInfo(**values)

    def tuning(self) -> str:
        """Return the constants by which kernels divide their blocks, as LIBEP_TUNING reads them."""
        text = create_string_buffer(_abi.TUNING_BYTES)
        self.call(library.ep_group_tuning, self.require(), text, len(text))
        return text.value.decode()

    def relay(self, node: int) -> int:
        """On several nodes of GPUs, the rank of a node to which this rank sends. Local."""
        rank = c_int32()
        self.call(library.ep_group_relay, self.require(), node, byref(rank))
        return rank.value

    def mask(self, alive: Iterable[int], stream: int = 0) -> None:
        """Make these ranks the ones that take part, this rank among them. See ep_group_mask.

        All of them call it, with the same ranks; the others are not asked. It ends a suspension: in
        a group with `masks=1` a missing rank is an EpError with Status.TIMEOUT in this and all
        later operations. An EpError of this call leaves the ranks as they were.
        """
        words = self._words()
        for rank in alive:
            if not 0 <= rank < self.size:
                raise ValueError(f"expected ranks 0 .. {self.size - 1}, got {rank}")
            words[rank // 32] |= 1 << rank % 32
        self.call(library.ep_group_mask, self.require(), words, c_void_p(stream))

    def cut(self, rank: int, stream: int = 0) -> None:
        """Go on without a rank until the next mask(), on this rank alone. See ep_group_cut. Local."""
        self.call(library.ep_group_cut, self.require(), rank, c_void_p(stream))

    def alive(self) -> list[int]:
        """The ranks that take part, without those that this rank has cut. Local."""
        words = self._words()
        self.call(library.ep_group_alive, self.require(), words)
        return [rank for rank in range(self.size) if words[rank // 32] >> rank % 32 & 1]

    def _words(self) -> Array[c_uint32]:
        return (c_uint32 * ((self.size + 31) // 32))()

    def status(self) -> Finding:
        """Find what went wrong since the last query, without waiting. Status.OK: nothing.

        Routing errors and overflows are reported once. A failed group stays failed. Call it once a
        step, or where the loss is read.
        """
        finding = _abi.initialized(_abi.EpFinding)
        status = self.run(library.ep_group_status, self.require(), byref(finding))
        sentence = library.ep_last_error().decode() if status else ""
        values = {name: getattr(finding, name) for name in Finding._fields if name != "sentence"}
        values.update(status=Status(status), phase=finding.phase.decode())
        return Finding(sentence=sentence, **values)

    @staticmethod
    def memory(num_ranks: int, **fields: Unpack[GroupFields]) -> GroupMemory:
        """Compute the memory of a group of `num_ranks` ranks. Local; allocates nothing."""
        config, memory = group_config(fields), _abi.initialized(_abi.EpGroupMemory)
        check(library.ep_group_memory(byref(config), num_ranks, byref(memory)))
        values = {name: getattr(memory, name) for name in GroupMemory._fields}
        values.update(
            feasible=bool(memory.feasible),
            backend=Backend(memory.backend),
            reason=memory.reason.decode(),
        )
        return GroupMemory(**values)

    # ---- placement ----------------------------------------------------------------------------

    def place(self, map: TensorLike, *, stream: int = 0) -> None:
        """Place the experts anew, in a group with num_physical. Collective. See ep_group_place.

        map  INT32 [num_physical]: the expert that each place holds, or -1; equal on all ranks. It
             is read when the stream gets there.
        """
        self.call(library.ep_group_place, self.require(), read(map, "map"), stream)

    def move_weights(
        self,
        before: Sequence[int],
        after: Sequence[int],
        weights: Sequence[TensorLike],
        *,
        out: Optional[Sequence[TensorLike]] = None,
        workspace: Optional[TensorLike] = None,
        stream: int = 0,
    ) -> None:
        """Move experts' weights from one placement to another. Collective. See ep_weight_move.

        before, after  the expert that each of the num_physical places holds, and shall hold, or -1;
                       equal on all ranks, and read at once
        weights        tensors [num_local_experts, ...] of any type: row i is of place i
        out            tensors like them, for the rows by `after`; None: `weights`, in place
        workspace      UINT8, as long on all ranks; in place only
        """
        places = self.query().num_physical
        for name, map in ("before", before), ("after", after):
            if len(map) != places:
                raise ValueError(f"{name}: expected {places} numbers, got {len(map)}")

        def convert(name: str, given: Sequence[TensorLike], how: Any) -> list[_abi.EpTensor]:
            return [how(each, f"{name}[{i}]") for i, each in enumerate(given)]

        moved = convert("weights", weights, written if out is None else read)
        outs = None if out is None else convert("out", out, written)
        if outs is not None and len(outs) != len(moved):
            raise ValueError(f"out: expected {len(moved)} tensors, got {len(outs)}")
        tensors = _abi.EpTensor * len(moved)
        self.call(
            library.ep_weight_move,
            self.require(),
            (c_int32 * places)(*before),
            (c_int32 * places)(*after),
            tensors(*moved),
            len(moved),
            written(workspace, "workspace"),
            stream,
            None if outs is None else tensors(*outs),
        )

    # ---- memory that peers reach --------------------------------------------------------------

    def mem_alloc(self, bytes: int) -> int:
        """Allocate zeroed memory that all ranks reach, aligned to 128; return its address.

        Collective. Free it with mem_free; closing the group frees it, too.
        """
        out = c_void_p()
        self._collective(library.ep_mem_alloc, bytes, byref(out))
        assert out.value is not None
        return out.value

    def mem_free(self, memory: int) -> None:
        """Free memory from mem_alloc. Collective."""
        self._collective(library.ep_mem_free, memory)

    def window_register(self, memory: int, bytes: int) -> None:
        """Let peers reach memory of the caller, in place. Collective; see ep.h for which memory."""
        self._collective(library.ep_window_register, memory, bytes)

    def window_deregister(self, memory: int) -> None:
        """End a registration. Collective."""
        self._collective(library.ep_window_deregister, memory)

    def window_adopt(self, window: int, id: int, memory: int, bytes: int) -> None:
        """Use a window (ncclWindow_t) of the lent communicator, under a name `id`. Local.

        id  the same on all ranks; or WINDOW_PAIRED, where ranks receive in the window together
        """
        self.call(library.ep_window_adopt, self.require(), window, id, memory, bytes)

    def window_release(self, memory: int) -> None:
        """Give an adopted window up. Local."""
        self.call(library.ep_window_release, self.require(), memory)

    def window_locate(self, window: int) -> Located:
        """Find where a window (ncclWindow_t) of the lent communicator lies. Local."""
        memory, size = c_void_p(), c_size_t()
        self.call(library.ep_window_locate, self.require(), window, byref(memory), byref(size))
        return Located(memory.value or 0, size.value)

    # ---- quantising ---------------------------------------------------------------------------

    def quantise_rows(
        self,
        rows: TensorLike,
        num_rows: Optional[TensorLike] = None,
        *,
        out: TensorLike,
        scales: TensorLike,
        quant: Quant = Quant.FP8,
        blocks: Blocks = Blocks.ROWS,
        transposed: bool = False,
        scale_order: ScaleOrder = ScaleOrder.BY_ROW,
        stream: int = 0,
    ) -> None:
        """Quantise receive rows, or what the experts made of them, to e4m3. Local.

        rows        [N, H], or [L, P, H] with a slab for each expert; BF16, FP16 or FP32
        num_rows    [1], or [L]: how many rows are there; the others are left alone
        out         FP8_E4M3, of the shape of rows; transposed: its last two dimensions are swapped
        scales      FP32 or UINT8: see ep_quant.h for their shape
        transposed  for the gradient of a weight: blocks run along the rows
        """
        form = _abi.EpRowsForm(sizeof(_abi.EpRowsForm), quant, blocks, transposed, scale_order)
        self.call(
            library.ep_quantise_rows,
            self.require(),
            byref(form),
            read(rows, "rows"),
            read(num_rows, "num_rows"),
            stream,
            written(out, "out"),
            written(scales, "scales"),
        )
