"""Stores behind a server that fails: every fault ends in the right word, within the deadline.

A store is patient, so that a busy machine changes no number of requests. Where time runs out, nothing but that is asked
of the call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvbm.core.errors import ConfigError, PoolError
from kvbm.pools.stores.base import Get, Got, ObjectStore, Put, Refusal, StoreTrouble
from kvbm.pools.stores.blobs import PART_BYTES
from kvbm.pools.stores.link import RequestLimits
from kvbm.pools.stores.opening import open_store
from kvbm.pools.stores.s3 import store_name
from tests.eventually import eventually
from tests.extras import needed
from tests.faulty_http import Fault, FaultyServer, faulty
from tests.object_stores import PATIENT, WAIT_S, Place, azure_place, boto3_client, redis_place, s3_place
from tests.servers import free_port, redis_server, s3_server

SHORT_S = 0.5  # of calls that nobody answers
BODY = b"what lies there" * 100

KINDS = {"s3": "s3_endpoint", "azure": "azurite_endpoint"}


class Broken:
    """A store that is opened while all is well, and the server that breaks it."""

    def __init__(self, server: FaultyServer, place: Place, store: ObjectStore) -> None:
        self.server = server
        self.store = store
        self._place = place

    def impatient(self, read_timeout_s: float) -> ObjectStore:
        """Another store, whose requests are asked again soon; opened as often as it takes."""
        limits = RequestLimits(requests_in_flight=4, connect_timeout_s=WAIT_S, read_timeout_s=read_timeout_s)

        def opened() -> ObjectStore | None:
            try:
                return self._place.open(endpoint=self.server.url, limits=limits)
            except PoolError:
                return None

        store = eventually(opened, "it cannot be opened")
        assert store is not None
        return store

    def breaks(self, *faults: Fault) -> None:
        """From now on."""
        self.server.faults[:] = faults
        self.server.asked.clear()
        self.server.most_at_once = 0


@pytest.fixture(params=KINDS)
def broken(request: pytest.FixtureRequest) -> Iterator[Broken]:
    endpoint = request.getfixturevalue(KINDS[request.param])
    with faulty(endpoint) as server:
        place: Place = (s3_place if request.param == "s3" else azure_place)(endpoint)
        with closing(place.open(endpoint=server.url)) as store:
            assert store.put([Put("name", BODY), Put("other", BODY[::-1])], WAIT_S) == [None, None]
            yield Broken(server, place, store)


only_s3 = pytest.mark.parametrize("broken", ["s3"], indirect=True)


def all_of(store: ObjectStore, deadline_s: float = WAIT_S) -> list[Refusal | None]:
    """Every kind of call, one after the other; what each said. None for what was done."""
    got = store.get([Get("name"), Get("name", 10, 10)], deadline_s)
    answers: list[Refusal | None] = [answer if isinstance(answer, Refusal) else None for answer in got]
    answers += store.put([Put("new", BODY)], deadline_s)
    answers += store.delete(["gone"], deadline_s)
    answers.append(store.replace("lease", b"mine", None, deadline_s))
    return answers


@pytest.mark.parametrize(
    ("fault", "trouble", "words"),
    [
        (Fault("status", 500, "InternalError"), StoreTrouble.REFUSED, "500 InternalError after 4 attempts"),
        (Fault("status", 503, "SlowDown"), StoreTrouble.REFUSED, "503 SlowDown after 4 attempts"),
        (Fault("status", 503), StoreTrouble.REFUSED, "503 Service Unavailable after 4 attempts"),
        (Fault("status", 403, "AccessDenied"), StoreTrouble.DENIED, "403 AccessDenied"),
        (Fault("status", 401, "Unauthorized"), StoreTrouble.DENIED, "401 Unauthorized"),
        (Fault("status", 400, "ExpiredToken"), StoreTrouble.DENIED, "400 ExpiredToken"),
        (Fault("status", 403, "RequestTimeTooSkewed"), StoreTrouble.DENIED, "clock"),
        (Fault("status", 404, "NoSuchBucket"), StoreTrouble.REFUSED, "404 NoSuchBucket"),
        (Fault("reset"), StoreTrouble.SILENT, "after 4 attempts"),
    ],
)
def test_a_fault_of_every_request_has_its_word(broken: Broken, fault: Fault, trouble: StoreTrouble, words: str) -> None:
    broken.breaks(fault)
    for answer in all_of(broken.store):
        assert answer is not None
        assert answer.trouble is trouble, answer
        assert words in answer.words
    with pytest.raises(PoolError, match=r"listing ''"):
        list(broken.store.listed("", WAIT_S))
    broken.breaks()
    assert [answer for answer in all_of(broken.store) if answer is not None] == []


def test_where_nobody_answers_each_call_ends_with_its_deadline(broken: Broken) -> None:
    broken.breaks(Fault("never"))
    for answer in all_of(broken.store, SHORT_S):
        assert answer == Refusal(StoreTrouble.SILENT, "no answer within 0.5 s")
    with pytest.raises(PoolError, match=r"listing '' behind '': no answer within 0\.5 s"):
        list(broken.store.listed("", SHORT_S))
    broken.breaks()
    assert [answer for answer in all_of(broken.store) if answer is not None] == []


@only_s3
def test_a_request_that_nobody_answers_is_asked_again(broken: Broken) -> None:
    with closing(broken.impatient(0.3)) as store:
        broken.breaks(Fault("never"))
        [answer] = store.get([Get("name")], WAIT_S)
        assert answer == Refusal(StoreTrouble.SILENT, "no answer in time after 4 attempts")
    broken.breaks()
    with closing(broken.impatient(3.0)) as store:
        [answer] = store.get([Get("name")], WAIT_S)
        broken.breaks(Fault("never", times=1), Fault("again"))
        [answer] = store.get([Get("name")], WAIT_S)
        assert isinstance(answer, Got) and bytes(answer.body) == BODY


def test_what_is_not_there_is_absent_and_nobody_is_asked_twice(broken: Broken) -> None:
    broken.breaks()
    [answer] = broken.store.get([Get("missing")], WAIT_S)
    assert isinstance(answer, Refusal)
    assert answer.trouble is StoreTrouble.ABSENT
    assert len(broken.server.asked) == 1


@pytest.mark.parametrize("kind", ["slow", "never"])
def test_a_stall_costs_the_deadline_and_never_more(broken: Broken, kind: str) -> None:
    broken.breaks(Fault(kind))
    answers = broken.store.get([Get("name")] * 20, SHORT_S)
    assert answers == [Refusal(StoreTrouble.SILENT, "no answer within 0.5 s")] * 20
    broken.breaks()
    [answer] = broken.store.get([Get("name")], WAIT_S)
    assert isinstance(answer, Got)


def test_one_that_stalls_does_not_hold_up_the_others(broken: Broken) -> None:
    broken.breaks(Fault("stalled", times=1))
    answers: list[Got | Refusal] = []
    asking = threading.Thread(target=lambda: answers.extend(broken.store.get([Get("name")] * 8, WAIT_S)))
    asking.start()
    # Four are under way at a time, so all are asked only when those beside it have ended.
    eventually(lambda: (len(broken.server.asked), broken.server.at_once) == (8, 1), "the others wait for one")
    broken.server.released.set()
    asking.join(WAIT_S)
    assert [bytes(answer.body) for answer in answers if isinstance(answer, Got)] == [BODY] * 8
    assert len(broken.server.asked) == 9  # it was asked again


@pytest.mark.parametrize("kind", ["cut", "reset"])
@pytest.mark.parametrize("times", [1, 3])
def test_an_answer_that_is_cut_is_asked_for_again(broken: Broken, kind: str, times: int) -> None:
    broken.breaks(Fault(kind, times=times))
    [answer] = broken.store.get([Get("name")], WAIT_S)
    assert isinstance(answer, Got), answer
    assert bytes(answer.body) == BODY
    assert len(broken.server.asked) == times + 1


def test_a_body_shorter_than_was_said_is_never_taken_for_whole(broken: Broken) -> None:
    broken.breaks(Fault("cut", method="GET"))
    answers = broken.store.get([Get("name"), Get("name", 100, 50), Get("name", 0, None, 2 * PART_BYTES)], WAIT_S)
    for answer in answers:
        assert isinstance(answer, Refusal)
        assert answer.trouble is StoreTrouble.REFUSED
        assert "the answer ended early after 4 attempts" in answer.words


def test_another_objects_bytes_come_as_they_are_for_the_pool_to_judge(broken: Broken) -> None:
    broken.breaks()
    broken.store.get([Get("other")], WAIT_S)
    broken.breaks(Fault("again"))
    [answer] = broken.store.get([Get("name")], WAIT_S)
    assert isinstance(answer, Got)
    assert bytes(answer.body) == BODY[::-1]


def test_an_error_that_passes_is_not_seen(broken: Broken) -> None:
    broken.breaks(Fault("status", 503, "SlowDown", times=3))
    assert broken.store.put([Put("new", BODY)], WAIT_S) == [None]
    broken.breaks(Fault("status", 500, "InternalError", times=2))
    assert len(list(broken.store.listed("", WAIT_S))) == 3


def test_a_put_that_was_done_but_not_said_is_taken(broken: Broken) -> None:
    broken.breaks(Fault("deaf", 500, "InternalError", times=1, method="PUT"))
    [answer] = broken.store.put([Put("new", BODY)], WAIT_S)
    assert answer is not None
    assert answer.trouble is StoreTrouble.TAKEN  # the pool looks what lies there
    [found] = broken.store.get([Get("new")], WAIT_S)
    assert isinstance(found, Got)
    assert bytes(found.body) == BODY


@pytest.mark.parametrize("expected", [None, b"mine"])
def test_a_replacement_that_was_done_but_not_said_is_done(broken: Broken, expected: bytes | None) -> None:
    if expected is not None:
        assert broken.store.replace("lease", expected, None, WAIT_S) is None
    broken.breaks(Fault("deaf", 500, "InternalError", times=1, method="PUT"))
    assert broken.store.replace("lease", b"still mine", expected, WAIT_S) is None
    [found] = broken.store.get([Get("lease")], WAIT_S)
    assert isinstance(found, Got)
    assert bytes(found.body) == b"still mine"


def test_a_run_never_has_more_requests_under_way_than_allowed(broken: Broken) -> None:
    broken.breaks(Fault("held"))
    answers: list[list[Refusal | None]] = []
    threads = [
        threading.Thread(
            target=lambda at=at: answers.append(  # type: ignore[misc]
                broken.store.put([Put(f"{at}/{of}", BODY) for of in range(10)], WAIT_S)
            )
        )
        for at in range(3)
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: broken.server.at_once == PATIENT.requests_in_flight, "fewer are under way than allowed")
    threads[0].join(0.05)
    assert broken.server.at_once == PATIENT.requests_in_flight
    broken.server.released.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert answers == [[None] * 10] * 3
    assert broken.server.most_at_once == PATIENT.requests_in_flight


def test_a_close_ends_what_is_under_way(broken: Broken) -> None:
    broken.breaks(Fault("never"))
    answers: list[Got | Refusal] = []
    waiting = threading.Thread(target=lambda: answers.extend(broken.store.get([Get("name")] * 3, 600)))
    waiting.start()
    eventually(lambda: broken.server.asked, "nothing is asked")
    broken.store.close()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    assert {answer.trouble for answer in answers if isinstance(answer, Refusal)} == {StoreTrouble.SILENT}


@only_s3
def test_a_store_without_conditional_puts_is_asked_first(broken: Broken) -> None:
    broken.breaks(Fault("status", 501, "NotImplemented", header="if-none-match"))
    assert [
        answer and answer.trouble for answer in broken.store.put([Put("new", b"x"), Put("name", b"x")], WAIT_S)
    ] == [None, StoreTrouble.TAKEN]
    broken.breaks(Fault("status", 501, "NotImplemented", header="if-none-match"))
    assert broken.store.put([Put("newer", b"x")], WAIT_S) == [None]
    assert [asked.method for asked in broken.server.asked] == ["HEAD", "PUT"]  # it is told once
    [answer] = broken.store.get([Get("name")], WAIT_S)
    assert isinstance(answer, Got)
    assert bytes(answer.body) == BODY


@only_s3
@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("if-none-match", "a put where nothing has the name (If-None-Match: *) is done where something has it"),
        ("if-match", "a put over one ETag alone (If-Match) is done over another"),
    ],
)
def test_a_store_that_ignores_a_condition_is_found_out_and_asked_first_from_then_on(
    broken: Broken, header: str, words: str
) -> None:
    broken.breaks(Fault("without", header=header))
    assert broken.store.ignored_conditions("trial", WAIT_S) == (words,)
    assert [one.name for one in broken.store.listed("", WAIT_S)] == ["name", "other"]
    [answer] = broken.store.put([Put("name", b"x")], WAIT_S)
    assert answer is not None and answer.trouble is StoreTrouble.TAKEN
    assert broken.store.replace("lease", b"one", None, WAIT_S) is None
    for expected in (None, b"none"):
        refused = broken.store.replace("lease", b"other", expected, WAIT_S)
        assert refused is not None and refused.trouble is StoreTrouble.TAKEN
    assert broken.store.replace("lease", b"two", b"one", WAIT_S) is None


@only_s3
def test_conditions_that_a_store_refuses_are_told_and_replacements_go_without(broken: Broken) -> None:
    broken.breaks(*(Fault("status", 501, "NotImplemented", header=header) for header in ("if-none-match", "if-match")))
    said = broken.store.ignored_conditions("trial", WAIT_S)
    assert isinstance(said, tuple) and len(said) == 2 and all("501 NotImplemented" in words for words in said)
    assert broken.store.replace("lease", b"one", None, WAIT_S) is None
    assert broken.store.replace("lease", b"two", b"one", WAIT_S) is None
    refused = broken.store.replace("lease", b"three", b"one", WAIT_S)
    assert refused is not None and refused.trouble is StoreTrouble.TAKEN


@only_s3
def test_a_trial_that_the_store_does_not_let_happen_says_nothing_of_conditions(broken: Broken) -> None:
    broken.breaks(Fault("status", 403, "AccessDenied", method="PUT"))
    refused = broken.store.ignored_conditions("trial", WAIT_S)
    assert isinstance(refused, Refusal) and refused.trouble is StoreTrouble.DENIED


@only_s3
@pytest.mark.parametrize("code", ["RequestTimeout", "IncompleteBody"])
def test_a_put_that_came_too_slowly_is_put_again_and_conditions_count_as_before(broken: Broken, code: str) -> None:
    """Amazon says so with a 400, as others say that they know no condition."""
    broken.breaks(Fault("status", 400, code, times=1, method="PUT"))
    assert broken.store.put([Put("new", b"x")], WAIT_S) == [None]
    assert [asked.method for asked in broken.server.asked] == ["PUT", "PUT"]
    assert all("if-none-match" in asked.headers for asked in broken.server.asked)


@only_s3
def test_a_conflict_with_another_put_is_tried_again(broken: Broken) -> None:
    broken.breaks(Fault("status", 409, "ConditionalRequestConflict", times=2, method="PUT"))
    assert broken.store.put([Put("new", b"x")], WAIT_S) == [None]
    assert len(broken.server.asked) == 3


@only_s3
def test_names_that_cannot_be_deleted_together_are_deleted_one_by_one(broken: Broken) -> None:
    broken.breaks(Fault("status", 501, "NotImplemented", method="POST"))
    assert broken.store.delete(["name", "never", "other"], WAIT_S) == [None] * 3
    assert list(broken.store.listed("", WAIT_S)) == []


# -- opening ----------------------------------------------------------------------------------------------------------


def refusal_to_open(place: Place, **options: object) -> str:
    with pytest.raises(PoolError) as caught:
        place.open(**{"open_wait_s": WAIT_S, **options})
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith("OBJECT pool ")
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_a_bucket_that_is_denied_is_named(kind: str, request: pytest.FixtureRequest) -> None:
    endpoint = request.getfixturevalue(KINDS[kind])
    with faulty(endpoint) as server:
        server.faults.append(Fault("status", 403, "AccessDenied"))
        place: Place = (s3_place if kind == "s3" else azure_place)(endpoint)
        assert "refuses access to" in (said := refusal_to_open(place, endpoint=server.url))
        assert "it is not ours" in said


@pytest.mark.parametrize("kind", KINDS)
def test_an_endpoint_that_says_nothing_is_named_when_it_was_waited_for(
    kind: str, request: pytest.FixtureRequest
) -> None:
    endpoint = request.getfixturevalue(KINDS[kind])
    with faulty(endpoint) as server:
        place: Place = (s3_place if kind == "s3" else azure_place)(endpoint)
        server.faults.append(Fault("never"))
        said = refusal_to_open(place, endpoint=server.url, open_wait_s=SHORT_S)
        assert "does not answer" in said and "no answer within 0.5 s" in said
    nobody = f"http://127.0.0.1:{free_port()}/devstoreaccount1"
    wait_s = WAIT_S if kind == "s3" else SHORT_S  # Azure's client tries again after 15 s
    assert "does not answer" in refusal_to_open(place, endpoint=nobody, open_wait_s=wait_s)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bucket_that_is_missing_is_named(kind: str, request: pytest.FixtureRequest) -> None:
    endpoint = request.getfixturevalue(KINDS[kind])
    environment = (s3_place if kind == "s3" else azure_place)(endpoint).environment
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(PoolError, match="'nowhere'; create it"):
            open_store(f"{'s3' if kind == 's3' else 'az'}://nowhere/blocks", endpoint=endpoint, open_wait_s=WAIT_S)


def test_a_bucket_of_another_region_is_named_with_its_region(s3_endpoint: str) -> None:
    client = boto3_client(s3_endpoint, "test", "test")
    client.create_bucket(Bucket="far-away-kvbm", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    with faulty(s3_endpoint) as server:
        server.faults.append(Fault("status", 400, "AuthorizationHeaderMalformed", region="eu-west-1"))
        place = s3_place(s3_endpoint)
        said = refusal_to_open(place, endpoint=server.url)
    assert "lies in region 'eu-west-1', not in 'us-east-1'; set pools.object.region = 'eu-west-1'" in said


def test_credentials_come_from_the_chain_and_are_asked_for_again(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-the-chain")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-session")
    bucket = s3_place(s3_endpoint).url
    with faulty(s3_endpoint) as server, closing(open_store(bucket, endpoint=server.url, open_wait_s=WAIT_S)) as store:
        assert store.put([Put("name", b"x")], WAIT_S) == [None]
        asked = server.asked[-1]
    assert "Credential=from-the-chain/" in asked.headers["authorization"]
    assert asked.headers["x-amz-security-token"] == "a-session"


def test_without_credentials_the_sentence_says_so(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = s3_place(s3_endpoint).url
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(PoolError, match="no credentials for bucket"):
        open_store(bucket, endpoint=s3_endpoint, open_wait_s=WAIT_S)


def test_a_lifecycle_that_deletes_blocks_is_remarked_on(s3_endpoint: str) -> None:
    place = s3_place(s3_endpoint)
    bucket = place.url.split("/")[2]
    rules = [
        {"ID": "a", "Status": "Enabled", "Filter": {"Prefix": "blocks/"}, "Expiration": {"Days": 7}},
        {"ID": "b", "Status": "Enabled", "Filter": {"Prefix": "elsewhere/"}, "Expiration": {"Days": 1}},
        {"ID": "c", "Status": "Disabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 2}},
    ]
    boto3_client(s3_endpoint, "test", "test").put_bucket_lifecycle_configuration(
        Bucket=bucket, LifecycleConfiguration={"Rules": rules}
    )
    with closing(place.open()) as store:
        assert store.expiry_days == 7  # type: ignore[attr-defined]
        assert "after 7 days" in store.remarks[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket/x",
        "http://bucket",
        "s3://",
        "s3://UPPER/x",
        "s3://bucket/a b",
        "az://account",
        "redis://",
        "az://A/b",
    ],
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"correct it|begin it with"):
        open_store(url)


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [
        ("", "s3://bucket/a/b"),
        ("https://s3.eu-west-1.amazonaws.com", "s3://bucket/a/b"),
        ("http://MinIO.local:9000/", "s3://bucket/a/b?endpoint=minio.local:9000"),
        ("https://store.example:443", "s3://bucket/a/b?endpoint=store.example"),
        ("https://store.example", "s3://bucket/a/b?endpoint=store.example"),
    ],
)
def test_a_store_has_one_name_however_it_is_written(endpoint: str, name: str) -> None:
    assert store_name("bucket", "a/b", endpoint) == name


@pytest.mark.nightly
def test_of_puts_of_one_name_that_look_at_once_the_server_of_the_tests_takes_one() -> None:
    with s3_server(look_s=0.2) as endpoint, closing(s3_place(endpoint).open()) as store:
        answers = store.put([Put("name", BODY)] * 4, WAIT_S)
    assert sorted(str(answer and answer.trouble) for answer in answers) == ["None", *[str(StoreTrouble.TAKEN)] * 3]


def test_a_server_that_is_gone_costs_the_attempts_at_most() -> None:
    with s3_server() as endpoint:
        store = s3_place(endpoint).open()
    with closing(store):
        for answer in [*store.put([Put(f"{at}", b"x") for at in range(20)], WAIT_S), *all_of(store)]:
            assert answer == Refusal(StoreTrouble.SILENT, "no connection after 4 attempts")


# -- radosgw and Redis ------------------------------------------------------------------------------------------------


@pytest.mark.objects
@pytest.mark.parametrize("place", ["radosgw"], indirect=True)
def test_a_wrong_secret_is_denied(place: Place) -> None:
    said = refusal_to_open(place, secret_access_key="wrong", open_wait_s=WAIT_S)
    assert "refuses access to bucket" in said
    assert "403" in said


@pytest.mark.objects
@pytest.mark.parametrize("place", ["radosgw"], indirect=True)
def test_a_clock_that_is_wrong_is_named(place: Place) -> None:
    """Ceph refuses what is signed fifteen minutes ago: the server between holds a signed request's date to be old."""
    with faulty(place.endpoint) as server, closing(place.open(endpoint=server.url)) as store:
        server.faults.append(Fault("dated", header="x-amz-date"))
        [answer] = store.put([Put("other", b"x")], WAIT_S)
    assert isinstance(answer, Refusal)
    assert answer.trouble is StoreTrouble.DENIED
    assert "clock" in answer.words


@pytest.mark.objects
def test_a_redis_that_is_gone_or_stalls_is_silent_within_the_deadline() -> None:
    with redis_server() as url:
        place = redis_place(url)
        store = place.open()
        assert store.put([Put("name", b"x")], WAIT_S) == [None]
    with closing(store):
        for answer in all_of(store):
            assert answer is not None
            assert answer.trouble is StoreTrouble.SILENT, answer
    said = refusal_to_open(place)
    assert "does not answer" in said


@pytest.mark.objects
def test_a_redis_cluster_is_known_by_any_node_and_has_one_database(redis_cluster_url: str) -> None:
    with closing(redis_place(redis_cluster_url).open()) as store:
        puts = [Put(f"{at}", b"x" * at) for at in range(60)]
        assert store.put(puts, WAIT_S) == [None] * 60
        got = store.get([Get(put.name) for put in puts], WAIT_S)
        assert [bytes(one.body) for one in got if isinstance(one, Got)] == [put.body for put in puts]
    with pytest.raises(ConfigError, match="database 0 alone"):
        redis_place(redis_cluster_url.removesuffix("/0") + "/1").open()


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:99999/0", "redis://u:p/w@h:1/0", "redis://[::1/0", "rediss://:6379"]
)
def test_a_redis_url_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="correct it") as caught:
        open_store(url)
    assert "p/w" not in str(caught.value)


@pytest.mark.objects
def test_an_option_of_a_redis_url_that_is_none_is_refused_by_its_name(redis_url: str) -> None:
    with pytest.raises(ConfigError, match="wait_for"):
        open_store(f"{redis_url}?wait_for=1")


@pytest.mark.objects
def test_a_redis_that_was_demoted_loses_our_connections_at_its_first_refusal() -> None:
    redis = needed("redis", "redis")
    with redis_server() as url, redis.Redis.from_url(url) as admin, closing(redis_place(url).open()) as store:
        assert store.put([Put("name", b"x")], WAIT_S) == [None]
        assert store.replace("lease", b"y", None, WAIT_S) is None

        def met() -> int:
            return int(admin.info("stats")["total_connections_received"])

        admin.replicaof("127.0.0.1", free_port())  # nobody is there, so it keeps what it has
        for call in (
            lambda: store.put([Put("new", b"x")], WAIT_S),
            lambda: store.delete(["name"], WAIT_S),
            lambda: [store.replace("other", b"x", None, WAIT_S)],
            lambda: [store.replace("lease", b"x", b"y", WAIT_S)],
        ):
            before = met()
            [refused] = call()
            assert refused is not None and "read only replica" in refused.words
            store.get([Get("name")], WAIT_S)
            assert met() == before + 1  # by another connection


@pytest.mark.objects
def test_a_redis_with_a_password_wants_it_and_its_name_does_not_tell_it() -> None:
    with redis_server("--requirepass", "secret") as url:
        assert "refuses access" in refusal_to_open(redis_place(url))
        said = refusal_to_open(redis_place(url.replace("//", "//default:wrong@")))
        assert "refuses access" in said
        assert "wrong@" not in said
        with closing(redis_place(url.replace("//", "//default:secret@")).open()) as store:
            assert store.put([Put("name", b"x")], WAIT_S) == [None]
            assert "secret" not in store.name


@pytest.mark.objects
def test_a_redis_forgets_after_its_ttl_and_refuses_when_full(redis_url: str) -> None:
    with closing(redis_place(redis_url).open(ttl_s=1)) as store:
        assert store.put([Put("name", b"x")], WAIT_S) == [None]
        eventually(lambda: not isinstance(store.get([Get("name")], WAIT_S)[0], Got), "it does not forget")
    small = ("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    with redis_server(*small) as url, closing(redis_place(url).open()) as store:
        answers = store.put([Put(f"{at}", bytes(1 << 20)) for at in range(8)], WAIT_S)
    refused = [answer for answer in answers if answer is not None]
    assert refused
    assert {answer.trouble for answer in refused} == {StoreTrouble.REFUSED}
    assert "maxmemory" in refused[0].words
