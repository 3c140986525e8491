"""SGLang's modules, made importable on a CPU before any test imports them."""

from __future__ import annotations

from tests.engines.sglang.harness.cpu import prepare

prepare()
