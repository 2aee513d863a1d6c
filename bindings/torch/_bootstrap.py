# SPDX-License-Identifier: Apache-2.0
"""How ranks meet through torch.distributed."""

from __future__ import annotations

import itertools
import time
import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .._abi import Status
from .._bootstrap import Bootstrap
from .._library import EpError

if TYPE_CHECKING:
    from typing import Iterator, NoReturn, Optional, Union

    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

_FIRST_SECONDS, _MOST_SECONDS = 0.0005, 0.01  # between two looks into the store

_prefixes: weakref.WeakKeyDictionary[ProcessGroup, Iterator[str]] = weakref.WeakKeyDictionary()


def _make_prefixes(group: ProcessGroup) -> Iterator[str]:
    """The prefixes of the keys of a process group's bootstraps, the same on all ranks.

    A store may outlive process groups, and the next one of the same name must not read the keys of
    the last. So each rank counts in the store the process groups of this name that it has used.
    """
    name = f"libep/{group.group_name}"
    incarnation = group.get_group_store().add(f"{name}/uses/{dist.get_rank(group)}", 1)
    return (f"{name}/{incarnation}/{number}" for number in itertools.count())


def _member(process_group: Optional[ProcessGroup]) -> ProcessGroup:
    """The process group, or the default one."""
    if not dist.is_available():
        raise EpError(Status.BOOTSTRAP, "process_group: expected a PyTorch with torch.distributed")
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        _refuse_other(process_group)
    if not dist.is_initialized():
        raise EpError(
            Status.BOOTSTRAP,
            "process_group: expected an initialized torch.distributed, got one that is not: call "
            "init_process_group first",
        )
    group = dist.group.WORLD if process_group is None else process_group
    assert group is not None
    return group


def _refuse_other(given: object) -> NoReturn:
    if given == dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            "process_group: expected a ProcessGroup that this rank belongs to, got "
            "NON_GROUP_MEMBER: only its members create the group"
        )
    hint = ""
    if hasattr(given, "get_group"):
        hint = ': take one of its dimensions, such as mesh.get_group("ep")'
    elif isinstance(given, list):
        hint = ": give the element of this rank"
    raise TypeError(
        "process_group: expected a ProcessGroup that this rank belongs to, a libep.Bootstrap or "
        f"None, got {type(given).__module__}.{type(given).__qualname__}{hint}"
    )


def from_process_group(process_group: Optional[ProcessGroup] = None) -> Bootstrap:
    """Make a bootstrap from a process group, or from the default one. Not collective.

    Uses the store of the process group alone, never its collectives: so it serves every backend
    (gloo, nccl, ...), and a wait ends by an abort, Ctrl-C or the deadline. All ranks make their
    bootstraps of one process group in the same order. A store may serve one process group after the
    other, if all ranks use libep with the same ones. The bootstrap keeps the store alive; the
    process that serves the store (rank 0 of a TCPStore) ends last, or closes its groups with the
    others.
    """
    group = _member(process_group)
    store = group.get_group_store()
    if group not in _prefixes:
        _prefixes[group] = _make_prefixes(group)
    prefix = next(_prefixes[group])
    return _from_store(store, dist.get_rank(group), dist.get_world_size(group), prefix)


def from_store(store: Store, rank: int, size: int) -> Bootstrap:
    """Make a bootstrap from a store of torch.distributed that all ranks share. Not collective.

    All ranks make their bootstraps of one store in the same order. See from_process_group.
    """
    number = store.add(f"libep/store/uses/{rank}", 1)
    return _from_store(store, rank, size, f"libep/store/{number}")


def _from_store(store: Store, rank: int, size: int, prefix: str) -> Bootstrap:
    def get(key: str, seconds: float) -> Optional[bytes]:
        # Store.wait would log a warning for each of its timeouts.
        end, pause = time.monotonic() + seconds, _FIRST_SECONDS
        while not store.check([key]):
            if time.monotonic() >= end:
                return None
            time.sleep(pause)
            pause = min(2 * pause, _MOST_SECONDS)
        return bytes(store.get(key))

    return Bootstrap.from_store(
        rank,
        size,
        store.set,  # type: ignore[arg-type]
        get,
        store.delete_key,
        prefix=prefix,
    )


def nccl_comm(process_group: Union[ProcessGroup, Bootstrap, None]) -> int:
    """The NCCL communicator of a process group, an ncclComm_t as an int, to lend to libep.

    The process group needs one already: pass `device_id` to init_process_group, or run a collective
    before. It stays the process group's, which must outlive the libep group.
    """
    if isinstance(process_group, Bootstrap):
        raise TypeError("expected a ProcessGroup with an NCCL communicator, got a Bootstrap")
    group = _member(process_group)
    try:
        backend = group._get_backend(torch.device("cuda"))
        comm = int(backend._comm_ptr())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError) as error:
        raise EpError(
            Status.UNSUPPORTED,
            f"bootstrap: expected a process group of the backend nccl, got {group.name()!r}",
        ) from error
    if comm == 0:
        raise EpError(
            Status.ORDER,
            "bootstrap: expected a process group whose communicator exists, got one that has not "
            "run yet: pass device_id to init_process_group, or run a collective before",
        )
    return comm
