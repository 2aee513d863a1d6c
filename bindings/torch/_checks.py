# SPDX-License-Identifier: Apache-2.0
"""Arguments that are refused, with sentences. Calls come here when a quicker test failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad

from .._abi import Status
from .._library import EpError
from ._handle import Handle

if TYPE_CHECKING:
    from typing import Any, NoReturn

    from torch import Tensor


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def require_handle(handle: object) -> None:
    """TypeError unless it is a handle of libep.torch."""
    if not isinstance(handle, Handle):
        raise TypeError(f"handle: expected a libep.torch.Handle, got {_kind(handle)}")


def require_tensor(name: str, value: Any) -> None:
    """TypeError unless the argument `name` is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {_kind(value)}")


def refuse_plan(plan: object) -> NoReturn:
    """Raise TypeError for what is given in the place of a plan."""
    hint = ": give its plan" if hasattr(plan, "plan") else ""
    raise TypeError(f"plan: expected a libep.torch.Plan, got {_kind(plan)}{hint}")


def require_usable(name: str, value: Any) -> None:
    """Refuse what is no tensor, and tensors that libep would read wrongly."""
    require_tensor(name, value)
    refuse_derivatives(name, value)
    refuse_layout(name, value)
    refuse_negative(name, value)


_OF_FUNC = (
    "torch.func: expected a call outside of grad, jvp, vmap and other transforms, which libep does "
    "not support, got one inside: use torch.autograd"
)


def refuse_transforms() -> None:
    """EpError inside of a transform of torch.func, which PyTorch itself refuses less clearly."""
    if torch._C._are_functorch_transforms_active():
        raise EpError(Status.UNSUPPORTED, _OF_FUNC)


def refuse_derivatives(name: str, tensor: Tensor) -> None:
    """EpError for tensors of torch.func, and those that carry a tangent of forward mode."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise EpError(Status.UNSUPPORTED, _OF_FUNC)
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise EpError(
            Status.UNSUPPORTED,
            f"{name}: expected a tensor without tangent, got one of forward-mode derivatives, "
            "which libep does not have: use backward",
        )


def refuse_layout(name: str, tensor: Tensor) -> None:
    """TypeError for sparse tensors and others that are no rows in memory."""
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got one of layout {tensor.layout}")


def refuse_negative(name: str, tensor: Tensor) -> None:
    """TypeError for a view whose memory holds the negative of its elements."""
    if tensor.is_neg():
        raise TypeError(
            f"{name}: expected a tensor whose memory holds its elements, got a negated view: call "
            "resolve_neg()"
        )
