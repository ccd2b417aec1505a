"""Import stubs for GPU libraries that SGLang names while it is imported and never calls on a CPU.

Never computes anything: calling a stubbed operation raises, so that a path that would need a GPU is seen at once.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class StubClass(type):
    """A class whose every attribute exists: SGLang uses them as annotations, defaults and dictionary keys."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StubClass(name, (StubObject,), {})


class StubObject(metaclass=StubClass):
    def __init__(self, *_: Any, **__: Any) -> None: ...


class StubOperation:
    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} is a stub: this path needs a GPU")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(self)(f"{self.__name__}.{name}")


class StubDecorator(StubOperation):
    """`@jit` and `@jit(...)`: the kernel stays an ordinary function, which nothing launches."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function=None, *_, **__: function


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every submodule of `root` exists and has every attribute."""

    def __init__(self, root: str, attribute: Callable[[str], Any]) -> None:
        self._root = root
        self._attribute = attribute

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(self._root + ".") else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None: ...

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = self._attribute  # type: ignore[method-assign]
        module.__path__ = []


def install(root: str, operation: type[StubOperation] = StubOperation, classes: tuple[str, ...] = ()) -> Callable[[str], Any]:
    """Serve all of `root`; returns the module's `__getattr__`. A capital, or a name in `classes`, is a class."""

    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper() or name in classes:
            return StubClass(name, (StubObject,), {})
        return operation(f"{root}.{name}")

    sys.meta_path.insert(0, _Finder(root, attribute))
    return attribute
