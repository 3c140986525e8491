"""What `import kvbm` gives: every name is there, says what it is, and can be read with help()."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys

import pytest

import kvbm

NOT_CLASSES = {"NO_PARENT", "NamespaceId", "SequenceHash"}


def test_the_public_names_are_there_once_and_no_others() -> None:
    assert len(set(kvbm.__all__)) == len(kvbm.__all__)
    given = {name for name, value in vars(kvbm).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert given == set(kvbm.__all__)


def test_what_an_engine_catches_is_of_one_tree() -> None:
    errors = [getattr(kvbm, name) for name in kvbm.__all__ if name.endswith("Error")]
    assert len(errors) > 10
    assert all(issubclass(error, kvbm.KvbmError) for error in errors)
    for error, also in (
        (kvbm.ArgumentTypeError, TypeError),
        (kvbm.ArgumentValueError, ValueError),
        (kvbm.LayoutError, ValueError),
    ):
        assert issubclass(error, also)
    assert issubclass(kvbm.ArgumentTypeError, kvbm.ArgumentError)
    assert issubclass(kvbm.ArgumentValueError, kvbm.ArgumentError)


@pytest.mark.parametrize("name", sorted(set(kvbm.__all__) - NOT_CLASSES))
def test_every_name_and_every_method_says_what_it_is(name: str) -> None:
    value = getattr(kvbm, name)
    assert inspect.getdoc(value), name
    if not inspect.isclass(value):
        return
    own = vars(value).items()
    members = [(key, one) for key, one in own if not key.startswith("_") and isinstance(one, property | staticmethod)]
    members += [(key, one) for key, one in own if not key.startswith("_") and inspect.isfunction(one)]
    for key, one in members:
        assert inspect.getdoc(one), f"{name}.{key}"


def test_calls_that_refuse_arguments_say_so() -> None:
    for name in (
        "acquire",
        "allocate",
        "create",
        "unpin",
        "release",
        "keep",
        "evict",
        "match",
        "hash_tokens",
        "report_load",
    ):
        text = inspect.getdoc(getattr(kvbm.Manager, name)) or ""
        assert "Raises: Argument" in text, name
    create = inspect.getdoc(kvbm.Manager.create) or ""
    assert "stream" in create
    assert "CUDA" in create


def test_help_reads_as_a_reference() -> None:
    text = pydoc.plain(pydoc.render_doc(kvbm))
    for words in (
        "Packed runs:",
        "Threads:",
        "CUDA:",
        "Errors:",
        "open_engine_manager(",
        "class Manager(",
        "create(self,",
    ):
        assert words in text, words


def test_it_loads_no_torch_and_the_names_come_with_it() -> None:
    script = "import sys, kvbm; assert 'torch' not in sys.modules; [getattr(kvbm, name) for name in kvbm.__all__]"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=180)
