"""The catalog's certificate, while its files change: without a server."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import kvbm.catalog.edge.tls
from kvbm.catalog.access.callers import AccessOptions
from kvbm.catalog.edge.tls import ServerTls
from tests.certificates import certify


def test_a_certificate_that_is_written_again_as_it_was_is_no_remark(tmp_path: Path) -> None:
    ca = certify(tmp_path, "ca")
    one, two = certify(tmp_path, "one", ca), certify(tmp_path, "two", ca)
    now_s = 0.0
    with capture_logs() as logs:
        tls = ServerTls(AccessOptions(tls_cert=str(one.cert), tls_key=str(one.key)), lambda: now_s)

        def looks() -> list[str]:
            nonlocal now_s
            logs.clear()
            for _ in range(6):
                now_s += 10.0
                tls.look()
            return [line["event"] for line in logs]

        assert looks() == []  # the files are young and are read once more
        os.utime(one.cert, ns=(0, time.time_ns() - 10**9))
        assert looks() == []
        one.cert.write_bytes(one.cert.read_bytes())
        assert looks() == []
        one.key.write_bytes(two.key.read_bytes())  # half of a pair
        assert looks() == ["catalog.certificate_kept"]
        assert "do not belong together" in tls.trouble
        one.cert.write_bytes(two.cert.read_bytes())
        assert looks() == ["catalog.certificate_read"]
        assert tls.trouble == ""


def test_a_key_that_is_replaced_while_it_is_read_is_read_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a context is made of and what is compared later are the same bytes: one remark for one change."""
    ca = certify(tmp_path, "ca")
    one, two = certify(tmp_path, "one", ca), certify(tmp_path, "two", ca)
    now_s = 0.0
    tls = ServerTls(AccessOptions(tls_cert=str(one.cert), tls_key=str(one.key)), lambda: now_s)
    new_context = kvbm.catalog.edge.tls._new_context

    def late(options: AccessOptions) -> object:
        """The key is replaced once the files have been read for comparing."""
        monkeypatch.setattr(kvbm.catalog.edge.tls, "_new_context", new_context)
        one.key.write_bytes(two.key.read_bytes())
        return new_context(options)

    def looks() -> list[str]:
        nonlocal now_s
        with capture_logs() as logs:
            for _ in range(6):
                now_s += 10.0
                tls.look()
        return [line["event"] for line in logs]

    assert looks() == []
    one.cert.write_bytes(two.cert.read_bytes())
    monkeypatch.setattr(kvbm.catalog.edge.tls, "_new_context", late)
    assert looks() == ["catalog.certificate_read"]
