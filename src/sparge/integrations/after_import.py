"""Something to do as soon as another package's module has been imported, without importing it for that."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def after_import(home: str, then: Callable[[], None]) -> None:
    """Call `then` now if the module `home` is there, else once it has been loaded."""
    if sys.modules.get(home) is not None:
        then()
    elif not any(isinstance(finder, AfterImport) and finder.home == home for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterImport(home, then))


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module as all other finders would, and acts once it has been loaded."""

    def __init__(self, home: str, then: Callable[[], None]) -> None:
        self.home, self.then = home, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.home:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_act(module: ModuleType) -> None:
            load(module)
            self.then()

        spec.loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec
