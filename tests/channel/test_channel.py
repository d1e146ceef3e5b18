"""Streams between a replica and an ingress of this process, over real sockets."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError
from ray.serve._private.common import RequestMetadata

from serve_app.channel import Inlet, Offer, Outlets, Parcel, Ticket, framed, inlets, outlets
from serve_app.channel.jobs import pack_job
from serve_app.channel.wire import (
    HEADER,
    MAGIC,
    MAX_GREETING,
    MAX_MESSAGE,
    OVER,
    About,
    ChannelError,
    item_of,
    join,
    pack_greeting,
    pack_item,
    pack_leave,
    pack_open,
    pack_taken,
)
from serve_app.engines.base import ModelInfo
from serve_app.errors import EngineFailed, NotReady
from serve_app.ingress import backend
from serve_app.protocol import ChatRequest, CompletionRequest, Item, Job, chat_job, completion_job, validate
from serve_app.router.opening import open_over_channel
from tests.channel.loopback import REPLICA, Call, Loopback, Peer, collect, given, pending
from tests.conftest import SOON_S, Hold
from tests.direct import until

INFO = ModelInfo("fake", 4096, 1000, 1)


def make_job(script: str, **fields: Any) -> Job:
    wire = validate(ChatRequest, {"model": "fake", "messages": [{"role": "user", "content": script}], **fields})
    return chat_job(wire, INFO, max_choices=16, max_messages=16)


@pytest.fixture(params=[False, True], ids=["by calls", "over the channel"])
async def loopback(request: pytest.FixtureRequest) -> AsyncIterator[Loopback]:
    """With its connection made, by a first stream. Further ones are opened in either way."""
    made = await _connected(request.param)
    yield made
    await made.stop()


@pytest.fixture
async def by_calls() -> AsyncIterator[Loopback]:
    made = await _connected(False)
    yield made
    await made.stop()


@pytest.fixture
async def opening() -> AsyncIterator[Loopback]:
    """Streams are opened over the channel."""
    made = await _connected(True)
    yield made
    await made.stop()


async def _connected(opens: bool) -> Loopback:
    made = await Loopback.start(opens=opens)
    await collect(made.backend.generate(make_job("a", stream=True)))
    await made.connected()
    assert not opens or made.backend._inlets.line_to("r") is not None  # type: ignore[union-attr]
    return made


@pytest.fixture
async def listening() -> AsyncIterator[Outlets]:
    made = Outlets()
    await made.open("127.0.0.1")
    yield made
    await made.close()


Connect = Callable[..., Awaitable[Peer]]


@pytest.fixture
async def connect(listening: Outlets) -> AsyncIterator[Connect]:
    """Makes peers of `listening`."""
    peers: list[Peer] = []

    async def made(outlets: Outlets = listening, *, greet: bool = True) -> Peer:
        peers.append(await Peer.connect(outlets, greet=greet))
        return peers[-1]

    yield made
    for peer in peers:
        peer.close()
    await asyncio.sleep(0.01)


JOBS = [
    make_job("a b c delay=0.002 repeat=5", stream=True, stream_options={"include_usage": True}),
    make_job("a b c", n=3, stream=True, logprobs=True, top_logprobs=2),
    make_job("a b c", n=2),
    make_job("bytes=f09f9880f09f9880 delay=0.002", stream=True),
    make_job("refuse=Overloaded", stream=True),
    make_job("a b fail_at=1", stream=True),
    make_job("a b abort_at=1 delay=0.01", stream=True),
    make_job("a b fail_at=1"),
    completion_job(
        validate(CompletionRequest, {"model": "fake", "prompt": ["a é", "c d"], "logprobs": 2, "stream": True}),
        INFO, max_choices=16, max_prompts=16,
    ),
]  # fmt: skip


@pytest.mark.parametrize("job", JOBS, ids=lambda job: str(job.requests[0].messages or job.requests[0].prompt))
async def test_the_channel_brings_what_the_call_would(loopback: Loopback, job: Job) -> None:
    def summary(items: list[Item]) -> Any:
        errors = [(type(i.error).__name__, i.error.body()) for i in items if i.error is not None]
        progress = {c: list(group) for c, group in itertools.groupby(
            sorted((p for i in items for p in i.progress), key=lambda p: p.choice), lambda p: p.choice)}  # fmt: skip
        tokens = {c: [t for p in parts for t in p.token_ids] for c, parts in progress.items()}
        ends = {c: parts[-1][2:] for c, parts in progress.items()}
        return b"".join(i.data for i in items), sum(i.tokens for i in items), errors, tokens, ends

    expected = summary(await collect(loopback.replica.generate(job)))
    found = summary(await collect(loopback.backend.generate(job)))
    if len(job.requests) > 1:
        # Prompts that run together may take turns otherwise.
        expected, found = ((sorted(s[0].split(b"\n\n")), *s[1:]) for s in (expected, found))
    assert found == expected
    assert loopback.handle.calls[-1].brought == []


async def test_the_first_stream_goes_on_its_call_and_the_next_on_the_channel() -> None:
    loopback = await Loopback.start()
    for _ in range(3):
        items = await collect(loopback.backend.generate(make_job("a b delay=0.02", stream=True)))
        assert items[-1].data.endswith(b"data: [DONE]\n\n")
        await loopback.connected()
    assert loopback.handle.calls[0].brought[0].offer is not None
    assert [len(call.brought) for call in loopback.handle.calls[1:]] == [0, 0]
    assert loopback.ways() == {"connecting": 1, "channel": 2}
    await loopback.stop()


async def test_a_call_brings_a_message_even_where_all_items_take_the_channel(by_calls: Loopback) -> None:
    """gRPC may lose the metadata of a call without one, and with them Serve's word that the replica took it."""
    await collect(by_calls.backend.generate(make_job("a b", stream=True)))
    call = by_calls.handle.calls[-1]
    await until(lambda: call.messages > 0)
    assert (call.messages, call.brought) == (1, [])


async def test_a_stream_moves_to_the_channel_in_its_middle(hold: Hold) -> None:
    loopback = await Loopback.start()
    hold.allow(2)
    stream = loopback.backend.generate(make_job(f"a b c d e f delay=0.02 {hold}", stream=True))
    items = [await anext(stream)]
    await loopback.connected()
    hold.release()
    items += await collect(stream)
    (call,) = loopback.handle.calls
    assert [parcel.moved for parcel in call.brought] == [False] * (len(call.brought) - 1) + [True]
    assert 2 <= len(call.brought) < len(items)
    assert sum(item.tokens for item in items) == 6
    await loopback.stop()


async def test_what_one_turn_of_the_loop_makes_is_one_message(connect: Connect, listening: Outlets) -> None:
    peer = await connect()
    gate = asyncio.Event()
    streams = [listening.carry(given([Item(b"x"), Item(b"y")], gate), Ticket("peer", n, 1000)) for n in range(1, 17)]
    tasks = [asyncio.create_task(collect(s)) for s in streams]  # type: ignore[arg-type]
    assert sorted(entry[1] for entry in await peer.message()) == list(range(1, 17))
    gate.set()
    # The second item of each, and its end.
    assert len(await peer.message()) == 32
    assert [[p.item for p in parcels] for parcels in await asyncio.gather(*tasks)] == [[None]] * 16


async def test_a_stream_whose_window_is_full_waits_alone(connect: Connect, listening: Outlets) -> None:
    peer = await connect()
    made = 0

    async def endless() -> AsyncIterator[Item]:
        nonlocal made
        while True:
            made += 1
            yield Item(b"x" * 1000)
            await asyncio.sleep(0)

    task = asyncio.create_task(collect(listening.carry(endless(), Ticket("peer", 1, 5000))))  # type: ignore[arg-type]
    await until(lambda: made >= 6)
    await asyncio.sleep(0.1)
    assert made == 6  # five are on their way, and one waits
    await collect(listening.carry(given([Item(b"y")] * 3), Ticket("peer", 2, 5000)))  # type: ignore[arg-type]
    peer.say(pack_taken(1, 3 * 1064))
    await until(lambda: made >= 9)
    await asyncio.sleep(0.1)
    assert made == 9
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not listening._lines["peer"]._outstanding


async def test_a_reader_that_stops_stops_its_stream(loopback: Loopback) -> None:
    """The same through both ends: what is held for a client is bounded."""
    items = loopback.backend.generate(
        make_job("word " * 4000, stream=True, max_tokens=4000, logprobs=True, top_logprobs=20)
    )
    await anext(items)
    (inlet,) = loopback.backend._inlets._streams.values()  # type: ignore[union-attr]
    await until(lambda: inlet._held >= inlets.WINDOW // 2)
    for _ in range(50):
        await asyncio.sleep(0.01)
        assert inlet._held <= 3 * inlets.WINDOW
    rest = await collect(items)
    assert sum(item.tokens for item in rest) >= 3999 - 1


async def test_an_item_too_large_for_a_message_comes_in_pieces(
    loopback: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlets, "MAX_MESSAGE", 2000)
    monkeypatch.setattr(outlets, "PIECE", 700)
    job = make_job("word " * 500)
    assert await collect(loopback.backend.generate(job)) == await collect(loopback.replica.generate(job))
    assert loopback.handle.calls[-1].brought == []


async def test_pieces_without_end_are_refused(opening: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlets, "MAX_MESSAGE", 2000)
    monkeypatch.setattr(outlets, "PIECE", 700)
    monkeypatch.setattr(inlets, "MAX_ITEM", 2000)
    with pytest.raises(NotReady) as lost:
        await collect(opening.backend.generate(make_job("word " * 500)))
    assert lost.value.code == "replica_lost"


async def test_what_the_channel_brought_does_not_hold_up_what_the_call_still_has() -> None:
    """A stream moved while its client did not read: the call's items are behind those that fill the window."""
    inlet = inlets.Inlets().open()
    size = inlet.ticket.window // 4
    for number in range(3, 8):
        inlet.arrived(None, number, Item(bytes(size)))  # type: ignore[arg-type]

    async def call() -> None:
        for number in range(3):
            inlet.parcel(Parcel(number, Item(bytes(size)), moved=number == 2))
            await inlet.room()
        inlet.parcel(Parcel(8, None, True))

    async with asyncio.timeout(SOON_S):
        _, count = await asyncio.gather(call(), _count(inlet))
    assert count == 8


async def _count(inlet: Inlet) -> int:
    """Items, until the last."""
    count = 0
    while await inlet.next() is not None:
        count += 1
    return count


@pytest.mark.parametrize("where", ["replica", "ingress"])
async def test_a_lost_connection_is_a_lost_replica_to_every_stream_on_it(loopback: Loopback, where: str) -> None:
    seen: list[list[Item]] = [[], [], []]

    async def run(items: list[Item]) -> None:
        with pytest.raises(NotReady) as lost:
            async for item in loopback.backend.generate(make_job("a delay=0.02 repeat=3000", stream=True)):
                items.append(item)
        assert lost.value.code == "replica_lost"

    tasks = [asyncio.create_task(run(items)) for items in seen]
    # Beyond the first item, which may come on the call.
    await until(lambda: all(len(items) > 1 for items in seen))
    lines: Any = loopback.replica._outlets._lines if where == "replica" else loopback.backend._inlets._lines  # type: ignore[union-attr]
    next(iter(lines.values())).close(ChannelError("a test"))
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(*tasks)
    # The engine is told, and the next stream begins anew.
    await until(lambda: loopback.count("fake_running_requests") == 0)
    assert len(await collect(loopback.backend.generate(make_job("a b delay=0.02", stream=True)))) > 1


async def test_a_lost_connection_before_the_first_item_is_told_on_the_call(by_calls: Loopback, hold: Hold) -> None:
    items = by_calls.backend.generate(make_job(f"a {hold}", stream=True))
    first = asyncio.ensure_future(anext(items))
    await until(lambda: by_calls.count("fake_running_requests") == 1)
    next(iter(by_calls.replica._outlets._lines.values())).close(ChannelError("a test"))
    hold.release()
    # No connection any more, and nothing lost with it: it goes on the call.
    assert (await first).tokens == 1
    await items.aclose()


async def test_a_failed_call_ends_its_stream(by_calls: Loopback) -> None:
    items = by_calls.backend.generate(make_job("a delay=0.02 repeat=100", stream=True))
    await anext(items)
    by_calls.handle.calls[-1].fail(ActorUnavailableError("gone", None))
    with pytest.raises(NotReady) as lost:
        await collect(items)
    assert lost.value.code == "replica_lost"


async def test_items_that_never_come_are_a_loss(by_calls: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inlets, "REST_WITHIN_S", 0.1)
    monkeypatch.setattr(outlets, "pack_item", lambda stream, number, item: pack_item(0, number, item))
    with pytest.raises(NotReady) as lost:
        await collect(by_calls.backend.generate(make_job("a b", stream=True)))
    assert lost.value.code == "replica_lost"


async def test_leaving_a_stream_aborts_it_in_the_engine(loopback: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[Any] = []
    monkeypatch.setattr(backend.logger, "error", lambda *said, **_: failures.append(said))
    items = loopback.backend.generate(make_job("a delay=0.02 repeat=100", stream=True))
    await anext(items)
    await items.aclose()
    assert loopback.handle.calls[-1].cancelled
    await until(lambda: loopback.count("fake_aborts_total") == 1)
    await until(lambda: not loopback.backend._inlets._streams)  # type: ignore[union-attr]
    await until(lambda: not next(iter(loopback.replica._outlets._lines.values()))._outstanding)
    assert not failures  # that a client leaves is nothing to look into


async def test_a_replica_that_does_not_listen_answers_on_its_calls() -> None:
    loopback = await Loopback.start(listen=False)
    for _ in range(2):
        assert len(await collect(loopback.backend.generate(make_job("a b delay=0.02", stream=True)))) > 1
    assert loopback.ways() == {"no_offer": 2}
    await loopback.stop()


async def test_a_replica_that_cannot_be_reached_answers_on_its_calls() -> None:
    loopback = await Loopback.start()
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    loopback.replica._outlets._offer = Offer("127.0.0.1", server.sockets[0].getsockname()[1], "x")
    for _ in range(3):
        items = await collect(loopback.backend.generate(make_job("a b c delay=0.02", stream=True)))
        assert items[-1].data.endswith(b"data: [DONE]\n\n")
        await until(lambda: not loopback.connecting())
    assert loopback.ways() == {"connecting": 1, "unreachable": 2}
    server.close()
    await loopback.stop()


async def test_with_rays_tls_nothing_listens_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    made = Outlets()
    await made.open("127.0.0.1")
    assert made.offer is None


async def test_an_address_that_cannot_be_bound_is_no_error() -> None:
    made = Outlets()
    await made.open("192.0.2.1")
    assert made.offer is None
    await made.close()


@pytest.mark.parametrize(
    "said",
    [
        pack_greeting(MAGIC, "wrong", "peer"),
        pack_greeting("another", "{token}", "peer"),
        pack_greeting(MAGIC, "{token}", ""),
        pack_greeting(MAGIC, "{token}", "p" * 65),
        b"\xc1",
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    ],
)
async def test_a_stranger_is_dropped(connect: Connect, listening: Outlets, said: bytes) -> None:
    friend = await connect()
    stranger = await connect(greet=False)
    stranger.say(said)
    assert await stranger.dropped()
    await collect(listening.carry(given([Item(b"y")]), Ticket("peer", 2, 5000)))  # type: ignore[arg-type]
    assert item_of((await friend.message())[0]) == Item(b"y")


@pytest.mark.parametrize(("greet", "limit"), [(False, MAX_GREETING), (True, MAX_MESSAGE)])
async def test_a_message_without_bound_is_not_waited_for(connect: Connect, greet: bool, limit: int) -> None:
    peer = await connect(greet=greet)
    peer.writer.write(HEADER.pack(limit + 1))
    assert await peer.dropped()


@pytest.mark.parametrize(
    "said",
    [
        b"\x93\x01\x02\x03",
        b"\x92\x01\xa1x",
        b"\x90",
        b"\x01",
        b"\xc1",
        b"\x94\x01\x02\x90\xc4\x00",
        pack_open(Ticket("peer", 1, 1000), About("a", "b"), b""),  # nothing is opened there
    ],
)
async def test_a_known_peer_that_speaks_garbage_is_dropped(connect: Connect, listening: Outlets, said: bytes) -> None:
    peer = await connect()
    peer.say(said)
    assert await peer.dropped()
    assert not listening._lines


async def test_a_silent_stranger_is_dropped(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlets, "GREETING_WITHIN_S", 0.05)
    made = Outlets()
    await made.open("127.0.0.1")
    peer = await connect(made, greet=False)
    assert await peer.dropped()
    await made.close()


async def test_strangers_are_few(connect: Connect, listening: Outlets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlets, "MAX_STRANGERS", 2)
    peers = [await connect(greet=False) for _ in range(3)]
    assert await peers[2].dropped()


async def test_the_secret_differs_between_replicas() -> None:
    assert Outlets().token != Outlets().token and len(Outlets().token) == 64


async def test_what_was_sent_leaves_before_the_replica_does(loopback: Loopback) -> None:
    job = make_job("word " * 2000)
    items = loopback.backend.generate(job)
    await anext(items)
    with contextlib.suppress(asyncio.CancelledError):
        body = await anext(items)
        await loopback.replica._outlets.close()
    assert body.data.count(b"word") == 2000


async def test_a_stream_opened_over_the_channel_brings_serve_what_it_counts_by(opening: Loopback) -> None:
    items = opening.backend.generate(make_job("a delay=0.02 repeat=100", stream=True))
    await anext(items)
    result = opening.handle.calls[-1].result
    ended: list[Any] = []
    result.add_done_callback(ended.append)
    said = await result.get_rejection_response()
    assert (said.accepted, said.num_ongoing_requests) == (True, 1)
    assert opening.entered == [About("id", "internal", "/v1", "app")]
    assert opening.ways() == {"connecting": 1, "opened": 1}
    await collect(items)
    async with asyncio.timeout(SOON_S):
        with pytest.raises(StopAsyncIteration):
            await result.__anext__()
    await until(lambda: bool(ended))
    assert ended == [None]


async def test_a_call_counts_until_the_replica_has_finished_with_it(opening: Loopback) -> None:
    """The client has its answer by then; the place that it leaves is there once Serve is told."""
    opening.finish = asyncio.Event()
    await collect(opening.backend.generate(make_job("a b", stream=True)))
    over = opening.handle.calls[-1].result._opened.over
    await asyncio.sleep(0.05)
    assert not over.done()
    opening.finish.set()
    async with asyncio.timeout(SOON_S):
        assert await over == ""


async def test_a_replica_that_is_full_says_so(opening: Loopback) -> None:
    opening.capacity = 0
    inlet = opening.backend._inlets.open()  # type: ignore[union-attr]
    result = open_over_channel(pending(make_job("a"), inlet.ticket), REPLICA)
    assert result is not None
    said = await result.get_rejection_response()
    assert (said.accepted, said.num_ongoing_requests) == (False, 1)
    # Serve ends it, and asks another replica for the same stream.
    result.cancel()
    inlet.parcel(Parcel(0, Item(b"x")))
    inlet.call_ended()
    assert (await inlet.next(), await inlet.next()) == (Item(b"x"), None)


async def test_a_stream_that_was_refused_may_come_again_at_once(opening: Loopback) -> None:
    """What the replica says of the first try is nothing to the second."""
    inlet = opening.backend._inlets.open()  # type: ignore[union-attr]
    for capacity, accepted in ((0, False), (1000, True)):
        opening.capacity = capacity
        result = open_over_channel(pending(make_job("a delay=0.02 repeat=3"), inlet.ticket), REPLICA)
        assert result is not None
        assert (await result.get_rejection_response()).accepted is accepted
    while item := await inlet.next():
        last = item
    assert last.last
    with pytest.raises(StopAsyncIteration):
        await result.__anext__()


async def test_a_connection_lost_before_the_replica_took_the_stream_lets_serve_ask_another(opening: Loopback) -> None:
    """Nothing was sent of it, and Serve does so without a word to the client."""
    inlet = opening.backend._inlets.open()  # type: ignore[union-attr]
    result = open_over_channel(pending(make_job("a"), inlet.ticket), REPLICA)
    assert result is not None
    opening.backend._inlets.line_to("r").close(ChannelError("a test"))  # type: ignore[union-attr]
    with pytest.raises(ActorUnavailableError):
        await result.get_rejection_response()
    assert open_over_channel(pending(make_job("a"), inlet.ticket), REPLICA) is None
    inlet.parcel(Parcel(0, Item(b"x")))
    inlet.call_ended()
    assert (await inlet.next(), await inlet.next()) == (Item(b"x"), None)


async def test_whoever_waits_for_a_dead_replica_is_told(opening: Loopback) -> None:
    """`router.calls` cancels what was sent to it."""
    items = opening.backend.generate(make_job("a stall=60", stream=True))
    waiting = asyncio.ensure_future(anext(items))
    await until(lambda: opening.count("fake_running_requests") == 1)
    opening.handle.calls[-1].result.cancel()
    with pytest.raises(NotReady) as lost:
        await waiting
    assert lost.value.code == "replica_lost"


async def test_a_stream_that_is_left_before_it_began_leaves_nothing(opening: Loopback) -> None:
    peer = await Peer.connect(opening.replica._outlets)
    (line,) = (line for name, line in opening.replica._outlets._lines.items() if name == "peer")
    about, job, entered = About("id", "internal"), pack_job(make_job("a", stream=True)), len(opening.entered)
    # One message: the replica reads both before it does anything.
    peer.writer.write(join([pack_open(Ticket("peer", 7, 1000), about, job), pack_leave(7), pack_leave(8)]))
    peer.say(pack_open(Ticket("peer", 9, 1000), about, job))
    said: list[Any] = []
    while not any(entry[0] == OVER for entry in said):
        said += await peer.message()
    assert {entry[1] for entry in said} == {9}
    assert not line._running and len(opening.entered) == entered + 1
    peer.close()


async def test_a_replica_that_raises_fails_its_own_stream(opening: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.logger, "error", lambda *said, **_: None)
    other = opening.backend.generate(make_job("a delay=0.02 repeat=50", stream=True))
    await anext(other)
    monkeypatch.setattr(outlets, "job_of", lambda packed: 1 / 0)
    with pytest.raises(EngineFailed):
        await collect(opening.backend.generate(make_job("a", stream=True)))
    assert (await collect(other))[-1].data.endswith(b"data: [DONE]\n\n")


async def test_what_cannot_be_said_in_a_message_goes_as_serve_sends_it(
    opening: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = opening.backend._inlets.open().ticket  # type: ignore[union-attr]
    job = make_job("a")
    half = replace(job, requests=(replace(job.requests[0], prompt="\ud800", messages=None),))
    large = replace(job, session="x" * MAX_MESSAGE)
    huge = replace(job, created=2**70)
    for each in (half, large, huge):
        assert open_over_channel(pending(each, ticket), REPLICA) is None
    elsewhere = RequestMetadata("id", "internal", _on_separate_loop=True)
    assert open_over_channel(pending(job, ticket, metadata=elsewhere), REPLICA) is None
    assert open_over_channel(pending(job, ticket, args=[job]), REPLICA) is None
    assert len(await collect(opening.backend.generate(half))) > 0
    assert isinstance(opening.handle.calls[-1], Call)


async def test_an_entry_that_may_wait_does_not_hold_up_one_that_may_wait_less() -> None:
    written = asyncio.Event()

    class Transport(asyncio.Transport):
        def write(self, data: Any) -> None:
            written.set()

        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return None

    line = framed.Framed(100, 100)
    line.connection_made(Transport())
    line.send(b"a", 3600)
    line.send(b"b", 0.001)
    line.send(b"c", 3600)
    async with asyncio.timeout(SOON_S):
        await written.wait()
