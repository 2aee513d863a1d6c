# SPDX-License-Identifier: Apache-2.0
"""Small tools that DeepEP's own programs import."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing import Any, Callable, Optional

__all__ = ["value_or", "weak_lru"]

_T = TypeVar("_T")


def value_or(value: Optional[_T], default: _T) -> _T:
    """The value, or the default in place of None."""
    return default if value is None else value


def weak_lru(maxsize: Optional[int] = 128, typed: bool = False) -> Callable[..., Any]:
    """Cache the results of a method, of each object while it lives. Arguments of lru_cache."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        caches: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self not in caches:
                owner = weakref.proxy(self)
                bound = functools.partial(method, owner)
                caches[self] = functools.lru_cache(maxsize, typed)(bound)
            return caches[self](*args, **kwargs)

        return call

    return decorate
