"""A client of the catalog whose system's CAs cannot be read says so, instead of trusting nobody for as long as it
lives.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from kvbm.core.errors import ConfigError
from kvbm.locate.credentials import NO_CREDENTIALS, _new_context


def test_a_context_without_the_systems_cas_is_no_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cas.pem"
    file.touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(file))  # as one that cannot be opened: OpenSSL says nothing
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", lambda self, purpose=None: None)
    with pytest.raises(ConfigError, match=f"no CA was read from {file}"):
        _new_context(NO_CREDENTIALS)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))  # a system with a folder of them, or none
    _new_context(NO_CREDENTIALS)
