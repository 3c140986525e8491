"""The stub of the extension module says what is there: names, members, parameters and their defaults.

mypy believes `kvbm/_native.pyi`, and that takes most signatures from protocols. What C++ says is in the signatures that
nanobind keeps with each function.
"""

from __future__ import annotations
import __future__

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, NamedTuple, Protocol

import pytest

from kvbm import _native
from kvbm.core.backend import LedgerProtocol, SequenceHashes

STUB = Path(__file__).parents[2] / "kvbm" / "_native.pyi"
_LATE = __future__.annotations.compiler_flag  # names in annotations may come later, as in any stub
_NO_MEMBERS = {"__init__", "__new__", "__subclasshook__"}


class Parameter(NamedTuple):
    """One of a function, `self` left out.

    Attributes:
        default: `inspect.Parameter.empty`: it must be given. `...`: there is one, and the stub does not say which.
    """

    name: str
    default: object = inspect.Parameter.empty

    def agrees(self, native: Parameter) -> bool:
        """Whether this, of the stub, is that of the module."""
        if self.default is ... and native.default is not inspect.Parameter.empty:
            return self.name == native.name
        return self == native


Parameters = list[Parameter]
ATTRIBUTE = "an attribute"
UNTOLD = "parameters that nobody tells"  # of `LedgerLock`, which is made without nanobind
Member = Parameters | str  # of a method; or one of these


class Declared(NamedTuple):
    """A function or class.

    Attributes:
        parameters: of the function, or of what makes the class; or UNTOLD. None: Python cannot make it.
        members: None: it is a function.
    """

    parameters: Member | None
    members: dict[str, Member] | None


def read_stub(text: str) -> ModuleType:
    """A stub as a module."""
    module = ModuleType("stub_of_native")
    sys.modules[module.__name__] = module
    exec(compile(text, str(STUB), "exec", _LATE, dont_inherit=True), vars(module))
    return module


def told(stub: ModuleType) -> dict[str, Declared]:
    """What a stub declares, by its public names."""
    found = {}
    for name, value in vars(stub).items():
        if name[0] != "_" and getattr(value, "__module__", "") == stub.__name__:
            found[name] = _told_class(value) if isinstance(value, type) else _told_function(value)
    for name, annotation in inspect.get_annotations(stub).items():
        found[name] = _told_function(_evaluated(annotation, stub.__name__).__call__)
    return found


def _told_class(made: type) -> Declared:
    init = vars(made).get("__init__")
    members: dict[str, Member] = {}
    for base in made.__mro__:
        if base not in (object, Protocol, Generic):
            members |= {name: ATTRIBUTE for name in inspect.get_annotations(base) if name[0] != "_"}
            members |= {
                name: _told_parameters(value) if inspect.isfunction(value) else ATTRIBUTE
                for name, value in vars(base).items()
                if _is_member(name, value)
            }
    return Declared(None if init is None else _told_parameters(init), members)


def _told_function(function: Callable[..., object]) -> Declared:
    """A function of the stub, or of a protocol that is called. What gives a protocol makes a class."""
    made = _evaluated(function.__annotations__["return"], function.__module__)
    is_class = Protocol in getattr(made, "__mro__", ())
    return Declared(_told_parameters(function), _told_class(made).members if is_class else None)


def _told_parameters(function: Callable[..., object]) -> Parameters:
    parameters = inspect.signature(function).parameters.values()
    return [Parameter(one.name, one.default) for one in parameters if one.name != "self"]


def _evaluated(annotation: str, module: str) -> Any:
    return eval(annotation, vars(sys.modules[module]))


def _is_member(name: str, value: object) -> bool:
    """Of a class: what is public, and methods that Python calls by their names, such as `__len__`."""
    if name.startswith("__"):
        return callable(value) and not isinstance(value, type) and name not in _NO_MEMBERS
    return name[0] != "_"


def there(module: ModuleType) -> dict[str, Declared]:
    """What an extension module has, by its public names."""
    return {
        name: _native_class(value) if isinstance(value, type) else Declared(_native_parameters(value), None)
        for name, value in vars(module).items()
        if name[0] != "_"
    }


def _native_class(made: type) -> Declared:
    init = vars(made).get("__init__")
    members: dict[str, Member] = {
        name: _native_parameters(value) if callable(value) else ATTRIBUTE
        for name, value in vars(made).items()
        if _is_member(name, value)
    }
    if type(made) is type:
        return Declared(UNTOLD, members)
    return Declared(_native_parameters(init) if hasattr(init, "__nb_signature__") else None, members)


def _native_parameters(function: Any) -> Member:
    if inspect.ismethoddescriptor(function) and not hasattr(function, "__nb_signature__"):
        return UNTOLD
    ((text, _, defaults),) = function.__nb_signature__
    return [
        Parameter(name, inspect.Parameter.empty if default is None else defaults[int(default)])
        for name, default in _split(text)
        if name != "self"
    ]


def _split(text: str) -> Iterator[tuple[str, str | None]]:
    r"""The names of a signature in nanobind's words, and the number of each default.

    They are written as `def count(self, tier: object | None = \0) -> int`.
    """
    inner, depth, piece = text[text.index("(") + 1 : text.rindex(") ->")], 0, ""
    for letter in f"{inner},":
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            match = re.fullmatch(r"\s*(\w+)(?::.*?)?(?: = \\(\d+))?", piece)
            assert match is not None, text
            yield match[1], match[2]
            piece = ""
        else:
            piece += letter


def differences(stub: ModuleType) -> list[str]:
    """What a stub says otherwise than the extension module has it."""
    declared, native = told(stub), there(_native)
    found = list(_of_names("", declared, native))
    for name in declared.keys() & native.keys():
        one, other = declared[name], native[name]
        found += _of_parameters(name, one.parameters, other.parameters)
        if one.members is None or other.members is None:
            if one.members != other.members:
                kinds = ("a function", "a class") if one.members is None else ("a class", "a function")
                found.append(f"{name}: {kinds[0]} in the stub, {kinds[1]} in C++")
            continue
        found += _of_names(f"{name}.", one.members, other.members)
        for member in one.members.keys() & other.members.keys():
            found += _of_parameters(f"{name}.{member}", one.members[member], other.members[member])
    return sorted(found)


def _of_names(prefix: str, declared: dict[str, Any], native: dict[str, Any]) -> Iterator[str]:
    for name in declared.keys() - native.keys():
        yield f"{prefix}{name}: the stub alone has it"
    for name in native.keys() - declared.keys():
        yield f"{prefix}{name}: the stub lacks it"


def _of_parameters(name: str, declared: Member | None, native: Member | None) -> Iterator[str]:
    if isinstance(declared, list) and isinstance(native, list):
        agrees = len(declared) == len(native) and all(map(Parameter.agrees, declared, native))
    else:
        agrees = declared == native or (isinstance(declared, list) and native == UNTOLD)
    if not agrees:
        yield f"{name}: {_shown(declared)} in the stub, {_shown(native)} in C++"


def _shown(member: Member | None) -> str:
    if not isinstance(member, list):
        return member or "not made by Python"
    empty = inspect.Parameter.empty
    return f"({', '.join(one.name if one.default is empty else f'{one.name}={one.default!r}' for one in member)})"


def test_the_stub_says_what_the_extension_module_has() -> None:
    assert differences(read_stub(STUB.read_text())) == []


@pytest.mark.parametrize(
    ("written", "planted", "told"),
    [
        ("    def needs_sweep(self) -> bool: ...\n", "", "ClusterIndex.needs_sweep: the stub lacks it"),
        (
            "recomputed_digest(self, instance:",
            "recomputed_digest(self, owner:",
            "ClusterIndex.recomputed_digest: (owner) in the stub, (instance) in C++",
        ),
        ("def lacking(self)", "def wanting(self)", "RowCopier.wanting: the stub alone has it"),
        ("    @property\n    def lacking", "    def lacking", "RowCopier.lacking: () in the stub, an attribute in C++"),
        (
            "strict: bool = True",
            "strict: bool = False",
            "Residencies: (strict=False) in the stub, (strict=True) in C++",
        ),
        ("capacity: int)", "capacity: int = 0)", "ClusterIndex: (capacity=0) in the stub, (capacity) in C++"),
        ("crc32c: Checksum\n", "", "crc32c: the stub lacks it"),
        ("crc32c: Checksum\n", "crc32c: ChecksumRows\n", "crc32c: (rows) in the stub, (data, initial=0) in C++"),
        ("def residency_mix(", "def residency_mixed(", "residency_mixed: the stub alone has it"),
        ("-> LedgerProtocol: ...", "-> int: ...", "Ledger: a function in the stub, a class in C++"),
        (
            "class Candidates(metaclass=ABCMeta):\n",
            "class Candidates(metaclass=ABCMeta):\n    def __init__(self) -> None: ...\n",
            "Candidates: () in the stub, not made by Python in C++",
        ),
    ],
)
def test_what_the_stub_says_otherwise_is_found(written: str, planted: str, told: str) -> None:
    text = STUB.read_text()
    assert text.count(written) == 1
    assert told in differences(read_stub(text.replace(written, planted)))


def test_what_a_protocol_says_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(LedgerProtocol, "restart")
    monkeypatch.setattr(LedgerProtocol, "expire", lambda self, then_s: 0)
    monkeypatch.setattr(LedgerProtocol, "lapse", lambda self: 0, raising=False)
    monkeypatch.setattr(SequenceHashes, "__call__", _hashes)
    assert differences(read_stub(STUB.read_text())) == [
        "Ledger.expire: (then_s) in the stub, (now_s) in C++",
        "Ledger.lapse: the stub alone has it",
        "Ledger.restart: the stub lacks it",
        "sequence_hashes: (tokens) in the stub, (tokens, block_tokens, root, extra_keys=()) in C++",
    ]


def _hashes(self: object, tokens: object) -> bytes:
    return b""
