"""Liveness: who is excluded when, in numbers one can follow; then any interleaving of anything."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.catalog.members.liveness import (
    Exclude,
    ExcludedWhy,
    HeartbeatReceived,
    Input,
    LifeState,
    Liveness,
    LivenessTicked,
    OwnPulse,
    Return,
    StreamProgress,
    catalog_name,
    is_catalog,
)
from kvbm.core.ids import Epoch, InstanceId, Offset
from kvbm.streams.base import Heartbeat
from tests.examples import examples

A, B, C, D, E = (InstanceId(name) for name in "abcde")
TICK_S = 0.1
ONE, TWO = Epoch(1), Epoch(2)


class Watch:
    """A liveness and what it has said: kept in step as the index would be."""

    def __init__(self, liveness_s: float = 4.0) -> None:
        self.liveness = Liveness(liveness_s)
        self.excluded: dict[InstanceId, ExcludedWhy] = {}
        self.sent = 0

    def step(self, now_s: float, what: Input) -> None:
        for effect in self.liveness.step(now_s, what):
            if isinstance(effect, Exclude):
                assert effect.instance not in self.excluded
                self.excluded[effect.instance] = effect.why
            else:
                del self.excluded[effect.instance]
        assert set(self.excluded) == set(self.liveness.excluded())

    def hear(self, now_s: float, *instances: InstanceId, epoch: int = 1, run: str = "", stopping: bool = False) -> None:
        for instance in instances:
            self.sent += 1
            self.step(now_s, HeartbeatReceived(beat(instance, self.sent, epoch, run, stopping)))

    def follow(self, now_s: float, *instances: InstanceId, epoch: int = 1, stopped: bool = False) -> None:
        for instance in instances:
            self.step(now_s, StreamProgress(instance, Epoch(epoch), stopped))

    def run(self, begin_s: float, end_s: float, alive: Sequence[InstanceId] = (), own: bool = True) -> None:
        """Tick along; these and the catalog itself are heard every second."""
        for tick in range(round(begin_s / TICK_S), round(end_s / TICK_S)):
            now_s = tick * TICK_S
            if tick % 10 == 0:
                if own:
                    self.step(now_s, OwnPulse())
                self.hear(now_s, *alive)
            self.step(now_s, LivenessTicked())


def beat(instance: InstanceId, wall_time_ns: int, epoch: int = 1, run: str = "", stopping: bool = False) -> Heartbeat:
    return Heartbeat(
        instance=instance,
        cluster="c",
        epoch=Epoch(epoch),
        published=Offset(0),
        wall_time_ns=wall_time_ns,
        run=run,
        stopping=stopping,
    )


def five(liveness_s: float = 4.0) -> Watch:
    watch = Watch(liveness_s)
    watch.follow(0.0, A, B, C, D, E)
    watch.run(0.0, 10.0, [A, B, C, D, E])
    assert not watch.excluded
    return watch


def test_one_that_dies_is_excluded_after_liveness_s_and_returned_when_it_is_heard() -> None:
    watch = five()
    watch.run(10.0, 13.0, [A, B, C, D])  # E was last heard at 9
    assert not watch.excluded and watch.liveness.state(E) is LifeState.LIVE
    watch.run(13.0, 13.2, [A, B, C, D])
    assert watch.excluded == {E: ExcludedWhy.SILENT} and watch.liveness.state(E) is LifeState.SILENT
    assert watch.liveness.candidates() == [A, B, C, D]
    assert watch.liveness.freshness(13.1).age_s == 0
    watch.hear(13.5, E)
    assert not watch.excluded and watch.liveness.state(E) is LifeState.LIVE


def test_one_that_is_known_and_not_heard_yet_may_serve_until_it_is_silent() -> None:
    watch = Watch()
    watch.step(0.0, OwnPulse())
    watch.hear(0.0, A, B)
    watch.follow(0.0, A, B, C, D)
    watch.follow(0.0, E, stopped=True)
    assert watch.liveness.candidates() == [A, B, C, D]
    assert [watch.liveness.may_serve(one) for one in (A, C, E)] == [True, True, False]
    assert [watch.liveness.load_age_s(0.5, one) for one in (A, C)] == [0.0, None]
    assert not watch.liveness.loads_are_fresh(0.5)
    watch.hear(1.0, C, D)
    assert watch.liveness.loads_are_fresh(1.5)
    watch.hear(1.0, D, stopping=True)
    assert watch.liveness.candidates() == [A, B, C] and watch.liveness.stopping(9) == [D]
    assert [watch.liveness.why_left_out(one) for one in (C, D, E)] == ["", "stopping", "stopped"]
    watch.follow(1.0, InstanceId("f"))
    watch.run(1.0, 4.0, [A, B, C])
    assert watch.liveness.candidates() == [A, B, C, "f"]
    watch.run(4.0, 6.0, [A, B, C])
    assert watch.liveness.candidates() == [A, B, C]
    assert {one: watch.liveness.why_left_out(one) for one in watch.liveness.instances()} == {
        A: "",
        B: "",
        C: "",
        D: "silent",
        E: "stopped",
        "f": "silent",
    }


def test_a_load_that_was_told_long_ago_is_a_guess_and_says_how_old_it_is() -> None:
    watch = five()
    assert watch.liveness.loads_are_fresh(10.5)
    watch.hear(11.0, A, B, C, D)  # NATS gives nothing of E
    assert not watch.liveness.loads_are_fresh(11.5)
    assert [watch.liveness.load_age_s(11.5, one) for one in (A, E)] == [0.0, 2.5]
    assert five().liveness.load_age_s(60.0, A) == 51.0  # NATS is away altogether


def test_a_new_instance_whose_heartbeat_comes_before_its_start_is_never_excluded() -> None:
    watch = five()
    new = InstanceId("new")
    watch.follow(10.0, new, epoch=0)  # its fence was read
    watch.hear(10.0, new, epoch=1)
    assert not watch.excluded
    watch.follow(10.001, new, epoch=1)
    assert not watch.excluded and new in watch.liveness.candidates()
    watch.hear(11.0, new, epoch=2)
    assert watch.excluded == {new: ExcludedWhy.RESTARTED}


def test_below_a_second_when_it_is_configured() -> None:
    watch = Watch(0.75)
    watch.follow(0.0, A, B)
    assert watch.liveness.own_pulse_s < 0.25 and watch.liveness.tick_s <= 0.08
    for tick in range(100):
        now_s = tick / 16
        watch.step(now_s, OwnPulse())
        watch.hear(now_s, A, *([B] if now_s <= 2 else []))
        watch.step(now_s, LivenessTicked())
        assert (B in watch.excluded) == (now_s >= 2.75)


def test_a_clean_stop_is_excluded_at_once_and_stray_pulses_of_it_change_nothing() -> None:
    watch = five()
    watch.hear(10.0, E, stopping=True)
    assert watch.liveness.state(E) is LifeState.STOPPING and E not in watch.liveness.candidates()
    watch.follow(10.1, E, stopped=True)
    assert watch.excluded == {E: ExcludedWhy.STOPPED} and watch.liveness.state(E) is LifeState.STOPPED
    watch.hear(10.2, E, stopping=True)
    watch.run(11.0, 20.0, [A, B, C, D])
    assert watch.excluded == {E: ExcludedWhy.STOPPED} and watch.liveness.freshness(20.0).age_s <= 1


def test_a_start_is_excluded_until_it_was_heard_and_a_pulse_until_its_start_was_read() -> None:
    stopped = five()
    stopped.follow(10.0, E, stopped=True)
    stopped.follow(11.0, E, epoch=2)
    assert E in stopped.excluded
    stopped.hear(11.1, E, epoch=2)
    assert not stopped.excluded
    killed = five()
    killed.hear(10.0, E, epoch=2)  # the stream has only told of its first epoch, whose process this proves to be gone
    assert killed.excluded == {E: ExcludedWhy.RESTARTED} and killed.liveness.state(E) is LifeState.LIVE
    killed.follow(10.1, E, epoch=2)
    assert not killed.excluded


def test_one_whose_epoch_is_unreadable_is_excluded_however_alive_and_still_a_candidate() -> None:
    watch = five()
    watch.step(10.0, StreamProgress(E, Epoch(1), False, unreadable=True))
    assert watch.excluded == {E: ExcludedWhy.NEWER} and watch.liveness.state(E) is LifeState.LIVE
    assert E in watch.liveness.candidates()  # it serves; only what it holds is not known
    watch.hear(10.1, E, epoch=2)
    assert watch.excluded == {E: ExcludedWhy.NEWER}
    watch.follow(10.2, E, epoch=2)
    assert not watch.excluded
    watch.step(
        10.3, StreamProgress(InstanceId("f"), Epoch(0), False, unreadable=True)
    )  # of which nothing at all could be read
    assert watch.excluded == {InstanceId("f"): ExcludedWhy.NEWER}


def test_one_excluded_that_restarts_is_not_returned_by_its_old_self() -> None:
    watch = five()
    watch.run(10.0, 15.0, [A, B, C, D])
    watch.follow(15.0, E, epoch=2)
    watch.hear(15.1, E, epoch=1)
    assert E in watch.excluded and watch.liveness.zombies == 1
    watch.hear(15.2, E, epoch=2)
    assert not watch.excluded


def test_a_later_epoch_that_was_only_announced_and_fell_silent_gives_way_to_the_one_that_goes_on() -> None:
    watch = five()
    watch.hear(10.0, E, epoch=2)  # another process of this name, that dies before it has said anything on the stream
    watch.hear(10.1, E, epoch=1)
    assert watch.excluded == {E: ExcludedWhy.RESTARTED} and watch.liveness.zombies == 1
    watch.run(10.2, 17.0, [A, B, C, D])
    watch.hear(17.1, E, epoch=1)
    assert not watch.excluded and watch.liveness.state(E) is LifeState.LIVE
    watch.hear(17.2, E, epoch=2)  # unless it comes back
    assert watch.excluded == {E: ExcludedWhy.RESTARTED}


def test_of_two_runs_of_one_epoch_the_first_counts_while_it_lives() -> None:
    watch = Watch()
    watch.follow(0.0, A, B)
    watch.step(0.0, OwnPulse())
    watch.hear(0.1, A, run="x")
    watch.hear(0.2, A, run="y")
    assert watch.liveness.double_ids == 1
    last = watch.liveness.last(A)
    assert last is not None and last.heartbeat.run == "x"
    watch.run(0.3, 4.2, [B])
    assert watch.excluded == {A: ExcludedWhy.SILENT}  # the other's pulses are no life of this one
    watch.hear(4.3, A, run="y")
    assert not watch.excluded and watch.liveness.double_ids == 1


def test_kept_pulses_are_no_life() -> None:
    watch = Watch()
    watch.hear(0.0, A, B)  # as the stream has kept them
    watch.follow(0.0, A, B)
    assert watch.liveness.state(A) is LifeState.UNHEARD and watch.liveness.last(A) is not None
    watch.run(0.0, 3.9, [B])
    assert not watch.excluded and watch.liveness.state(B) is LifeState.LIVE
    watch.run(3.9, 4.2, [B])
    assert watch.excluded == {A: ExcludedWhy.SILENT} and watch.liveness.state(A) is LifeState.UNHEARD


def test_a_pulse_given_twice_counts_once() -> None:
    watch = Watch()
    watch.follow(0.0, A, B)
    pulse = HeartbeatReceived(beat(A, 77))
    watch.step(0.0, OwnPulse())
    watch.step(0.1, pulse)
    for second in range(1, 6):
        watch.step(second, pulse)
        watch.run(second, second + 1, [B])
    assert watch.excluded == {A: ExcludedWhy.SILENT}


def test_nobody_is_excluded_while_the_catalog_is_cut_off_and_everybody_has_a_period_anew() -> None:
    watch = five()
    watch.run(10.0, 60.0, own=False)
    assert not watch.excluded
    fresh = watch.liveness.freshness(60.0)
    assert fresh.age_s == pytest.approx(51.0) and "own pulse" in fresh.why
    watch.run(60.0, 63.9, [A, B, C, D])
    assert not watch.excluded
    watch.run(63.9, 64.2, [A, B, C, D])
    assert set(watch.excluded) == {E}


def test_a_catalog_that_is_cut_off_knows_it_before_a_silence_that_it_may_have_caused_counts() -> None:
    watch = Watch()
    watch.follow(0.0, A, B)  # too few for most of them to fall silent together
    watch.run(0.0, 10.0, [A, B])
    watch.run(10.0, 10.5, [B])  # A was last heard at 9, the catalog itself at 10
    watch.run(10.5, 20.0, own=False)
    assert not watch.excluded  # at 13, when A has been silent for 4 s, the catalog has not heard itself for 3
    watch.run(20.0, 23.9, [B])
    assert not watch.excluded
    watch.run(23.9, 24.2, [B])
    assert watch.excluded == {A: ExcludedWhy.SILENT}


def test_a_stop_is_heeded_also_by_a_catalog_that_is_cut_off() -> None:
    watch = five()
    watch.run(10.0, 20.0, own=False)
    watch.follow(20.0, E, stopped=True)
    assert set(watch.excluded) == {E}


def test_when_most_fall_silent_together_the_view_is_kept_until_they_are_no_longer_most() -> None:
    watch = five()
    watch.run(10.0, 30.0, [A, B])
    assert not watch.excluded and watch.liveness.state(C) is LifeState.SILENT
    fresh = watch.liveness.freshness(30.0)
    assert fresh.age_s == pytest.approx(21.0) and "3 instances" in fresh.why
    assert watch.liveness.candidates() == [A, B]
    watch.run(30.0, 31.9, [A, B, C])
    assert not watch.excluded  # C was heard first, D and E may be next
    watch.run(31.9, 32.2, [A, B, C])
    assert set(watch.excluded) == {D, E}
    assert watch.liveness.freshness(32.1).age_s == 0


def test_those_who_come_back_one_after_the_other_are_all_kept() -> None:
    many = [InstanceId(f"i{number:03}") for number in range(100)]
    watch = Watch()
    watch.follow(0.0, *many)
    watch.run(0.0, 10.0, many)
    watch.run(10.0, 14.0)  # nobody is heard; most fall silent
    assert "100 instances" in watch.liveness.freshness(14.0).why and not watch.excluded
    watch.step(14.0, OwnPulse())
    for number, instance in enumerate(many):  # each has its heartbeat somewhere in the second after
        watch.hear(14.0 + number / 100, instance)
        watch.step(14.0 + number / 100, LivenessTicked())
        assert not watch.excluded
    assert watch.liveness.freshness(15.0).age_s == 0


def test_half_that_fall_silent_together_are_excluded() -> None:
    watch = five()
    watch.follow(10.0, InstanceId("f"))
    watch.run(10.0, 15.0, [A, B, C, D, E, InstanceId("f")])
    watch.run(15.0, 18.2, [A, B, C])
    assert set(watch.excluded) == {D, E, InstanceId("f")}


def test_one_that_dies_while_others_are_kept_is_excluded() -> None:
    watch = five()
    watch.run(10.0, 30.0, [A, B])
    watch.run(30.0, 35.0, [A])
    assert set(watch.excluded) == {B}


def test_two_of_two_that_die_are_excluded() -> None:
    watch = Watch()
    watch.follow(0.0, A, B)
    watch.run(0.0, 5.0, [A, B])
    watch.run(5.0, 8.2)
    assert set(watch.excluded) == {A, B}
    assert watch.liveness.candidates() == [A, B]  # a prompt has to go somewhere


def test_many_that_died_long_ago_are_excluded_when_few_are_heard_and_kept_when_nobody_is() -> None:
    dead = [InstanceId(f"dead-{number}") for number in range(50)]
    watch = Watch()
    watch.hear(0.0, *dead)
    watch.follow(0.0, A, *dead)
    watch.run(0.0, 10.0)
    assert not watch.excluded and watch.liveness.freshness(10.0).age_s > 9
    watch.run(10.0, 10.2, [A])
    assert set(watch.excluded) == set(dead)


def test_an_instance_the_stream_has_not_told_of_has_nothing_to_exclude() -> None:
    watch = five()
    unknown = InstanceId("unknown")
    watch.hear(10.0, unknown)
    assert unknown in watch.liveness.candidates()
    watch.run(10.0, 20.0, [A, B, C, D, E])
    assert not watch.excluded and watch.liveness.state(unknown) is LifeState.SILENT
    watch.follow(20.0, unknown)
    watch.run(20.0, 20.2, [A, B, C, D, E])
    assert set(watch.excluded) == {unknown}


def test_effects_name_the_epoch_the_stream_has_told() -> None:
    liveness = Liveness()
    liveness.step(0.0, StreamProgress(A, Epoch(7), False))
    assert liveness.step(0.1, StreamProgress(A, Epoch(7), True)) == [Exclude(A, Epoch(7), ExcludedWhy.STOPPED)]
    assert liveness.step(0.2, StreamProgress(A, Epoch(8), False)) == []
    assert liveness.step(0.3, OwnPulse()) == []
    assert liveness.step(0.4, HeartbeatReceived(beat(A, 1, epoch=8))) == [Return(A, Epoch(8))]


def test_a_catalog_is_told_from_an_instance_by_its_name() -> None:
    assert is_catalog(catalog_name("x")) and not is_catalog(A)


# -- any interleaving --------------------------------------------------------------------------------------------------

MANY = [InstanceId(f"i{number}") for number in range(6)]
inputs = st.one_of(
    st.tuples(st.just("hear"), st.sampled_from(MANY), st.integers(1, 3), st.sampled_from("xy")),
    st.tuples(st.just("follow"), st.sampled_from(MANY), st.integers(1, 3), st.booleans()),
    st.just(("own",)),
    st.just(("tick",)),
)
steps = st.lists(st.tuples(st.sampled_from([0.0, 0.05, 0.3, 0.9, 1.1, 2.5, 5.0]), inputs), max_size=120)
thorough = settings(max_examples=examples(400), deadline=None)


def fed(action: tuple[object, ...], number: int, clock: int = 0) -> Input:
    match action:
        case ("hear", str(name), int(epoch), str(run)):
            return HeartbeatReceived(beat(InstanceId(name), number * 1000 + clock, epoch, run))
        case ("follow", str(name), int(epoch), bool(stopped)):
            return StreamProgress(InstanceId(name), Epoch(epoch), stopped)
        case ("own",):
            return OwnPulse()
        case _:
            return LivenessTicked()


@thorough
@given(steps)
def test_whoever_is_heard_in_time_in_an_epoch_the_stream_has_is_never_excluded(
    script: list[tuple[float, tuple[object, ...]]],
) -> None:
    """Whatever the others do, and the catalog. A is heard every second in its one epoch."""
    watch = Watch()
    now_s, heard_s = 0.0, -1.0
    watch.follow(0.0, A)
    for number, (pause_s, action) in enumerate(script):
        until_s = now_s + pause_s
        while heard_s + 1.0 <= until_s:
            heard_s += 1.0
            watch.hear(heard_s, A)
            assert A not in watch.excluded
        now_s = until_s
        watch.step(now_s, fed(action, number))
        assert A not in watch.excluded
        assert watch.liveness.state(A) in (LifeState.LIVE, LifeState.UNHEARD)


@thorough
@given(steps, st.integers(0, 9))
def test_whoever_falls_silent_alone_is_excluded_in_time(
    script: list[tuple[float, tuple[object, ...]]], phase: int
) -> None:
    """After any past: it and four others are heard in a new epoch, then it alone no longer."""
    watch = Watch()
    now_s = 0.0
    for number, (pause_s, action) in enumerate(script):
        now_s += pause_s
        watch.step(now_s, fed(action, number))
    begin_s = float(round(now_s) + 1)
    others = [B, C, D, E]
    for name in (A, *others):
        watch.follow(begin_s, name, epoch=9)
    watch.run(begin_s, begin_s + 5, [])
    for name in (A, *others):
        watch.hear(begin_s + 5, name, epoch=9)
    last_s = begin_s + 5
    silent_s = None
    for tick in range(100):
        now_s = last_s + (tick * 10 + phase) / 100
        if tick % 10 == 0:
            watch.step(now_s, OwnPulse())
            watch.hear(now_s, *others, epoch=9)
        watch.step(now_s, LivenessTicked())
        if A in watch.excluded and silent_s is None:
            silent_s = now_s - last_s
    assert silent_s is not None and silent_s + 1e-9 >= 4.0 and silent_s <= 4.0 + TICK_S + 1e-9
    assert not set(others) & set(watch.excluded)


@thorough
@given(steps, st.lists(st.integers(-(10**15), 10**15), min_size=1, max_size=9))
def test_the_clocks_of_senders_change_nothing(
    script: list[tuple[float, tuple[object, ...]]], clocks: list[int]
) -> None:
    plain, stepped = Liveness(), Liveness()
    now_s = 0.0
    for number, (pause_s, action) in enumerate(script):
        now_s += pause_s
        clock = clocks[number % len(clocks)] * 1000 * len(script)
        told = plain.step(now_s, fed(action, number))
        assert stepped.step(now_s, fed(action, number, clock)) == told
        assert stepped.freshness(now_s) == plain.freshness(now_s)
        assert [stepped.state(name) for name in MANY] == [plain.state(name) for name in MANY]


@thorough
@given(steps)
def test_while_the_catalog_does_not_hear_itself_nobody_is_excluded_for_silence(
    script: list[tuple[float, tuple[object, ...]]],
) -> None:
    watch = Watch()
    now_s, own_s = 0.0, float("-inf")
    for number, (pause_s, action) in enumerate(script):
        now_s += pause_s
        what = fed(action, number)
        before = dict(watch.excluded)
        if isinstance(what, OwnPulse):
            own_s = now_s
        watch.step(now_s, what)
        newly = {name for name, why in watch.excluded.items() if why is ExcludedWhy.SILENT and name not in before}
        assert not newly or now_s - own_s < 2.0


# -- lives -------------------------------------------------------------------------------------------------------------


def test_another_life_of_a_smaller_epoch_is_heard_and_its_older_self_is_not() -> None:
    """The journal and the stream were lost: what begins again with epoch 1 is no zombie of epoch 5, but the other way
    round.
    """
    watch = Watch()
    watch.step(0.0, StreamProgress(A, Epoch(5), False, "old", 0))
    watch.follow(0.0, B, C, D)
    for second in range(10):
        watch.step(second, OwnPulse())
        watch.hear(second, A, epoch=5, run="old")
        watch.hear(second, B, C, D)
        watch.step(second, LivenessTicked())
    watch.hear(10.0, A, epoch=1, run="new")  # its fence was not read yet
    last = watch.liveness.last(A)
    assert last is not None and last.heartbeat.run == "old"
    watch.step(10.1, StreamProgress(A, Epoch(0), False, "new", 1))
    watch.step(10.2, StreamProgress(A, Epoch(1), False, "new", 1))
    watch.hear(10.3, A, epoch=1, run="new")
    watch.hear(10.4, A, epoch=5, run="old")  # thaws, and has not seen yet that its place is another's
    assert watch.excluded == {A: ExcludedWhy.RESTARTED}  # for all that is known it may have begun since
    watch.hear(11.3, A, epoch=1, run="new")
    assert not watch.excluded and watch.liveness.state(A) is LifeState.LIVE
    last = watch.liveness.last(A)
    assert last is not None and last.heartbeat.run == "new"


def test_whoever_is_ignored_for_long_is_named_until_nothing_more_comes() -> None:
    watch = Watch()
    watch.step(0.0, StreamProgress(A, Epoch(5), False, "holder", 0))
    for second in range(8):
        watch.step(second, OwnPulse())
        watch.hear(second, A, epoch=5, run="holder")
        watch.hear(second + 0.5, A, epoch=1 + 4 * (second % 2), run="stranger")  # of an older epoch, and of the same
        assert set(watch.liveness.ignored(second + 0.5)) == ({A} if second >= 4 else set())
    assert watch.liveness.ignored(7.6)[A].run == "stranger"
    assert not watch.liveness.ignored(11.6) and not watch.excluded


def test_one_pulse_of_a_zombie_names_nobody() -> None:
    watch = five()
    watch.step(10.0, StreamProgress(E, Epoch(2), False, "new", 0))
    watch.hear(10.1, E, epoch=2, run="new")
    watch.hear(10.2, E, epoch=1, run="old")
    watch.run(10.2, 20.0, [A, B, C, D])
    assert not watch.liveness.ignored(20.0)


def test_of_two_runs_of_one_epoch_the_holder_counts_though_the_other_was_heard_first() -> None:
    watch = Watch()
    watch.follow(0.0, A)
    watch.step(0.0, OwnPulse())
    watch.hear(0.1, A, run="x")
    watch.step(0.2, StreamProgress(A, ONE, False, "y", 0))
    watch.hear(0.3, A, run="y")
    last = watch.liveness.last(A)
    assert last is not None and last.heartbeat.run == "y" and not watch.liveness.double_ids


def test_who_is_forgotten_leaves_nothing_and_is_new_when_it_is_heard_again() -> None:
    watch = five()
    watch.run(10.0, 20.0, [A, B, C, D])
    assert watch.excluded == {E: ExcludedWhy.SILENT} and watch.liveness.is_gone(E) and not watch.liveness.is_gone(A)
    del watch.excluded[E]
    watch.liveness.forget(E)
    assert watch.liveness.instances() == [A, B, C, D] and watch.liveness.state(E) is LifeState.UNHEARD
    watch.run(20.0, 30.0, [A, B, C, D])
    watch.hear(
        30.0, E, epoch=1
    )  # an epoch that is no later, and of another run or not: nothing is known that it could contradict
    watch.follow(30.1, E)
    assert watch.liveness.state(E) is LifeState.LIVE and not watch.excluded and watch.liveness.zombies == 0


def test_who_is_forgotten_is_no_longer_among_those_who_are_kept() -> None:
    watch = five()
    watch.run(10.0, 20.0, [A, B])
    assert not watch.excluded and "3 instances" in watch.liveness.freshness(20.0).why
    watch.liveness.forget(E)
    assert "2 instances" in watch.liveness.freshness(20.0).why
    watch.run(20.0, 22.2, [A, B])
    assert set(watch.excluded) == {C, D}  # two of four are not most
    assert watch.liveness.freshness(22.2).age_s == 0


def test_routes_look_at_present_instances_alone() -> None:
    watch = five()
    for number in range(1000):
        watch.follow(10.0, InstanceId(f"dead-{number}"), stopped=True)
    assert watch.liveness.candidates() == [A, B, C, D, E]
    assert sorted(watch.liveness._present) == [A, B, C, D, E]
    watch.run(10.0, 20.0, [A])
    assert sorted(watch.liveness._present) == [A]


def test_how_long_the_catalog_has_listened() -> None:
    watch = Watch(4.0)
    assert watch.liveness.listened_s(5.0) == 0.0
    watch.run(5.0, 10.0)
    assert 4.0 < watch.liveness.listened_s(10.0) <= 5.0
    watch.run(10.0, 20.0, own=False)
    assert watch.liveness.listened_s(20.0) == 0.0
