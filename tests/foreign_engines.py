"""Engines without our code as a test needs them: their events in the bytes of vLLM's and SGLang's publishers, and what
they hold in truth.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from typing import Any, NamedTuple

import msgspec

from kvbm.core.extra_keys import salted
from kvbm.core.hashing import sequence_hashes
from kvbm.core.ids import UNKNOWN, Namespace, SequenceHash, Tier, split_hashes
from kvbm.reference.foreign_blocks import ForeignBlocks
from kvbm.streams.foreign.blocks import Arrived, Emptied, Gained, Lost, NamespaceNamed
from kvbm.streams.foreign.identity import MEDIA, ForeignSource
from kvbm.streams.foreign.state import (
    AskReplay,
    BeginEpoch,
    BridgeTicked,
    Check,
    EngineConnected,
    ForeignState,
    PublishedMessage,
    Replayed,
    ReplayEnded,
    ReplayRefused,
)
from kvbm.streams.foreign.wire import Kind, decode_batch

BLOCK_TOKENS = 4
MODEL = "model-a"


class Prompt(NamedTuple):
    tokens: tuple[int, ...]
    salt: str = ""
    lora: str = ""

    def namespace(self) -> Namespace:
        return Namespace(
            model=MODEL,
            block_tokens=BLOCK_TOKENS,
            revision=UNKNOWN,
            kv_dtype=UNKNOWN,
            layout=UNKNOWN,
            ranks=UNKNOWN,
            lora=self.lora,
        )

    def hashes(self) -> list[SequenceHash]:
        """As a client that knows tokens, salt and adapter hashes them."""
        blocks = len(self.tokens) // BLOCK_TOKENS
        return split_hashes(
            sequence_hashes(self.tokens, BLOCK_TOKENS, self.namespace().root(), salted(self.salt, blocks))
        )

    def keys(self) -> list[int]:
        """As an engine hashes them: 64 bits of a chain of its own."""
        parent, keys = b"engine", []
        for begin in range(0, len(self.tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            said = repr((self.tokens[begin : begin + BLOCK_TOKENS], self.lora, self.salt if not begin else ""))
            parent = hashlib.sha256(parent + said.encode()).digest()
            keys.append(int.from_bytes(parent[-8:], "big"))
        return keys


def stored_event(
    prompt: Prompt, begin: int = 0, end: int | None = None, medium: str = "GPU", **more: Any
) -> dict[str, Any]:
    """As vLLM 0.32 sends it."""
    keys = prompt.keys()
    end = len(keys) if end is None else end
    extra = [
        [*([prompt.lora] if prompt.lora else []), *([prompt.salt] if prompt.salt and not at else [])]
        for at in range(begin, end)
    ]
    return {
        "type": "BlockStored",
        "block_hashes": keys[begin:end],
        "parent_block_hash": keys[begin - 1] if begin else None,
        "token_ids": list(prompt.tokens[begin * BLOCK_TOKENS : end * BLOCK_TOKENS]),
        "block_size": BLOCK_TOKENS,
        "lora_id": 1 if prompt.lora else None,
        "medium": medium,
        "lora_name": prompt.lora or None,
        "extra_keys": [one or None for one in extra],
        "group_idx": 0,
        **more,
    }


def removed_event(keys: list[int], medium: str = "GPU", **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": keys, "medium": medium, **more}


CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}


def payload(*events: Any, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def new_state(can_replay: bool = True, kind: Kind = Kind.VLLM, rank: int | None = None, **more: Any) -> ForeignState:
    blocks = ForeignBlocks(ForeignSource(MODEL, **more), sequence_hashes)
    return ForeignState(blocks, lambda data: decode_batch(data, kind), can_replay, rank)


class Fold:
    """What commands say is held; refuses those that contradict each other."""

    def __init__(self) -> None:
        self.held: dict[Tier, dict[bytes, bytes]] = {tier: {} for tier in Tier}  # hash → namespace id
        self.named: set[bytes] = set()
        self.places: dict[bytes, tuple[bytes, int]] = {}  # hash → parent, position
        self.epochs = 0

    def take(self, commands: list[Any]) -> list[int]:
        """Apply commands; gives from which messages on they ask to be sent again."""
        asked = []
        for command in commands:
            match command:
                case NamespaceNamed(namespace):
                    self.named.add(namespace.id)
                case Gained(namespace, tier, parent, start, hashes):
                    for at, block in enumerate(split_hashes(hashes)):
                        self._add(tier, block, namespace)
                        self.places[block] = (parent, start + at)
                        parent = block
                case Arrived(namespace, tier, hashes):
                    for block in split_hashes(hashes):
                        self._add(tier, block, namespace)
                case Lost(namespace, tier, _, hashes):
                    for block in split_hashes(hashes):
                        if tier is not Tier.OBJECT:
                            assert self.held[tier].pop(block) == namespace
                        else:
                            self.held[tier].pop(block, None)
                case Emptied(tier):
                    self.held[tier].clear()
                case BeginEpoch():
                    self.epochs += 1
                    for tier in (Tier.HBM, Tier.HOST, Tier.NVME):
                        self.held[tier].clear()
                case AskReplay(start):
                    asked.append(start)
        return asked

    def _add(self, tier: Tier, block: bytes, namespace: bytes) -> None:
        assert namespace in self.named
        assert block not in self.held[tier]
        self.held[tier][block] = namespace


class Engine:
    """An engine that caches prompts, evicts, copies to host memory, and publishes what it does.

    Args:
        buffered: messages it keeps to send again.
    """

    def __init__(self, choose: random.Random, prompts: list[Prompt], buffered: int = 10_000) -> None:
        self._choose, self._prompts, self._buffered = choose, prompts, buffered
        self.restart()

    def restart(self) -> None:
        """Another process: nothing is held, and messages are numbered from 0 again."""
        self.gpu: Counter[tuple[int, int]] = Counter()  # (prompt, block) → copies
        self.colder: dict[str, set[tuple[int, int]]] = {"CPU": set(), "STORAGE": set()}
        self.published: list[bytes] = []
        self.life = self._choose.random()

    def work(self) -> PublishedMessage:
        """Do a few things, publish them in one message."""
        events = [event for _ in range(self._choose.randint(0, 4)) if (event := self._do()) is not None]
        self.published.append(msgspec.msgpack.encode([self.life, events, 0]))
        return PublishedMessage(len(self.published) - 1, self.published[-1])

    def replay(self, start: int) -> list[Replayed]:
        """What it sends again."""
        first = max(start, len(self.published) - self._buffered)
        return [Replayed(at, self.published[at]) for at in range(first, len(self.published))]

    def held(self) -> dict[Tier, set[bytes]]:
        """What it holds, by the hashes a client makes of the prompts."""
        found: dict[Tier, set[bytes]] = {Tier.HBM: {self._hash(*one) for one in self.gpu}}
        return found | {MEDIA[medium]: {self._hash(*one) for one in blocks} for medium, blocks in self.colder.items()}

    def _hash(self, prompt: int, block: int) -> bytes:
        return self._prompts[prompt].hashes()[block]

    def _do(self) -> dict[str, Any] | None:
        choose, number = self._choose, self._choose.randrange(len(self._prompts))
        prompt = self._prompts[number]
        blocks = len(prompt.tokens) // BLOCK_TOKENS
        held = sum((number, at) in self.gpu for at in range(blocks))
        match choose.choice(("store", "store", "again", "remove", "copy", "copy", "forget", "clear")):
            case "store" if held < blocks:  # what is missing behind what is held
                end = choose.randint(held + 1, blocks)
                self.gpu.update((number, at) for at in range(held, end))
                return stored_event(prompt, held, end)
            case "again" if held:  # another copy of what is held
                begin = choose.randrange(held)
                self.gpu.update((number, at) for at in range(begin, held))
                return stored_event(prompt, begin, held)
            case "remove" if held:  # the deepest first, as engines do
                self.gpu[number, held - 1] -= 1
                self.gpu = +self.gpu
                return removed_event([prompt.keys()[held - 1]])
            case "copy" if held:
                medium = choose.choice(("CPU", "STORAGE"))
                end = choose.randint(1, held)
                if any((number, at) in self.colder[medium] for at in range(end)):
                    return None
                self.colder[medium].update((number, at) for at in range(end))
                event = stored_event(prompt, 0, end, medium)
                return event | ({"token_ids": [], "parent_block_hash": None} if choose.random() < 0.5 else {})
            case "forget":
                medium = choose.choice(("CPU", "STORAGE"))
                gone = sorted(at for of, at in self.colder[medium] if of == number)
                self.colder[medium] -= {(number, at) for at in gone}
                return removed_event([prompt.keys()[at] for at in gone], medium)
            case "clear" if choose.random() < 0.2:
                self.gpu.clear()
                return CLEARED
        return None


class Line:
    """Carries an engine's messages to a state, and loses some.

    Attributes:
        refuses: whether asks for messages are refused; silent: whether they are not answered.
    """

    def __init__(self, engine: Engine, state: ForeignState, fold: Fold) -> None:
        self.engine, self.state, self.fold = engine, state, fold
        self.now_s = 0.0
        self.refuses = self.silent = False
        self.lost_answers = 0  # of the next answers, how many messages get lost in them
        self.broken_after: int | None = None  # of the next answer, how many messages come before it breaks off
        self._asked: int | None = None

    def connect(self) -> None:
        self._step(EngineConnected())

    def check(self) -> None:
        self._step(Check())

    def bring(self, message: PublishedMessage) -> None:
        self._step(message)

    def answer(self) -> None:
        """Answer the last ask, if there is one that was not answered."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        if self.refuses:
            self._step(ReplayRefused("nobody there"))
            return
        if self.silent:
            self.now_s += 5.0
            self._step(BridgeTicked())
            return
        answer = self.engine.replay(asked)
        broken_after, self.broken_after = self.broken_after, None
        answer = answer[:broken_after]
        if self.lost_answers and len(answer) > 2:
            del answer[len(answer) // 2 : len(answer) // 2 + self.lost_answers]
            self.lost_answers = 0
        for replayed in answer:
            self._step(replayed)
            if self._asked is not None:
                return  # it has asked for something else
        if broken_after is None:
            self._step(ReplayEnded())
        else:
            self.now_s += 5.0
            self._step(BridgeTicked())

    def settle(self) -> None:
        """Answer until nothing is asked for."""
        for _ in range(100):
            if self._asked is None and not self.state.is_replaying:
                return
            self.answer()
        raise AssertionError("it asks for ever")

    def _step(self, happened: Any) -> None:
        asked = self.fold.take(self.state.step(self.now_s, happened))
        if asked:
            self._asked = asked[-1]


def some_prompts(choose: random.Random, count: int = 6) -> list[Prompt]:
    """Prompts that share no block, though some share tokens: salts and adapters tell them apart."""
    prompts = []
    for number in range(count):
        tokens = tuple(choose.randrange(1000) for _ in range(BLOCK_TOKENS * choose.randint(1, 6)))
        prompts.append(Prompt((number, *tokens[1:])))
        prompts.append(Prompt(prompts[-1].tokens, salt=f"salt-{number}"))
        prompts.append(Prompt(prompts[-1].tokens, lora=f"lora-{number % 2}"))
    return prompts
