"""Plain questions are read alike by both readers, and mean to a plain reader what they mean to the parsers of HTTP and
JSON.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.assembly import NATIVE
from kvbm.catalog.answers.prompts import decode_prompt, packed_hashes
from kvbm.core.answers import LIMIT, LookupRequest, RouteRequest
from kvbm.core.backend import REFERENCE
from kvbm.core.plain_questions import MOST_BODY_BYTES, PlainQuestion
from tests.extras import needed

httptools = needed("httptools", "catalog")

HEX = "0123456789abcdefABCDEF"
ID = "0f" * 16


class Parsed:
    """What httptools reads of a stream, up to the end of its first request."""

    def __init__(self) -> None:
        self.url, self.headers, self.body, self.is_whole = b"", list[tuple[bytes, bytes]](), b"", False

    def on_url(self, url: bytes) -> None:
        self.url += b"" if self.is_whole else url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.is_whole:
            self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += b"" if self.is_whole else body

    def on_message_complete(self) -> None:
        self.is_whole = True


def read_both(data: bytes, begin: int = 0, end: int | None = None) -> PlainQuestion | None:
    until = len(data) if end is None else end
    native = NATIVE.read_plain_question(data, begin, until)
    assert native == REFERENCE.read_plain_question(data, begin, until)
    return native


def hashes() -> st.SearchStrategy[object]:
    one = st.text(HEX, min_size=32, max_size=32)
    return st.one_of(
        st.lists(one, min_size=1, max_size=4).map("".join),
        st.lists(one, max_size=3),
        st.text(HEX + "g \\", max_size=65),
        st.none(),
    )


def bodies() -> st.SearchStrategy[bytes]:
    field = st.one_of(
        st.tuples(st.just("namespace"), st.sampled_from([ID, ID.upper(), ID[1:], "zz" * 16, None, {"model": "m"}])),
        st.tuples(st.just("hashes"), hashes()),
        st.tuples(st.just("limit"), st.sampled_from([0, 1, 8, 1024, 1025, -1, 1.0, "8", None, 10**12])),
        st.tuples(st.just("input_tokens"), st.sampled_from([0, 1, 1 << 24, (1 << 24) + 1, -0.0, 5e3, None])),
        st.tuples(st.sampled_from(["instances", "tokens", "remember", "", "ſ"]), st.sampled_from([None, [], 1, True])),
    )
    whole = st.tuples(
        st.lists(field, max_size=4),
        hashes(),
        st.sampled_from([(",", ":"), (", ", ": "), (" ,\n\t", "\r:")]),
        st.booleans(),
    )

    def text(given: tuple[list[tuple[str, Any]], object, tuple[str, str], bool]) -> bytes:
        some, asked, (comma, colon), is_common = given
        pairs = [("namespace", ID), ("hashes", asked), *some] if is_common else some
        said = comma.join(json.dumps(name) + colon + json.dumps(value) for name, value in pairs)
        return f"{{{said}}}".encode()

    return whole.map(text)


def requests() -> st.SearchStrategy[bytes]:
    line = st.sampled_from(
        [
            b"POST /v1/lookup HTTP/1.1",
            b"POST /v1/route HTTP/1.1",
            b"POST /v1/find HTTP/1.1",
            b"POST /v1/lookup HTTP/1.0",
        ]
    )
    header = st.sampled_from(
        [
            b"Host: localhost",
            b"host:a",
            b"Content-Type: application/json",
            b"content-type: Application/JSON",
            b"content-type: text/plain",
            b"Authorization: Bearer kvbm_x",
            b"Connection: Keep-Alive",
            b"Connection: close",
            b"User-Agent: a b/1 (c)",
            b"Accept: */*",
            b"accept:  two",
            b"accept: ",
            b"accept: a ",
            b"accept: \x80",
            b"Transfer-Encoding: chunked",
            b"traceparent: 00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01",
            b"Expect: 100-continue",
            b"content-length: 5",
            b"no colon",
            b" folded: x",
            b"Host : a",
        ]
    )

    def whole(given: tuple[bytes, list[bytes], bytes, int, bytes]) -> bytes:
        first, headers, body, more, end = given
        head = [b"POST /v1/" + first, *headers, b"content-length: %d" % max(0, len(body) + more)]
        return end.join([*head, b"", b""]) + body

    return st.tuples(
        line,
        st.lists(header, max_size=3),
        bodies(),
        st.sampled_from([0, 0, 0, 0, 1, -1]),
        st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n"]),
    ).map(whole)


@settings(max_examples=200, deadline=None)
@given(requests(), st.binary(max_size=3), st.data())
def test_both_readers_read_the_same_whatever_comes(request: bytes, behind: bytes, data: st.DataObject) -> None:
    check_meaning(request + behind, read_both(request + behind))
    at = data.draw(st.integers(0, len(request)), label="at")
    letter = data.draw(st.sampled_from(b'\r\n :"\\{}[],\x00\xff0aA'), label="letter")
    for changed in (
        request[:at],
        request[:at] + bytes([letter]) + request[at:],
        request[:at] + bytes([letter]) + request[at + 1 :],
        request[:at] + request[at + 1 :],
    ):
        check_meaning(changed, read_both(changed))


def check_meaning(data: bytes, found: PlainQuestion | None) -> None:
    """A plain question is what httptools and the catalog's decoder make of the same bytes."""
    if found is None:
        return
    parsed = Parsed()
    parser = httptools.HttpRequestParser(parsed)
    parser.feed_data(data[: found.request_bytes])
    assert parsed.is_whole
    assert parser.should_keep_alive()
    assert not parser.should_upgrade()
    assert parsed.url == (b"/v1/route" if found.is_route else b"/v1/lookup")
    said = dict(parsed.headers)
    assert len(said) == len(parsed.headers)
    assert said.get(b"authorization") == found.authorization
    assert said.get(b"host") == found.host
    assert said.get(b"content-type", b"application/json").lower() == b"application/json"
    assert not said.keys() & {b"traceparent", b"transfer-encoding", b"expect", b"upgrade"}
    assert int(said[b"content-length"]) == len(parsed.body) == found.body_bytes <= MOST_BODY_BYTES
    kind: type[LookupRequest] = RouteRequest if found.is_route else LookupRequest
    asked = decode_prompt(parsed.body, kind, NATIVE.read_number_list)
    assert isinstance(asked.namespace, str)
    assert bytes.fromhex(asked.namespace) == found.namespace
    assert asked.hashes is not None
    assert packed_hashes(asked.hashes) == found.hashes
    assert asked.limit == (found.limit or LIMIT)
    plain: dict[str, Any] = {"namespace": asked.namespace, "hashes": asked.hashes, "limit": asked.limit}
    if isinstance(asked, RouteRequest):
        assert asked.input_tokens == found.input_tokens
        plain["input_tokens"] = asked.input_tokens
    assert asked == kind(**plain)


@pytest.mark.parametrize("is_route", [False, True])
def test_what_clients_send_is_plain_once_all_of_it_is_there(is_route: bool) -> None:
    body = b'{"namespace":"%b","hashes":["%b","%b"]%b}' % (
        ID.encode(),
        b"Ab" * 16,
        b"01" * 16,
        b',"input_tokens":33,"limit":3' if is_route else b"",
    )
    head = b"POST /v1/%b HTTP/1.1\r\nHost: h:1\r\nauthorization: Bearer x\r\nContent-Length: %d\r\n\r\n"
    request = head % (b"route" if is_route else b"lookup", len(body)) + body
    for end in range(len(request)):
        assert read_both(request, 0, end) is None
    found = read_both(b"ab" + request + b"POST", 2)
    assert found == PlainQuestion(
        len(request),
        len(body),
        is_route,
        b"Bearer x",
        b"h:1",
        found.namespace if found is not None else None,  # type: ignore[arg-type]
        b"\xab" * 16 + b"\x01" * 16,
        3 if is_route else 0,
        33 if is_route else 0,
    )
    assert found is not None
    assert found.namespace.hex() == ID


def test_a_question_of_many_blocks_is_plain_up_to_the_most_a_body_may_have() -> None:
    for blocks, is_plain in ((1000, True), (1100, False)):
        body = b'{"namespace":"%b","hashes":"%b"}' % (ID.encode(), b"5a" * 16 * blocks)
        request = b"POST /v1/lookup HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        found = read_both(request)
        assert (found is not None) is is_plain is (len(body) <= MOST_BODY_BYTES)
        assert found is None or found.hashes == b"\x5a" * 16 * blocks
