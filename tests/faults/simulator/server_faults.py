"""What goes wrong with the stream and its server: it is away, loses, refuses, repeats, or holds what nobody of ours has
written.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvbm.streams.base import ORIGIN, events_subject
from tests.faults.simulator.undo import NOTHING, FaultKind, Undo

if TYPE_CHECKING:
    from tests.faults.simulator.faults import Faults


def restart_server(faults: Faults, rng: random.Random) -> Undo:
    return _server_down(faults, False)


def cut_server_power(faults: Faults, rng: random.Random) -> Undo:
    return _server_down(faults, True)


def _server_down(faults: Faults, lose_tail: bool) -> Undo:
    if not faults.cluster.server.is_up:
        return NOTHING
    faults.cluster.server.go_down(lose_tail)
    return faults.cluster.server.come_up


def recreate_stream(faults: Faults, rng: random.Random) -> Undo:
    """The stream begins anew, empty, while instances go on: deleted and made again, or its server comes back without
    its files.
    """
    server = faults.cluster.server
    if not server.is_up:
        server.recreate()  # it had been down, and comes back so
        return None
    if rng.random() < 0.5:
        server.recreate()
        return None
    server.go_down(lose_tail=False)
    server.recreate()
    return server.come_up


def take_nothing(faults: Faults, rng: random.Random) -> Undo:
    """The server's disk is full: connections stand, questions are answered, publishes never."""
    server = faults.cluster.server
    server.takes_nothing = True

    def end() -> None:
        server.takes_nothing = False

    return end


def hide_messages(faults: Faults, rng: random.Random) -> Undo:
    server = faults.cluster.server
    if not server.last_sequence:
        return NOTHING
    begin = rng.randint(max(1, server.last_sequence - 40), server.last_sequence)
    return None if server.hide(begin, begin + rng.randint(1, 30)) else NOTHING


def trim(faults: Faults, rng: random.Random) -> Undo:
    server = faults.cluster.server
    for _ in range(int(len(server.messages) * rng.choice((0.3, 0.8, 1.0)))):
        server.drop_first()
    return None


def refuse_publishes(faults: Faults, rng: random.Random) -> Undo:
    server = faults.cluster.server
    server.refuses = rng.choice((0.2, 0.6, 1.0))

    def end() -> None:
        server.refuses = 0.0

    return end


def drop_acks(faults: Faults, rng: random.Random) -> Undo:
    server = faults.cluster.server
    server.drop_acks = server.loses_asks = rng.choice((0.1, 0.5))

    def end() -> None:
        server.drop_acks = server.loses_asks = 0.0

    return end


def late_copies(faults: Faults, rng: random.Random) -> Undo:
    """Messages that were sent once arrive again, later, as a socket or a proxy may deliver them: with the fence they
    named.
    """
    server = faults.cluster.server
    recent = [stored for stored in list(server.messages)[-60:] if stored.fence is None and stored.by != "foreign"]
    if not recent:
        return NOTHING
    for stored in rng.sample(recent, min(len(recent), rng.randint(1, 12))):
        names = stored.subject.split(".")
        fence_subject = ".".join((*names[:2], "fence", *names[3:]))

        def again(stored: object = stored, fence_subject: str = fence_subject) -> None:
            if server.is_up and not server.takes_nothing and stored.named is not None:  # type: ignore[attr-defined]
                server.publish(
                    stored.subject,
                    fence_subject,
                    stored.data,
                    stored.named,
                    stored.acked,
                    stored.by,  # type: ignore[attr-defined]
                )

        faults.world.after(rng.expovariate(1.0), faults.world.nature, again)
    return None


def poison(faults: Faults, rng: random.Random) -> Undo:
    """Somebody writes garbage, damaged frames, or another's frames, on an instance's subject."""
    server = faults.cluster.server
    node = faults.node(rng)
    if node is None or not server.is_up or server.takes_nothing:
        return NOTHING
    subject = events_subject(node.settings.instance.cluster, node.instance)
    events = [stored for stored in list(server.messages)[-40:] if stored.fence is None]
    data = rng.randbytes(rng.randint(1, 200))
    if events and rng.random() < 0.7:
        data = bytearray(rng.choice(events).data)
        if rng.random() < 0.7:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            if rng.random() < 0.3:
                del data[rng.randrange(len(data)) :]
        elif events[0].subject == subject:
            return NOTHING
    if data:
        server.store(subject, bytes(data), ORIGIN, None, "foreign")
    return None


SERVER_KINDS: dict[str, FaultKind] = {
    "restart_server": restart_server,
    "cut_server_power": cut_server_power,
    "recreate_stream": recreate_stream,
    "take_nothing": take_nothing,
    "hide_messages": hide_messages,
    "trim": trim,
    "refuse_publishes": refuse_publishes,
    "drop_acks": drop_acks,
    "late_copies": late_copies,
    "poison": poison,
}
