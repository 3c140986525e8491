"""A test's package that is missing is a failure that says what to install."""

from __future__ import annotations

import sys

import pytest

from kvbm.core.errors import MissingExtraError
from tests.extras import needed


@pytest.mark.parametrize(("module", "extra"), [("redis", "redis"), ("azure.storage.blob", "azure")])
def test_a_package_that_is_missing_fails_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match=rf"{module} is not installed; .*kvbm-ledger\[{extra}\]"):
        needed(module, extra)


def test_a_package_that_is_there_and_misses_another_says_so_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("packages")
    (folder / "broken_package_of_a_test.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_nobody_has"):
        needed("broken_package_of_a_test", "redis")
