# SPDX-License-Identifier: Apache-2.0
"""The operations: the one table from which handles, PyTorch and JAX make their calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ._abi import FUNCTIONS
from ._library import library
from ._tensor import read, written

if TYPE_CHECKING:
    from typing import Any, Callable, TypeVar

    Method = TypeVar("Method", bound=Callable[..., None])


COUNTERS = ("expert_tokens", "peer_rows", "peer_bytes", "peer_wait_ns", "peer_longest_wait_ns")
"""Counters of the caller's, which every operation may be given, behind its outputs: see Extras."""


class Argument(NamedTuple):
    """A tensor of an operation."""

    name: str
    kind: str
    """Of inputs: "plan", "rows" (scales, too), "gradient" (rows that a framework may have put
    anywhere), "weights", "bias" (in EpExtras), "indices", "kept" (indices that a later call may
    read again), or "plain" (no tensor). Of outputs: "plan", "numbers" (the outputs of prepare), or
    "output"."""
    is_required: bool


class Operation(NamedTuple):
    """An operation, one of its phases, or one of a sharded weight. Its arguments are its inputs, then its outputs."""

    name: str
    function: str
    """The function of ep.h, without ep_."""
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    backward: str
    """The operation that is its derivative, or ""."""

    @property
    def is_phase(self) -> bool:
        return self.name.endswith(("_send", "_wait"))

    def of_kind(self, *kinds: str) -> list[int]:
        """The places of the arguments of these kinds."""
        places = enumerate(self.inputs + self.outputs)
        return [place for place, argument in places if argument.kind in kinds]


def _arguments(text: str, kind: str) -> tuple[Argument, ...]:
    """From words "name:kind?"; those with "?" may be left out."""
    found = []
    for word in text.split():
        name, _, own = word.rstrip("?").partition(":")
        own = own or ("plan" if name == "plan" else kind)
        found.append(Argument(name, own, not word.endswith("?")))
    return tuple(found)


def _operation(
    name: str, inputs: str, outputs: str, backward: str = "", function: str = ""
) -> Operation:
    given = _arguments(inputs, "rows"), _arguments(outputs, "output")
    return Operation(name, function or name, *given, backward)


_ROUTING = "topk_idx:indices num_tokens:indices?"
_TOKENS = "tokens topk_weights:weights? scales?"
_RECEIVED = "recv_tokens recv_topk_weights? recv_scales? recv_topk_idx?"
_ROWS = "plan expert_out slot_weights:weights? topk_weights:weights?"
_BIASES = "bias0:bias? bias1:bias?"

OPERATIONS = {
    operation.name: operation
    for operation in (
        _operation("prepare", "topk_idx:kept num_tokens:kept?", "plan numbers:numbers?"),
        _operation("dispatch", f"plan {_TOKENS}", _RECEIVED, "dispatch_backward"),
        # In latency mode dispatch may prepare by itself.
        _operation(
            "dispatch_routed",
            f"{_ROUTING} {_TOKENS}",
            f"plan numbers:numbers? {_RECEIVED}",
            function="dispatch",
        ),
        _operation("combine", f"{_ROWS} {_BIASES}", "out", "combine_backward"),
        _operation(
            "combine_backward",
            "plan grad_out:gradient slot_weights:weights? expert_out?",
            "grad_expert_out grad_slot_weights?",
        ),
        _operation(
            "dispatch_backward",
            "plan grad_recv_tokens:gradient grad_slot_weights:weights?",
            "grad_tokens grad_topk_weights?",
        ),
        _operation("dispatch_send", f"{_ROUTING} {_TOKENS}", "plan numbers:numbers?"),
        _operation("dispatch_wait", "", _RECEIVED),
        _operation("combine_send", _ROWS, ""),
        _operation("combine_wait", _BIASES, "out"),
    )
}

WEIGHTS = {
    operation.name: operation
    for operation in (
        _operation("gather", "form:plain shard workspace?", "out scales?", "", "weight_gather"),
        _operation("reduce", "grad accumulate:plain workspace?", "out", "", "weight_reduce"),
        _operation("amax", "scope:plain", "amax", "", "weight_amax"),
    )
}
"""Those of a sharded weight, of ep_weight.h. Their functions stand for one method each."""

SCALES = {
    "dispatch": "global_scale",
    "dispatch_routed": "global_scale",
    "dispatch_send": "global_scale",
    "combine_backward": "grad_scales",
}
"""The scales that an operation may be given, in Extras: global_scale is read, grad_scales written."""


def _is_own(argument: Argument) -> bool:
    """Whether a function has the argument by itself, and not in EpPrepare."""
    return argument.kind in ("rows", "gradient", "weights", "output", "plain")


def compile_call(parameters: list[str], body: str, **names: Any) -> Any:
    """A function of one line of text. A loop over the table would take as long as the call."""
    exec(f"def call({', '.join(parameters)}): {body}", names)
    return names["call"]


def calls_library(method: Method) -> Method:
    """Let a method of Handle or Weight call its function. Its own lines say types and words.

    All functions have their arguments in one order: the plan, EpPrepare, inputs, stream, outputs,
    EpExtras.
    """
    name = method.__name__
    operation = OPERATIONS.get(name) or WEIGHTS[name]
    called = f"ep_{operation.function}"
    forms = [each for each in OPERATIONS.values() if each.function == name]
    inputs = [argument for argument in operation.inputs if _is_own(argument)]
    outputs = [argument for argument in operation.outputs if _is_own(argument)]
    has_plan = any(form.of_kind("plan") for form in forms)
    prepares = any(form.of_kind("indices") for form in forms)
    given = [
        each.name if each.kind == "plain" else f"read({each.name}, '{each.name}')"
        for each in inputs
    ]
    given = ["prepare"] * prepares + given
    if has_plan:
        # A dispatch that prepares writes the plan.
        given.insert(0, f"{'written' if prepares else 'read'}(plan, 'plan')")
    given += ["stream", *(f"written({each.name}, '{each.name}')" for each in outputs)]
    takes_extras = f"{called}_with" in FUNCTIONS
    given += ["extras"] * takes_extras
    taken = ["self", *map(_parameter, inputs), "*", *map(_parameter, outputs)]
    taken += ["plan=None"] * has_plan + ["prepare=None"] * prepares
    taken += ["extras=None"] * takes_extras + ["stream=0"]
    text = f"self._call(function, {', '.join(given)})"
    if operation.is_phase:
        text += f"; self._sent = {'prepare' if prepares else None}"
    function = getattr(library, f"{called}_with" if takes_extras else called)
    call = compile_call(taken, text, function=function, read=read, written=written)
    call.__wrapped__ = method
    for what in ("__annotations__", "__doc__", "__module__", "__name__", "__qualname__"):
        setattr(call, what, getattr(method, what))
    result: Method = call
    return result


def _parameter(argument: Argument) -> str:
    return argument.name if argument.is_required else f"{argument.name}=None"
