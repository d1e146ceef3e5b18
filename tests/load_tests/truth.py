"""A server whose timings are known: it streams by a timetable and writes down when each byte really left.

    python -m tests.load_tests.truth --port 0 --script ok,cut

The n-th request is answered by the n-th word of the script, cyclically. It is written on plain sockets, because a
framework would decide for itself how an answer ends, and hide when a request arrived. `GET /truth` tells by request id
what was sent when, in seconds after the request arrived; that, on the machine's monotonic clock.
"""

import argparse
import asyncio
import json
import socket
import struct
import sys
import time
from contextlib import suppress

RETRY_AFTER = {"refuse": "", "busy": "retry-after: 1\r\n", "later": "retry-after: 3600\r\n"}
WORDS = ("ok", "cut", "no_done", "no_usage", "empty", "error_frame", "garbage", "hang", "not_json", *RETRY_AFTER)
SO_TIMESTAMPNS = 35 if sys.platform == "linux" else None
ENVELOPE = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "truth"}


class Truth:
    def __init__(self, script, ttft_s, gap_s, chunks, per_chunk, key=""):
        self.script, self.ttft_s, self.gap_s = script, ttft_s, gap_s
        self.chunks, self.per_chunk = chunks, per_chunk
        self.key = key.encode()
        self.told = {}
        self.count = 0

    @property
    def tokens(self):
        return 1 + (self.chunks - 1) * self.per_chunk

    async def serve(self, sock):
        sock.setblocking(False)
        with sock, suppress(ConnectionError):
            while await self._one(sock):
                pass

    async def _one(self, sock):
        """Answers one request; False when the connection is not to be used again."""
        got = b""
        while b"\r\n\r\n" not in got:
            data, arrived = await receive(sock)
            if not data:
                return False
            got += data
        head, _, body = got.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
        while len(body) < int(fields.get(b"content-length", 0)):
            data, arrived = await receive(sock)
            if not data:
                return False
            body += data
        path = head.split()[1].decode()
        # Its fields are in lower case.
        if path.startswith("/v1/") and self.key and fields.get(b"authorization", b"").split() != [b"bearer", self.key]:
            await self._whole(sock, 401, b"{}")
            return True
        if path == "/v1/chat/completions":
            return await self._chat(json.loads(body), sock, arrived)
        pages = {"/v1/models": {"data": [{"id": "truth"}]}, "/version": {"version": "truth"}, "/truth": self.told}
        await self._whole(sock, 200 if path in pages else 404, json.dumps(pages.get(path, {})).encode())
        return True

    async def _whole(self, sock, status, body, more=""):
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{more}"
        await send(sock, f"{head}\r\n".encode() + body)

    async def _chat(self, asked, sock, arrived):
        word = self.script[self.count % len(self.script)]
        name = f"truth-{self.count}"
        self.count += 1
        if word in RETRY_AFTER:
            body = json.dumps({"error": {"message": "no", "code": "overloaded"}}).encode()
            await self._whole(sock, 503, body, RETRY_AFTER[word])
            self.told[name] = {"word": word, "arrived": arrived, "times": [], "tokens": 0}
            return True
        usage = {"prompt_tokens": 7, "completion_tokens": self.tokens}
        if not asked.get("stream"):
            await asyncio.sleep(self.ttft_s + self.gap_s * (self.chunks - 1))
            answer = {"choices": [{"message": {"content": "w" * (word != "empty")}}]}
            answer |= {} if word == "no_usage" else {"usage": usage}
            await self._whole(sock, 200, b"{" if word == "not_json" else json.dumps(answer).encode())
            return True
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-request-id: {name}\r\n"
        await send(sock, f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        times = await self._chunks(word, sock, arrived)
        self.told[name] = {"word": word, "arrived": arrived, "times": times, "tokens": self.tokens}
        if word == "hang":
            await asyncio.sleep(3600)
        if word == "cut":
            return False
        if word == "error_frame":
            await send(sock, event({"error": {"message": "broke", "code": "engine_error"}}))
        elif word != "no_usage":
            await send(sock, event({**ENVELOPE, "choices": [], "usage": usage}))
        if word != "no_done":
            await send(sock, chunk(b"data: [DONE]\n\n"))
        await send(sock, b"0\r\n\r\n")
        return True

    async def _chunks(self, word, sock, arrived):
        times = []
        choice = {"index": 0, "delta": {"content": "" if word == "empty" else "w "}, "finish_reason": None}
        data = event({**ENVELOPE, "choices": [choice]})
        for number in range(self.chunks // 2 if word in ("cut", "hang", "error_frame") else self.chunks):
            due = arrived + self.ttft_s + number * self.gap_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await send(sock, chunk(b": ping\n\n"))
            if word == "garbage" and number == 1:
                await send(sock, chunk(b"data: {no json\n\n"))
            times.append(time.perf_counter() - arrived)
            await send(sock, data)
        return times


def event(fields):
    return chunk(b"data: " + json.dumps(fields).encode() + b"\n\n")


def chunk(data):
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def send(sock, data):
    await asyncio.get_running_loop().sock_sendall(sock, data)


async def receive(sock):
    """What is there, and when the kernel got it; when it was read, on systems that do not tell."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)
    data, ancillary, _, _ = sock.recvmsg(65536, 64)
    # The closest of some pairs: what runs in between would count as the request's.
    pairs = [(time.perf_counter(), time.time(), time.perf_counter()) for _ in range(3)]
    now, wall, _ = min(pairs, key=lambda pair: pair[2] - pair[0])
    stamps = [struct.unpack("@ll", told[:16]) for _, kind, told in ancillary if kind == SO_TIMESTAMPNS]
    return data, min(now, now - wall + stamps[0][0] + 1e-9 * stamps[0][1]) if stamps else now


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--script", default="ok")
    parser.add_argument("--ttft", type=float, default=0.05)
    parser.add_argument("--gap", type=float, default=0.04)
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--per-chunk", type=int, default=4)
    parser.add_argument("--key", default="", help="in lower case; without it /v1 is a 401")
    options = parser.parse_args()
    script = options.script.split(",")
    assert set(script) <= set(WORDS)
    truth = Truth(script, options.ttft, options.gap, options.chunks, options.per_chunk, options.key)
    with socket.create_server(("127.0.0.1", options.port), backlog=512) as door:
        door.setblocking(False)
        print(door.getsockname()[1], flush=True)
        tasks = set()
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(door)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if SO_TIMESTAMPNS is not None:
                sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            task = asyncio.create_task(truth.serve(sock))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    asyncio.run(main())
