"""A question goes a short way or a long one, and nobody can tell from the answer which: whatever its headers and its
body say.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from kvbm.catalog.edge.fast_path import MOST_BYTES
from kvbm.core import prompt_batches
from kvbm.core.ids import NamespaceId
from kvbm.core.prompt_batches import CONTENT_TYPE, PromptBatch, encode_batch
from tests.floods import FIELDS, SPACE, CatalogProcess, catalog_process, publish_instances
from tests.http_wire import Wire, chunked, post, same
from tests.nats_fixture import nats_url, new_cluster  # noqa: F401

NAMES = [f"instance-{number:02}" for number in range(5)]
HASHES = "".join(f"{number:032x}" for number in range(1, 17))
PATHS = {
    "/v1/lookup": prompt_batches.LOOKUP,
    "/v1/route": prompt_batches.ROUTE,
    "/v1/presence": prompt_batches.PRESENCE,
    "/v1/find": prompt_batches.FIND,
}
TYPES = ["application/json", CONTENT_TYPE, CONTENT_TYPE.upper(), f"{CONTENT_TYPE}; v=1", "text/plain", ""]
ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    1.5,
    1e308,
    -0.0,
    "",
    "zz",
    "a\x00b",
    "\u202e",
    "0" * 31,
    "0" * 32,
    HASHES,
    [],
    {},
    [[]],
    [0] * 300,
    ["0" * 32],
    {"a": 1},
    [None],
]


@pytest.fixture(scope="module")
def catalog(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CatalogProcess]:  # noqa: F811
    within = new_cluster("two-ways")
    publish_instances(nats_url, within, NAMES)
    with catalog_process(tmp_path_factory.mktemp("catalog"), nats_url, within) as process:
        yield process


class Questions:
    """Random ones, from good to senseless.

    What changes what is answered next, a route that is remembered, is not among them.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next(self) -> tuple[str, bytes, list[str]]:
        """A path, a body and headers."""
        chance = self._random
        path = chance.choice(list(PATHS))
        is_binary = chance.random() < 0.4 and path != "/v1/route"
        body = self._batch(path) if is_binary else self._json(path)
        kinds = [CONTENT_TYPE if is_binary else TYPES[0]]
        if chance.random() < 0.2:
            kinds = chance.choices(TYPES, k=chance.choice((0, 1, 2, 2, 3)))
        headers = [f"{chance.choice(('content-type', 'Content-Type'))}: {kind}" for kind in kinds]
        headers += chance.sample(
            ["accept: text/html", "authorization: Bearer x", "authorization: y", "content-encoding: gzip", "x-a: b"],
            k=chance.choice((0, 0, 0, 1, 2)),
        )
        chance.shuffle(headers)
        if path == "/v1/route" and CONTENT_TYPE in kinds and len(kinds) == 1:
            body = b"{" + body  # is no batch
        return path, body[:MOST_BYTES], headers

    def _json(self, path: str) -> bytes:
        chance = self._random
        asked: dict[str, Any] = {
            "namespace": chance.choice([SPACE.id.hex(), FIELDS]),
            "hashes": HASHES,
            "timeout_s": 0.0,
        }
        if chance.random() < 0.2:
            asked |= {"hashes": None, "tokens": list(range(chance.randrange(200)))}
        if chance.random() < 0.1:
            asked["at_least"] = [{"instance": NAMES[0], "epoch": chance.randrange(3), "offset": chance.randrange(3)}]
        for _ in range(chance.choice((0, 0, 0, 1, 2, 4))):
            self._change(asked)
        asked["timeout_s"] = chance.choice((0.0, 0.0, -1, "x"))
        if path == "/v1/route":
            asked |= {"remember": False, **({"input_tokens": 300} if chance.random() < 0.7 else {})}
        body = json.dumps(asked, allow_nan=True).encode()
        return self._cut(body) if chance.random() < 0.15 else body

    def _change(self, asked: dict[str, Any]) -> None:
        chance = self._random
        name = chance.choice(
            [*asked, "limit", "instances", "first", "asker", "topology", "phase", "latency", "at_least", "nonsense"]
        )
        into = asked[name] if asked.get(name) and isinstance(asked[name], dict) and chance.random() < 0.7 else asked
        asked[name] = asked.get(name, 1)
        if into is not asked:
            into = asked[name] = dict(into)
            name = chance.choice(list(into))
        if chance.random() < 0.2:
            into.pop(name, None)
        else:
            into[name] = chance.choice(ODD)

    def _batch(self, path: str) -> bytes:
        chance = self._random
        hashes = bytes.fromhex(HASHES)
        prompts = [
            (hashes[: 16 * chance.randrange(17)], chance.choice((0, 0, 5))) for _ in range(chance.choice((1, 3, 60)))
        ]
        kind = PATHS[path] if chance.random() < 0.9 else chance.choice(list(PATHS.values()))
        asker = ("x", "rack") if kind == prompt_batches.FIND and chance.random() < 0.5 else ()
        body = encode_batch(PromptBatch(kind, chance.choice((1, 8, 0, 2000)), NamespaceId(SPACE.id), prompts, asker))
        return self._cut(body) if chance.random() < 0.3 else body

    def _cut(self, body: bytes) -> bytes:
        """The same but for some bytes."""
        changed, chance = bytearray(body), self._random
        for _ in range(chance.choice((1, 1, 3))):
            at = chance.randrange(len(changed) + 1)
            changed[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
        return bytes(changed)


def answered(wire: Wire, question: bytes) -> tuple[object, ...]:
    """What a question is answered with, but for how old the view is."""
    try:
        wire.send(question)
        status, headers, body = wire.answer()
    except ConnectionError as error:
        raise AssertionError(f"no answer to {question!r}") from error
    kind = headers["content-type"]
    body = body[:12] + body[16:] if kind == CONTENT_TYPE else same(body)
    return status, kind, sorted(headers), body


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 11))])
def test_a_question_is_answered_alike_whichever_way_it_goes(catalog: CatalogProcess, seed: int) -> None:
    questions = Questions(seed)
    statuses: dict[object, int] = {}
    with Wire(catalog.url) as wire:
        for number in range(5_000 if seed else 500):
            path, body, headers = questions.next()
            short, long = (answered(wire, make(path, body, *headers)) for make in (post, chunked))
            assert short == long, f"seed {seed}, question {number}: {path} {headers} {body!r}"
            statuses[short[0]] = statuses.get(short[0], 0) + 1
    assert statuses[200] > 50 and statuses[422] > 50 and statuses[400] > 10, statuses


@pytest.mark.parametrize("kinds", [TYPES[:2], TYPES[1::-1], [CONTENT_TYPE] * 2, ["", ""]])
def test_a_question_that_says_twice_what_its_body_is_is_refused(catalog: CatalogProcess, kinds: list[str]) -> None:
    body = json.dumps({"namespace": SPACE.id.hex(), "hashes": HASHES}).encode()
    headers = [f"content-type: {kind}" for kind in kinds]
    for make in (post, chunked):
        with Wire(catalog.url) as wire:
            status, kind, _, answer = answered(wire, make("/v1/lookup", body, *headers))
        assert isinstance(answer, bytes)
        assert (status, kind, json.loads(answer)["error"]["code"]) == (400, "application/json", "two_content_types")
