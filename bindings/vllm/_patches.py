# SPDX-License-Identifier: Apache-2.0
"""What is replaced in vLLM: where it reads the name of the backend, and makes what that names."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, Literal, get_args

from .._abi import Status
from .._library import EpError

if TYPE_CHECKING:
    from typing import Callable, Optional

    Found = dict[str, Any]

STANDARD, BATCHED = BACKENDS = ("libep", "libep_batched")
"""Values of --all2all-backend: for experts of the Standard format, and of BatchedExperts."""


def patch(found: Found, names: dict[str, str]) -> None:
    """Add the backends. Twice does nothing more.

    found  what RELEASES names, by the keys there
    names  where it is
    """
    if set(BACKENDS) <= set(get_args(found["backend_type"])):
        return
    _offer_names(found["config"], found["backend_type"], names["backend_type"])
    _place_properties(found["config"], found["moe_config"])
    _allow_micro_batches(found["whole_config"])
    _make_managers(found["base"], found["communicator"])
    _replace(found["make"], _make_layers(found["make"], found["find_manager"]))
    _replace(found["round_hidden"], _keep_hidden(found["round_hidden"]))


def _offer_names(config: Any, kinds: Any, place: str) -> None:
    """Let the configuration and the command line take the names."""
    from pydantic.dataclasses import rebuild_dataclass

    field, kind = "all2all_backend", Literal[(*get_args(kinds), *BACKENDS)]
    module, _, name = place.rpartition(".")
    setattr(sys.modules[module], name, kind)
    config.__annotations__[field] = kind
    config.__dataclass_fields__[field].type = kind
    config.__pydantic_fields__[field].annotation = kind
    rebuild_dataclass(config, force=True)
    arguments = sys.modules.get("vllm.engine.arg_utils")
    if arguments is not None:
        arguments._compute_kwargs.cache_clear()


def _extend(kind: Any, name: str, applies: Callable[[Any], bool]) -> None:
    """Let a property of a class be true in other cases, too."""
    before = getattr(kind, name).fget
    setattr(kind, name, property(lambda self: before(self) or applies(self)))


def _place_properties(config: Any, moe_config: Any) -> None:
    """Say which of vLLM's cases the backends belong to.

    Rows of STANDARD have the form of deepep_v2's: global expert ids, -1 in rows that are not used.
    So what serves those rows serves these.
    """

    def spreads_sequences(self: Any) -> bool:
        is_wide: bool = self.tensor_parallel_size > 1 and self.data_parallel_size > 1
        return is_wide and self.enable_expert_parallel and self.all2all_backend in BACKENDS

    def is_batched(self: Any) -> bool:
        is_wide: bool = self.enable_expert_parallel and self.data_parallel_size > 1
        return is_wide and self.all2all_backend == BATCHED

    def uses(backend: str) -> Callable[[Any], bool]:
        return lambda self: self.use_all2all_kernels and self.all2all_backend == backend

    _extend(config, "use_sequence_parallel_moe", spreads_sequences)
    _extend(config, "use_batched_dp_moe", is_batched)
    _extend(moe_config, "use_deepep_v2_kernels", uses(STANDARD))
    _extend(moe_config, "use_batched_activation_format", uses(BATCHED))


def _allow_micro_batches(config: Any) -> None:
    """Let vLLM's check of the backends that run micro-batches pass: it knows three names."""
    before = config.__post_init__

    @functools.wraps(before)
    def post_init(self: Any, *given: Any) -> None:
        parallel = self.parallel_config
        backend = parallel.all2all_backend
        if backend not in BACKENDS or not parallel.use_ubatching:
            before(self, *given)
            return
        parallel.all2all_backend = "deepep_low_latency"
        try:
            before(self, *given)
        finally:
            parallel.all2all_backend = backend

    config.__post_init__ = post_init


def _make_managers(base: Any, communicator: Any) -> None:
    """Let the communicator of the expert-parallel group have a manager of ours."""
    base_init, own_init = base.__init__, communicator.__init__

    @functools.wraps(base_init)
    def init_base(self: Any, *given: Any, **named: Any) -> None:
        base_init(self, *given, **named)
        self.uses_libep = self.use_all2all and self.all2all_backend in BACKENDS
        if not self.uses_libep:
            return
        if not isinstance(self, communicator):
            raise EpError(
                Status.UNSUPPORTED,
                f"libep.vllm: all2all_backend {self.all2all_backend}: expected NVIDIA GPUs, got "
                f"{self.device}",
            )
        self.use_all2all = False  # vLLM's own choice of a manager does not know the name

    @functools.wraps(own_init)
    def init(self: Any, cpu_group: Any, *given: Any, **named: Any) -> None:
        own_init(self, cpu_group, *given, **named)
        if self.uses_libep:
            from ._manager import Manager

            self.use_all2all = True
            self.all2all_manager = Manager(cpu_group, named.get("tcp_store_group"))

    base.__init__, communicator.__init__ = init_base, init


def _make_layers(before: Any, find_manager: Any) -> Any:
    """maybe_make_prepare_finalize that knows our backends as well."""

    @functools.wraps(before)
    def make(moe: Any, *given: Any, all2all_manager: Optional[Any] = None, **named: Any) -> Any:
        parallel = moe.moe_parallel_config
        if not parallel.use_all2all_kernels or parallel.all2all_backend not in BACKENDS:
            return before(moe, *given, all2all_manager=all2all_manager, **named)
        manager = find_manager() if all2all_manager is None else all2all_manager
        return manager.make_layer(moe)

    return make


def _keep_hidden(before: Any) -> Any:
    """maybe_roundup_layer_hidden_size: libep takes any multiple of 16 bytes."""

    @functools.wraps(before)
    def round_hidden(hidden_size: int, act_dtype: Any, moe_parallel_config: Any) -> Any:
        if moe_parallel_config.all2all_backend in BACKENDS:
            return hidden_size
        return before(hidden_size, act_dtype, moe_parallel_config)

    return round_hidden


def _replace(old: Any, new: Any) -> None:
    """Put a function in the place of another, also in modules that have imported it by name."""
    name: str = old.__name__
    for place, module in list(sys.modules.items()):
        if place.startswith("vllm.") and vars(module).get(name) is old:
            setattr(module, name, new)
