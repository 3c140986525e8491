"""`kvbm probe`: does a service answer? For health checks, and for whoever must wait for one."""

from __future__ import annotations

import asyncio
import http.client
import re
import sys
import time
import urllib.error
import urllib.request
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvbm.assembly import catalog_credentials
from kvbm.config import Settings
from kvbm.core.errors import ConfigError, KvbmError
from kvbm.locate.credentials import NO_CREDENTIALS, CredentialProof
from kvbm.locate.proxies import proxy_of, shown
from kvbm.progress import Watch
from kvbm.streams.nats.credentials import Credentials
from kvbm.streams.nats.server_view import look_as_anybody
from kvbm.terminal import as_json, say

ASK_S = 4.0  # one answer; images' health checks wait a little longer
_AGAIN_S = 0.25
_MOST_BYTES = 64 << 10  # of an answer


class ProbeAnswer(NamedTuple):
    """Whether a service can be used, and what it said, or why it cannot.

    Attributes:
        degraded: what of it does not work though it answers, as a catalog's /readyz tells its operators; "" for
            nothing.
    """

    is_well: bool
    words: str
    degraded: str = ""

    def counts(self, strict: bool) -> bool:
        """Whether whoever asks takes it; one who is strict takes none that is degraded."""
        return self.is_well and not (strict and self.degraded)


class _Readiness(msgspec.Struct):
    """What is read of a catalog's /readyz."""

    reason: str = ""
    degraded: str = ""


def main(url: str, wait_s: float, settings: Settings, json: bool = False, strict: bool = False) -> int:
    """Ask, again until it answers or the time is up; say what was found. Returns 0, or 1 when it cannot be used.

    Args:
        url: nats://, tls://, http://, https:// or postgresql://.
        json: say it as JSON, on standard output in any case.
        strict: a catalog that is degraded cannot be used either.
        settings: `nats` has the credentials NATS asks for, `catalog` those of the catalog.
    Raises: ConfigError: no such service is known.
    """
    until_s = time.monotonic() + wait_s
    answer = ask(url, settings)
    with Watch("waiting for an answer"):
        while not answer.counts(strict) and time.monotonic() < until_s:
            time.sleep(_AGAIN_S)
            answer = ask(url, settings)
    is_taken = answer.counts(strict)
    if json:
        say(as_json({"well": answer.is_well, "said": answer.words, "degraded": answer.degraded}))
        return 0 if is_taken else 1
    told = [answer.words, *([f"degraded: {answer.degraded}"] if answer.degraded else [])]
    say(*told, to=sys.stdout if is_taken else sys.stderr)
    return 0 if is_taken else 1


def ask(url: str, settings: Settings) -> ProbeAnswer:
    """Ask once, for at most `ASK_S`. Raises ConfigError: no such service is known."""
    scheme = url.partition("://")[0]
    try:
        match scheme.partition("+")[0]:
            case "nats" | "tls":
                return _ask_nats(url, settings)
            case "http" | "https":
                return _ask_http(url, settings)
            case "postgresql" | "postgres":
                return _ask_postgres(url.replace(scheme, "postgresql+asyncpg", 1))
    except ConfigError:
        raise
    except KvbmError as error:
        return ProbeAnswer(False, str(error))
    named = f"{scheme}://…" if "://" in url else repr(url)  # what comes behind it may be a password
    raise ConfigError(f"{named} is nothing to probe; give nats://…, http://…, https://… or postgresql://…")


def _ask_nats(url: str, settings: Settings) -> ProbeAnswer:
    nats = settings.nats
    credentials = Credentials(nats.credentials, nats.nkey_seed, nats.tls_ca, nats.tls_cert, nats.tls_key)
    view, _ = look_as_anybody(url, ASK_S, credentials, settings.instance.cluster, settings.instance.id)
    if view.has_jetstream:
        return ProbeAnswer(False, f"NATS at {view.url}: {view.has_jetstream}")
    return ProbeAnswer(True, f"NATS at {view.url}: nats-server {view.version} answers, with JetStream")


def _ask_http(url: str, settings: Settings) -> ProbeAnswer:
    """The credentials are the catalog's, so nobody else gets them: not another origin than `catalog.url`, and no
    redirect.
    """
    _check_http(url)
    known = [_origin(one.strip()) for one in re.split("[,;]", settings.catalog.url) if one.strip()]
    credentials = catalog_credentials(settings) if not known or _origin(url) in known else NO_CREDENTIALS
    proof = CredentialProof(credentials, is_tls=url.startswith("https://"))
    request = urllib.request.Request(url)
    if proof.token:
        request.add_unredirected_header("Authorization", f"Bearer {proof.token}")
    proxy = proxy_of(url)
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({urlsplit(url).scheme: proxy} if proxy else {}),
        urllib.request.HTTPSHandler(context=proof.context),
    )
    try:
        with opener.open(request, timeout=ASK_S) as answer:
            return ProbeAnswer(True, f"{url} answers {answer.status}", _readiness(answer).degraded)
    except urllib.error.HTTPError as error:
        reason = _readiness(error).reason
        return ProbeAnswer(False, f"{url} answers {error.code}" + (f": {reason}" if reason else ""))
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL that can be asked ({error})") from None
    except OSError as error:
        through = f" through the proxy {shown(proxy)}" if proxy else ""
        return ProbeAnswer(False, f"{url} does not answer{through} ({getattr(error, 'reason', None) or error})")


def _readiness(answer: Any) -> _Readiness:
    """What an answer over HTTP says of a catalog; nothing where it is none of a catalog."""
    try:
        return msgspec.json.decode(answer.read(_MOST_BYTES), type=_Readiness)
    except (msgspec.MsgspecError, http.client.HTTPException, OSError):
        return _Readiness()


def _check_http(url: str) -> None:
    """Raises ConfigError: it cannot be asked. The message never shows a password."""
    try:
        parts = urlsplit(url)
        is_good = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if "@" in url.partition("?")[0]:
        raise ConfigError(
            "the URL to probe has a user, and a catalog knows who asks by catalog.token; write http://host:port/path"
        )
    if not is_good:
        raise ConfigError(f"{url!r} is no URL that can be asked; write http://host:port/path")


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _ask_postgres(url: str) -> ProbeAnswer:
    from kvbm.catalog.sql.database import look as look_at

    view = asyncio.run(look_at(url, ASK_S))
    if view.unwritable:
        return ProbeAnswer(False, f"{view.shown} takes no row ({view.unwritable})")
    return ProbeAnswer(True, f"{view.shown}: {view.server} answers")
