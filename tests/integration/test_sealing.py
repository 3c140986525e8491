"""Encrypted objects: only their tenant's keys open them, under their own name alone, and nothing about them is to be
read from outside.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvbm.core.errors import ConfigError, PoolError
from kvbm.core.ids import HASH_BYTES, Namespace
from kvbm.pools.base import ReadOutcome
from kvbm.pools.object.encryption import ENVELOPE_BYTES, Sealing
from kvbm.pools.object.header import header_bytes
from kvbm.pools.object.pool import BlockObjects, Described
from kvbm.pools.stores.memory import MemoryStore
from kvbm.pools.tenant_keys import KeySource, add_key, keys_of_command, keys_of_file, new_key, parse_keys
from tests.eventually import WAIT_S
from tests.object_pools import memory_objects
from tests.pool_runs import Run, random_run

BLOCK_BYTES = 96
K = 2
GOOD, MISSING, CORRUPT, FAILED = ReadOutcome.GOOD, ReadOutcome.MISSING, ReadOutcome.CORRUPT, ReadOutcome.FAILED
ACME = Namespace(model="tiny", revision="r1", block_tokens=16, tenant="acme")
OTHER = Namespace(model="tiny", revision="r1", block_tokens=16, tenant="other")
NOBODY = Namespace(model="tiny", revision="r1", block_tokens=16)


class Instance:
    """An instance with a file of keys and a pool on a store that others share."""

    def __init__(self, store: MemoryStore, source: KeySource) -> None:
        self.troubles: list[str] = []
        self.sealing = Sealing(source, K, header_bytes(K), self.troubles.append)
        self.pool: BlockObjects = memory_objects(
            BLOCK_BYTES,
            K,
            store,
            envelopes=self.sealing,
            namespaces=[ACME, OTHER, NOBODY],
            on_trouble=self.troubles.append,
        )

    def outcomes(self, run: Run) -> list[ReadOutcome]:
        """How a read of a whole run ends; what is good is what was put."""
        rows = run.room()
        outcomes = self.pool.get(run.namespace, run.hashes, rows).outcomes
        good = [index for index, outcome in enumerate(outcomes) if outcome is GOOD]
        assert (rows[good] == run.rows[good]).all()
        return outcomes


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "keys.toml"
    add_key(made, "acme", "first")
    add_key(made, "other", "first")
    return made


@pytest.fixture
def one(store: MemoryStore, path: Path) -> Instance:
    return Instance(store, keys_of_file(str(path)))


def run_of(namespace: Namespace, objects: int = 1, seed: int = 0) -> Run:
    return random_run(objects * K, BLOCK_BYTES, seed, namespace)


def test_what_one_instance_seals_another_with_the_same_keys_opens(
    one: Instance, store: MemoryStore, path: Path
) -> None:
    run = run_of(ACME, 5)
    assert one.pool.put(run.rows, run.proof) == [True] * 5 * K
    other = Instance(store, keys_of_file(str(path)))
    assert other.outcomes(run) == [GOOD] * 5 * K
    assert other.pool.put(run.rows, run.proof) == [True] * 5 * K
    assert other.pool.stats().found_objects == 5
    names = other.pool.names(ACME.id, [run.hashes[end - HASH_BYTES : end] for end in (32, 64)])
    size_bytes = ENVELOPE_BYTES + 32 + header_bytes(K) + K * BLOCK_BYTES
    assert other.pool.describe(names[:1]) == [Described(ACME.id, run.hashes[:32], run.proof.epoch, size_bytes)]
    assert [listed.size_bytes for listed in other.pool.listed()] == [size_bytes] * 5
    assert other.troubles == []


def test_a_stranger_learns_nothing_from_names_and_bytes(one: Instance, store: MemoryStore) -> None:
    run = run_of(ACME, 3)
    one.pool.put(run.rows, run.proof)
    for name, (body, _) in store.objects.items():
        seen = name.encode() + body
        for secret in (b"acme", ACME.id, ACME.id.hex().encode()):
            assert secret not in seen
        for at in range(0, len(run.hashes), HASH_BYTES):
            assert run.hashes[at : at + HASH_BYTES] not in seen
            assert run.hashes[at : at + HASH_BYTES].hex().encode() not in seen
        for row in run.rows:
            assert row[:16].tobytes() not in seen


def test_the_same_blocks_of_two_tenants_have_nothing_in_common(one: Instance, store: MemoryStore) -> None:
    mine, theirs = run_of(ACME), run_of(OTHER)
    one.pool.put(mine.rows, mine.proof)
    one.pool.put(theirs.rows, theirs.proof)
    first, second = store.objects
    assert first.split("/")[:2] == second.split("/")[:2] == [str(K), "e"]
    assert first.split("/")[2:] != second.split("/")[2:]
    assert first.split("/")[3] != second.split("/")[3]


def test_every_flipped_bit_is_found(one: Instance, store: MemoryStore) -> None:
    run = run_of(ACME)
    one.pool.put(run.rows, run.proof)
    [(name, (body, _))] = store.objects.items()
    key_id = range(8, 16)
    for at in range(len(body)):
        for bit in range(8):
            changed = bytearray(body)
            changed[at] ^= 1 << bit
            store.objects[name] = (bytes(changed), 0)
            assert one.outcomes(run) == [FAILED if at in key_id else CORRUPT] * K
    for length in range(len(body)):
        store.objects[name] = (body[:length], 0)
        assert GOOD not in one.outcomes(run)


def test_an_object_sealed_by_a_newer_kvbm_is_a_miss_that_says_so(one: Instance, store: MemoryStore) -> None:
    run = run_of(ACME)
    one.pool.put(run.rows, run.proof)
    [(name, (body, _))] = store.objects.items()
    changed = bytearray(body)
    changed[4:6] = (2).to_bytes(2, "little")
    changed[28:60] = bytes(32)  # whatever the newer one has there
    changed[60:] = bytes(len(changed) - 60)
    store.objects[name] = (bytes(changed), 0)
    assert one.outcomes(run) == [FAILED] * K  # not corrupt, which would withdraw what others can read
    assert (
        f"{name} was put by a newer kvbm, as version 2; this one reads up to version 1: upgrade it" in one.troubles[-1]
    )


def test_objects_under_each_others_names_do_not_open(one: Instance, store: MemoryStore) -> None:
    run = run_of(ACME, 2)
    one.pool.put(run.rows, run.proof)
    first, second = store.objects
    body, other = store.objects[first][0], store.objects[second][0]
    store.objects[first] = (other, 0)
    assert sorted(one.outcomes(run)) == [GOOD] * K + [CORRUPT] * K
    lead = ENVELOPE_BYTES + header_bytes(K) + 16
    store.objects[first] = (body[:lead] + other[lead:], 0)  # the body of another object of the same tenant and key
    assert sorted(one.outcomes(run)) == [GOOD] * K + [CORRUPT] * K
    assert one.pool.describe([first])[0] is not None


def test_a_tenant_cannot_poison_another(one: Instance, store: MemoryStore, tmp_path: Path) -> None:
    """Who may write the bucket but lacks the keys puts an object where one is looked for."""
    run = run_of(ACME)
    stranger_path = tmp_path / "stranger.toml"
    add_key(stranger_path, "acme", "mine")
    stranger = Instance(store, keys_of_file(str(stranger_path)))
    stranger.pool.put(run.rows, run.proof)
    [(_, (body, _))] = store.objects.items()
    [name] = one.pool.names(ACME.id, [run.hashes[-HASH_BYTES:]])
    store.objects[name] = (body, 0)
    assert one.outcomes(run) == [FAILED] * K
    assert "sealed with the key" in one.troubles[0]
    assert one.pool.put(run.rows, run.proof) == [False] * K


def test_a_wrong_key_is_a_miss_and_one_remark_and_costs_no_claim(one: Instance, store: MemoryStore, path: Path) -> None:
    run = run_of(ACME, 3)
    one.pool.put(run.rows, run.proof)
    wrong = path.with_name("wrong.toml")
    text = path.read_text()
    key = next(line for line in text.splitlines() if line.startswith('keys."first"'))
    wrong.write_text(text.replace(key, f'keys."first" = "{new_key()}"', 1))
    other = Instance(store, keys_of_file(str(wrong)))
    assert other.outcomes(run) == [FAILED] * 3 * K  # not corrupt, which would withdraw what others can read
    assert len(other.troubles) == 1
    assert "'acme'" in other.troubles[0] and str(wrong) in other.troubles[0]


def test_a_tenant_without_keys_is_neither_put_nor_got_and_that_is_said_once(one: Instance, path: Path) -> None:
    run = run_of(NOBODY)
    for _ in range(3):
        assert one.pool.put(run.rows, run.proof) == [False] * K
        assert one.outcomes(run) == [FAILED] * K
    [trouble] = one.troubles
    assert f"{path} has no keys of tenant ''; write a table [tenants.\"\"]" in trouble
    with pytest.raises(PoolError, match="has no keys of tenant"):
        one.pool.names(NOBODY.id, [run.hashes[-HASH_BYTES:]])
    with pytest.raises(ConfigError, match="has no keys of tenant ''"):
        one.sealing.check([ACME, NOBODY])
    unknown = random_run(
        K, BLOCK_BYTES, namespace=Namespace(model="never said", revision="r1", block_tokens=16, tenant="acme")
    )
    assert one.pool.put(unknown.rows, unknown.proof) == [False] * K
    assert "nobody has named" in one.troubles[1]


def test_keys_rotate_while_instances_run(one: Instance, store: MemoryStore, path: Path) -> None:
    old, new = run_of(ACME, seed=1), run_of(ACME, seed=2)
    other = Instance(store, keys_of_file(str(path)))
    one.pool.put(old.rows, old.proof)
    add_key(path, "acme", "second")
    one.pool.look()
    one.pool.put(new.rows, new.proof)
    assert one.outcomes(old) + one.outcomes(new) == [GOOD] * 2 * K
    assert other.outcomes(old) + other.outcomes(new) == [GOOD] * K + [FAILED] * K
    other.pool.look()
    assert other.outcomes(old) + other.outcomes(new) == [GOOD] * 2 * K
    path.write_text("nonsense")
    other.pool.look()
    assert "the keys of before stay in use" in other.troubles[-1]
    assert other.outcomes(old) + other.outcomes(new) == [GOOD] * 2 * K


def test_a_sealed_pool_and_a_plain_one_never_meet(one: Instance, store: MemoryStore) -> None:
    run = run_of(ACME)
    plain = memory_objects(BLOCK_BYTES, K, store, namespaces=[ACME])
    one.pool.put(run.rows, run.proof)
    assert plain.get(run.namespace, run.hashes, run.room()).outcomes == [MISSING] * K
    assert plain.describe(list(store.objects)) == [None]


# -- where keys come from ---------------------------------------------------------------------------------------------


def test_a_command_prints_keys(path: Path) -> None:
    source = keys_of_command(f"{sys.executable} -c \"print(open('{path}').read())\"", wait_s=WAIT_S)
    assert set(source.load()) == {"acme", "other"}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import sys; sys.exit('no vault here')", "ended with status 1 (no vault here)"),
        ("import time; time.sleep(600)", "has not ended within 0.5 s"),
        ("print('hello')", "is not TOML"),
        ("pass", "has no keys"),
    ],
)
def test_a_command_that_fails_is_told_apart(script: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        keys_of_command(f'{sys.executable} -c "{script}"', wait_s=0.5 if "sleep" in script else WAIT_S).load()
    assert words in str(refused.value)


def test_a_command_that_is_none_is_named() -> None:
    for command in ("/nowhere/at/all", "", '"'):
        with pytest.raises(ConfigError, match="cannot be run"):
            keys_of_command(command).load()


GOOD_KEY = "A" * 43 + "="


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no keys"),
        ("[acme]", "has no keys"),
        ("tenants = " + "[" * 100_000, "is not TOML"),
        ("[tenants]", "has no keys"),
        ("[tenants.acme]", "tenant 'acme': it has no keys"),
        ("tenants.acme = 5", "tenant 'acme': it has no keys"),
        (
            f'[tenants.acme]\nnames = "{GOOD_KEY}"\ncurrent = "b"\nkeys.a = "{GOOD_KEY}"',
            "current is 'b'; write the name of one of its keys: a",
        ),
        (f'[tenants.acme]\ncurrent = "a"\nkeys.a = "{GOOD_KEY}"', "tenant 'acme': names is no key of 32 bytes"),
        ('[tenants.acme]\ncurrent = "a"\nkeys.a = "c2hvcnQ="', "keys.a is no key of 32 bytes in base64"),
        ('[tenants.acme]\ncurrent = "a"\nkeys.a = 7', "keys.a is no key of 32 bytes in base64"),
        (f'[tenants.acme]\nname = ""\nkeys.a = "{GOOD_KEY}"', "there is no entry 'name'"),
    ],
)
def test_a_file_of_keys_says_what_it_lacks_and_shows_no_key(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_keys(text, "keys.toml")
    assert words in str(refused.value)
    assert "AAAA" not in str(refused.value)
    assert "c2hv" not in str(refused.value)


def test_a_file_that_is_not_there_is_named_with_the_way_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kvbm keys .*/none --tenant NAME"):
        keys_of_file(str(tmp_path / "none")).load()


def test_commands_at_the_same_time_lose_no_key(tmp_path: Path) -> None:
    """What a lost key has sealed can be opened by nobody."""
    path, tenants = tmp_path / "keys.toml", [f"tenant-{at}" for at in range(4)]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda at: add_key(path, tenants[at % 4], f"key-{at}"), range(24)))
    found = keys_of_file(str(path)).load()
    assert {tenant: len(keys.keys) for tenant, keys in found.items()} == dict.fromkeys(tenants, 6)
    assert (path.stat().st_mode & 0o777, [one.name for one in tmp_path.iterdir()]) == (0o600, ["keys.toml"])


def test_a_new_key_is_current_and_the_old_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    for tenant, name in (('the "odd" one', "1"), ("", "1"), ("acme", "2026.11")):
        add_key(path, tenant, name)
    first = parse_keys(path.read_text(), "")
    add_key(path, "acme", "2026.12")
    second = parse_keys(path.read_text(), "")
    assert set(first) == set(second) == {'the "odd" one', "", "acme"}
    assert second["acme"].names == first["acme"].names
    assert second["acme"].tag == first["acme"].tag
    assert second["acme"].current not in first["acme"].keys
    assert set(first["acme"].keys) < set(second["acme"].keys)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match=r"has a key '2026\.12' already"):
        add_key(path, "acme", "2026.12")
