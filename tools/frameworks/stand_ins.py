# SPDX-License-Identifier: Apache-2.0
"""Stands in for what a release needs and a test does not have: compiled parts, other packages.

    vllm = stand_in(unpack("vllm"), hollow=["vllm", "vllm.config"], absent=["pydantic"])
    import vllm.config                                # has no name yet that a test does not set
    vllm.config.get_current_vllm_config = lambda: ...

A name that nobody has set is an Absent. It can be a base class, a decorator, a part of an
annotation, or be called, so that files which mention it are imported. Nothing useful comes of it.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from pathlib import Path


class Absent(type):
    """The type of names that are not there. Each is a class of its own."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = absent(f"{cls.__qualname__}.{name}")
        setattr(cls, name, made)
        return made

    def __call__(cls, *given, **named):
        if "is_absent" not in vars(cls):
            return super().__call__(*given, **named)  # a class of the release, derived from it
        is_decorator = len(given) == 1 and not named and callable(given[0])
        return given[0] if is_decorator else cls

    def __or__(cls, _):
        return cls

    __ror__ = __getitem__ = __or__

    def __iter__(cls):
        return iter(())


def absent(name):
    return Absent(name, (), {"is_absent": True})


class _Module(types.ModuleType):
    __all__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = absent(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, folder, hollow, roots, real):
        self._folder, self._hollow, self._roots = Path(folder), set(hollow), set(roots)
        self._real, self._packages = set(real), {name.partition(".")[0] for name in real}

    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        is_hollow = name in self._hollow or root in self._packages
        if name in self._real or not (is_hollow or root in self._roots):
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        if is_hollow:
            spec.submodule_search_locations = [str(self._folder.joinpath(*name.split(".")))]
        return spec

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def stand_in(folder, hollow=(), absent=(), real=()):
    """Let imports find a release.

    folder  with the release's files
    hollow  modules of the release whose own file is not run; modules below them are the release's
    absent  packages of others that are not installed
    real    modules of a release whose other modules are all hollow
    """
    missing = [name for name in absent if name not in sys.modules and not _is_installed(name)]
    sys.meta_path.insert(0, _Finder(folder, hollow, missing, real))
    sys.path.append(str(folder))


def _is_installed(name):
    return importlib.machinery.PathFinder.find_spec(name) is not None
