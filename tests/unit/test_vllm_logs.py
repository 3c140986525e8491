"""Log lines inside vLLM's process go to vLLM's logger."""

from __future__ import annotations

import logging

import pytest
import structlog

from kvbm.engines.vllm.logs import log_with_vllm


def test_remarks_become_lines_of_vllms_log(caplog: pytest.LogCaptureFixture) -> None:
    structlog.reset_defaults()
    log_with_vllm()
    with caplog.at_level(logging.INFO, logger="vllm.kvbm"):
        structlog.get_logger().info("instance.started", epoch=3, notice="all of 100% is well", empty="")
        try:
            raise ValueError("torn")
        except ValueError as error:
            structlog.get_logger().warning("copy.failed", exc_info=error)
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "instance.started epoch=3 notice='all of 100% is well' empty=''"
    assert second.startswith("copy.failed\nTraceback") and second.endswith("ValueError: torn")


def test_a_process_that_has_set_structlog_up_keeps_its_way() -> None:
    structlog.configure(processors=[])
    before = structlog.get_config()
    log_with_vllm()
    assert structlog.get_config() == before
