"""Which pyverbs fits this Python, and loading it: only when somebody wants RDMA.

There are two. PyPI's is built against rdma-core's headers and wants libraries of the same age; Debian's
`python3-pyverbs` fits the libraries of its Debian, and any CPython of the version it was built for, also one in a
virtual environment, which does not look there.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from kvbm.core.errors import VerbsError

DEBIAN = Path("/usr/lib/python3/dist-packages")
INSTALL = (
    "apt-get install python3-pyverbs ibverbs-providers (for Debian's own Python version), or pip install "
    "'Cython<3.1' pyverbs "
    "where rdma-core's libraries are as new"
)
_PARTS = ("addr", "cq", "device", "enums", "mr", "pd", "qp", "wr")
_LOADING = threading.Lock()


class Pyverbs(NamedTuple):
    """What is used of pyverbs: its modules, untyped."""

    addr: Any
    cq: Any
    device: Any
    enums: Any
    mr: Any
    pd: Any
    qp: Any
    wr: Any
    error: type[Exception]


class Fit(NamedTuple):
    """Which pyverbs this Python can use.

    Attributes:
        where: its folder; None: none fits.
        origin: "environment" or "Debian"; empty: none fits.
        why_not: of those found that do not fit, in words.
    """

    where: Path | None
    origin: str
    why_not: str


def load_pyverbs(debian: Path = DEBIAN) -> Pyverbs:
    """The modules, imported once. Raises VerbsError: none fits; installing one helps."""
    with _LOADING:
        fit = find_pyverbs(debian)
        if fit.where is None:
            raise VerbsError(f"RDMA needs pyverbs: {fit.why_not}; {INSTALL}")
        try:
            if fit.origin == "Debian":
                _take_in(fit.where)
            parts = [importlib.import_module(f"pyverbs.{part}") for part in _PARTS]
            errors = importlib.import_module("pyverbs.pyverbs_error")
        except ImportError as error:
            raise VerbsError(f"RDMA needs pyverbs, and {fit.where} cannot be loaded: {error}; {INSTALL}") from None
        loaded: list[Any] = [*parts, errors.PyverbsError]
        return Pyverbs(*loaded)


def find_pyverbs(debian: Path = DEBIAN) -> Fit:
    """Look which one there is, importing nothing: the environment's before Debian's."""
    complaints: list[str] = []
    for origin, folder in (("environment", _of_environment()), ("Debian", debian / "pyverbs")):
        if folder is None or not folder.is_dir() or (origin == "environment" and folder == debian / "pyverbs"):
            continue  # once Debian's is loaded, imports find it as any other
        if any((folder / f"device{suffix}").is_file() for suffix in EXTENSION_SUFFIXES):
            return Fit(folder, origin, "; ".join(complaints))
        built = ", ".join(sorted(path.name for path in folder.glob("device*.so"))) or "no extension modules"
        version = ".".join(map(str, sys.version_info[:2]))
        complaints.append(f"{folder} is for another Python ({built}; this is CPython {version})")
    return Fit(None, "", "; ".join(complaints) or "it is not installed")


def _of_environment() -> Path | None:
    loaded = sys.modules.get("pyverbs")
    if loaded is not None and loaded.__file__:
        return Path(loaded.__file__).parent
    try:
        spec = importlib.util.find_spec("pyverbs")
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _take_in(folder: Path) -> ModuleType:
    """Import this one package from a folder that is not on the path, for its other packages would be for another
    Python.
    """
    loaded = sys.modules.get("pyverbs")
    if loaded is not None:
        return loaded
    spec = importlib.util.spec_from_file_location(
        "pyverbs", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is no package")
    package = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = package
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules["pyverbs"]
        raise
    return package
