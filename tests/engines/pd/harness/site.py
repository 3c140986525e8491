"""A prefiller and a decoder with one catalog, vllm-router and the small proxy before them, and what came of requests in
numbers.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvbm.core.ids import NamespaceId
from kvbm.workload.processes import Child, start_http
from tests.engines.pd.harness.proxies import Proxies
from tests.engines.pd.harness.server import ApiServer, Asked
from tests.engines.pd.harness.shapes import BARE, BOTH, DECODE, PREFILL, SERIAL
from tests.engines.vllm.harness.cluster import Cluster
from tests.engines.vllm.harness.setups import connector
from tests.engines.vllm.harness.truth import Truth
from tests.engines.vllm.harness.words import BLOCK_TOKENS, Answer, Ask
from tests.eventually import eventually
from tests.servers import START_WAIT_S, ServerMissingError, free_port

ROUTER = "router"
WAYS = (ROUTER, SERIAL, BARE, BOTH)  # to both engines
_PREFILLER = "prefiller"
_SOURCE = "vllm:prompt_tokens_by_source_total"
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


class Moved(NamedTuple):
    """What came of some requests.

    Attributes:
        prefilled_tokens: of their prompts, computed by the prefiller. computed_tokens: by the decoder.
        cached_tokens: in its HBM.
        loaded_tokens: that its connector brought. peer_blocks: of those, blocks that the prefiller had lent.
        lent_bytes: of blocks that the prefiller had lent on their way.
    """

    prefilled_tokens: int
    computed_tokens: int
    cached_tokens: int
    loaded_tokens: int
    peer_blocks: int
    lent_bytes: int


class Site:
    """See the module.

    Attributes:
        cluster: its catalog.
        prefiller, decoder: running.
        proxies: recorders of both, and the small proxy.
    """

    def __init__(self, model: str, folder: Path, settings: Mapping[str, Any] | None = None, **options: Any) -> None:
        """
        Args:
            settings: of both managers, as kvbm's, dotted. options: of both servers, as `ApiServer` takes them.
        """
        self._model, self._folder, self._options = model, folder, options
        self._settings = {"transport.listen": "host", "handoff.ttl_s": 2.0} | dict(settings or {})
        self.cluster = Cluster(folder / "cluster")
        self.prefiller, self.decoder = self._start(_PREFILLER), self._start("decoder")
        self._of_prefiller = 0.0, 0
        for server in (self.prefiller, self.decoder):
            self._made_ready(server)
        self.block_bytes = self.decoder.inside("block_bytes")
        self.proxies = Proxies({PREFILL: self.prefiller.url, DECODE: self.decoder.url})
        self._router_url = f"http://127.0.0.1:{free_port()}"
        self._router = self._start_router(self._router_url, self.proxies.urls)

    def close(self) -> None:
        """Have all of it gone."""
        self._router.kill()
        self._router.stop()
        self.proxies.close()
        self.prefiller.kill()
        self.decoder.kill()
        self.cluster.__exit__()

    def url(self, way: str) -> str:
        """Where a client asks."""
        known = {ROUTER: self._router_url, DECODE: self.decoder.url}
        return known.get(way) or f"{self.proxies.url}/{way}"

    def begin(self, way: str, ask: Ask, **more: Any) -> Asked:
        """Send a request on its way."""
        return Asked(self.url(way), ask, **more)

    def ask(self, way: str, truth: Truth, asks: Sequence[Ask], has_kept: bool = False) -> Moved:
        """Have requests answered at once, rightly: tokens and log probabilities are those of one plain engine.

        Args:
            way: one of `WAYS`, or DECODE: the decoder is asked alone.
            has_kept: a prompt is kept for its next turn, and stays so.
        """
        before = self._counts()
        under_way = [self.begin(way, one) for one in asks]
        answers: list[Answer] = [one.answer() for one in under_way]
        truth.check(asks, answers)
        self.settle(has_kept)
        return Moved(*(int(now - then) for now, then in zip(self._counts(), before, strict=True)))

    def forget(self) -> None:
        """Empty both prefix caches and overwrite all device KV."""
        for server in (self.prefiller, self.decoder):
            server.forget()

    def settle(self, has_kept: bool = False) -> None:
        """Wait until neither engine has anything left of a request, but for what is kept on purpose."""
        for server in (self.prefiller, self.decoder):
            if server.is_alive:
                server.settle(has_kept)

    def lent(self, asks: Sequence[Ask]) -> None:
        """Wait until the catalog tells that the prefiller lends all whole blocks of these prompts."""
        name = self.prefiller.in_core("instance")
        for ask in asks:
            space, packed = self.prefiller.in_core("hashes", list(ask.tokens), ask.salt)
            namespace, hashes = NamespaceId(bytes.fromhex(space)), bytes.fromhex(packed)
            wanted = name, len(ask.tokens) // BLOCK_TOKENS
            eventually(
                lambda namespace=namespace, hashes=hashes, wanted=wanted: (
                    wanted  # type: ignore[misc]
                    in [(one.instance, one.depth) for one in self.cluster.client.find(namespace, hashes).peers]
                ),
                "the catalog does not say that the prefiller lends its blocks",
            )

    def before_decode(self, act: Callable[[], None] = lambda: None) -> None:
        """Have this done before each leg reaches the decoder."""
        self.proxies.before_decode = act

    def revive(self) -> None:
        """Start the prefiller again, if it was killed."""
        if not self.prefiller.is_alive:
            self.prefiller = self._start(_PREFILLER)
            self._made_ready(self.prefiller)
            self.proxies.engines[PREFILL] = self.prefiller.url

    @staticmethod
    def _made_ready(server: ApiServer) -> None:
        server.wait()
        server.in_core("reads_always")

    def _start(self, name: str) -> ApiServer:
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        settings = self.cluster.settings | self._settings
        return ApiServer(self._model, connector(folder, settings), folder, **self._options)

    def _start_router(self, url: str, engines: Mapping[str, str]) -> Child:
        program = shutil.which("vllm-router", path=str(Path(sys.executable).parent))
        if program is None:
            raise ServerMissingError("vllm-router", "vllm-router==0.1.17, as `make test-pd` does")
        host, _, port = url.removeprefix("http://").partition(":")
        command = [program, "--vllm-pd-disaggregation", "--host", host, "--port", port]
        command += ["--prefill", engines[PREFILL], "--decode", engines[DECODE]]
        command += ["--prometheus-port", str(free_port())]
        return start_http("router", command, f"{url}/health", self._folder / "logs", START_WAIT_S)

    def _counts(self) -> tuple[float, ...]:
        """As `Moved`, since the start; of a prefiller that was killed what it said last."""
        if self.prefiller.is_alive:
            computed = self.prefiller.metrics().get(f"{_SOURCE}{{source=local_compute}}", 0.0)
            self._of_prefiller = computed, self.prefiller.inside("lent_bytes")
        told, (prefilled, lent) = self.decoder.metrics(), self._of_prefiller
        decoded = [told.get(f"{_SOURCE}{{source={one}}}", 0.0) for one in _SOURCES]
        return (prefilled, *decoded, self.decoder.in_core("counted")["peer_hits"], lent)
