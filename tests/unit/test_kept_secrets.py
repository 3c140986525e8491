"""Files with keys, as Kubernetes mounts them and as people leave them."""

from __future__ import annotations

import os
import stat

import pytest

from kvbm import files
from kvbm.files import is_kept_secret

ROOT, OURS = 0, 65532


@pytest.mark.parametrize(
    ("mode", "owner", "runs_as", "kept"),
    [
        (0o400, OURS, OURS, True),
        (0o600, OURS, OURS, True),
        (0o440, OURS, OURS, False),  # a group of one's own may be anybody's
        (0o604, OURS, OURS, False),
        (0o440, ROOT, OURS, True),  # a Secret of a pod with fsGroup
        (0o640, ROOT, OURS, True),
        (0o460, ROOT, OURS, False),
        (0o444, ROOT, OURS, False),
        (0o440, ROOT, ROOT, False),
        (0o600, ROOT, ROOT, True),
    ],
)
def test_a_key_is_its_owners_or_roots_and_a_groups(
    monkeypatch: pytest.MonkeyPatch, mode: int, owner: int, runs_as: int, kept: bool
) -> None:
    monkeypatch.setattr(files.os, "geteuid", lambda: runs_as)
    found = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))
    assert is_kept_secret(found) is kept
