"""What an engine states of how it hashes tokens: its bytes, and what is refused of others'."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from kvbm.catalog.follow.stated_chains import StatedChains
from kvbm.core.chain_statement import MOST_BYTES, ChainGroup, ChainStatement, read_statement
from kvbm.core.engine_chains import SGLANG_SHA256, VLLM_CBOR, VLLM_SHA256
from kvbm.core.ids import InstanceId, Namespace, NamespaceId
from kvbm.engines.vllm.chain import chain_of
from kvbm.engines.vllm.requests import KvGroup

BEGIN = bytes(range(32))
GROUPS = (ChainGroup(0, 32), ChainGroup(2, 16, window_blocks=4, has_draft=True), ChainGroup(3, 64, chunk_tokens=128))
STATEMENT = ChainStatement(
    scheme="vllm-sha256+0123", scheme_seed=7, kind=VLLM_SHA256, begin=BEGIN, hash_tokens=16, groups=GROUPS
)
NAMESPACE = Namespace(model="m", block_tokens=32, scheme="vllm-sha256+0123", scheme_seed=7)
ONE, TWO = InstanceId("one"), InstanceId("two")


def changed(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.to_builtins(STATEMENT, builtin_types=(bytes,)) | fields)


def group(**fields: Any) -> list[Any]:
    return list({"kv_group": 0, "block_tokens": 16, "window": None, "chunk": None, "draft": False, **fields}.values())


def test_a_statement_is_read_as_it_was_written_also_with_fields_to_come() -> None:
    assert read_statement(STATEMENT.encoded()) == (STATEMENT, "")
    assert read_statement(changed(since="later")).statement == STATEMENT
    assert STATEMENT.step_tokens == 64 and not STATEMENT.is_plain


def test_it_speaks_of_namespaces_of_its_scheme_and_groups_alone() -> None:
    assert STATEMENT.group_of(NAMESPACE) == GROUPS[0]
    for other in ({"scheme_seed": 8}, {"scheme": "sha256"}, {"kv_group": 1}, {"block_tokens": 16}):
        assert STATEMENT.group_of(msgspec.structs.replace(NAMESPACE, **other)) is None
    for same in ({"tenant": "acme"}, {"lora": "adapter:0"}, {"revision": "r2"}):
        assert STATEMENT.group_of(msgspec.structs.replace(NAMESPACE, **same)) == GROUPS[0]


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        b"\x80",
        b"\x93\x01\x02\x03",
        bytes(MOST_BYTES + 1),
        changed(scheme="s" * MOST_BYTES),
        changed(kind="vllm-xxhash"),
        changed(kind=1),
        changed(begin=BEGIN[:31]),
        changed(begin="text"),
        changed(begin=b""),
        changed(scheme=""),
        changed(hash_tokens=0),
        changed(hash_tokens=1 << 40),
        changed(hash_tokens=True),
        changed(align_tokens=-1),
        changed(align_tokens=1 << 20, groups=[group(block_tokens=48)]),
        changed(groups=[]),
        changed(groups=[group(), group()]),
        changed(groups=[group(kv_group=number) for number in range(65)]),
        changed(groups=[group(block_tokens=24)]),
        changed(groups=[group(block_tokens=0)]),
        changed(groups=[group(window=-1)]),
        changed(groups=[group(window=1 << 30)]),
        changed(groups=[group(chunk=-5)]),
        changed(groups=[group(kv_group=-1)]),
        changed(groups=[group(draft=7)]),
        changed(groups=[[0]]),
    ],
)
def test_what_is_no_statement_is_refused_counted_once_and_not_believed(data: bytes) -> None:
    found = read_statement(data)
    assert found.statement is None and found.why
    chains = StatedChains(lambda _: frozenset())
    chains.take(ONE, STATEMENT.encoded())
    for _ in range(3):
        chains.take(ONE, data)
    assert chains.refused == 1 and chains.of(NAMESPACE) == []


def test_any_bytes_are_refused_or_usable() -> None:
    numbers, good = random.Random(155), bytearray(STATEMENT.encoded())
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(numbers.randrange(1, 4)):
            data[numbers.randrange(len(data))] = numbers.randrange(256)
        found = read_statement(bytes(data[: numbers.randrange(len(data) // 2, len(data) + 1)]))
        assert (found.statement is None) == bool(found.why)


def test_statements_go_with_who_made_them_and_contradictions_are_told() -> None:
    named: dict[InstanceId, frozenset[NamespaceId]] = {}
    chains = StatedChains(lambda one: named.get(one, frozenset()))
    other = msgspec.structs.replace(STATEMENT, begin=bytes(32))
    chains.take(ONE, STATEMENT.encoded())
    chains.take(TWO, STATEMENT.encoded())
    assert chains.of(NAMESPACE) == [STATEMENT]
    chains.take(TWO, other.encoded())
    assert chains.of(NAMESPACE) == [STATEMENT, other]
    named[ONE] = frozenset({NAMESPACE.id})
    assert chains.of(NAMESPACE) == [STATEMENT]  # the other has not named it
    named[TWO] = named[ONE]
    assert len(chains.of(NAMESPACE)) == 2
    chains.forget(ONE)
    assert chains.of(NAMESPACE) == [other]
    chains.take(TWO, b"")
    assert chains.of(NAMESPACE) == [] and chains.refused == 0


def test_vllm_states_its_groups_and_nothing_where_hashes_are_random_or_of_two_sizes() -> None:
    groups = [KvGroup(0, 32, 16), KvGroup(2, 16, 16, 4, has_draft=True), KvGroup(3, 64, 16, None, False, 128)]
    assert chain_of(NAMESPACE, groups, 1, "sha256", BEGIN) == STATEMENT
    cbor = chain_of(NAMESPACE, groups, 1, "sha256_cbor", BEGIN)
    assert cbor is not None and cbor.kind == VLLM_CBOR
    assert chain_of(NAMESPACE, groups, 1, "xxhash", BEGIN) is None
    assert chain_of(NAMESPACE, groups, 1, "sha256", b"") is None
    assert chain_of(NAMESPACE, [KvGroup(0, 32, 32), KvGroup(1, 16, 16)], 1, "sha256", BEGIN) is None


def test_of_sglang_a_chain_begins_with_nothing() -> None:
    found = read_statement(changed(kind=SGLANG_SHA256, begin=b""))
    assert found.statement is not None and found.statement.in_hex
