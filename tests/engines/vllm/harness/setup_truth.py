"""What is right where one rank's answers are not: of engines whose ranks round sums otherwise than one rank does."""

from __future__ import annotations

from dataclasses import replace

from tests.engines.vllm.harness.engine import Engine, Engines
from tests.engines.vllm.harness.truth import Truth
from tests.engines.vllm.harness.words import Setup


class SetupTruth(Truth):
    """Right answers of an engine as it is set up, but without connector and prefix cache, one request at a time."""

    def __init__(self, engines: Engines, setup: Setup) -> None:
        super().__init__(engines, setup.model, setup.options)
        self._plain = replace(setup, connector=None, prefix_caching=False, requests=1)

    def _running(self) -> Engine:
        if self._engine is None:
            self._engine = self._engines.start(self._plain)
        return self._engine
