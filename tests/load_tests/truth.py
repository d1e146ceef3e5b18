"""A server whose timings are known: it streams by a timetable and writes down when each byte really left.

    python -m tests.load_tests.truth --port 0 --script ok,cut

The n-th request is answered by the n-th word of the script, cyclically. It is written on plain sockets, because a
framework would decide for itself how an answer ends. `GET /truth` tells what was sent when, by request id.
"""

import argparse
import asyncio
import json
import time
from contextlib import suppress

WORDS = ("ok", "cut", "no_done", "no_usage", "empty", "error_frame", "refuse", "garbage", "hang", "not_json")
ENVELOPE = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "truth"}


class Truth:
    def __init__(self, script, ttft_s, gap_s, chunks, per_chunk):
        self.script, self.ttft_s, self.gap_s = script, ttft_s, gap_s
        self.chunks, self.per_chunk = chunks, per_chunk
        self.told = {}
        self.count = 0

    @property
    def tokens(self):
        return 1 + (self.chunks - 1) * self.per_chunk

    async def serve(self, reader, writer):
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader, writer):
        """Answers one request; False when the connection is not to be used again."""
        line = await reader.readline()
        if not line:
            return False
        length = 0
        while (header := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = header.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        arrived = time.perf_counter()
        body = await reader.readexactly(length)
        path = line.split()[1].decode()
        if path == "/v1/chat/completions":
            return await self._chat(json.loads(body), writer, arrived)
        pages = {"/v1/models": {"data": [{"id": "truth"}]}, "/version": {"version": "truth"}, "/truth": self.told}
        self._whole(writer, 200 if path in pages else 404, json.dumps(pages.get(path, {})).encode())
        return True

    def _whole(self, writer, status, body):
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"{head}\r\n".encode() + body)

    async def _chat(self, asked, writer, arrived):
        word = self.script[self.count % len(self.script)]
        name = f"truth-{self.count}"
        self.count += 1
        if word == "refuse":
            self._whole(writer, 503, json.dumps({"error": {"message": "no", "code": "overloaded"}}).encode())
            return True
        usage = {"prompt_tokens": 7, "completion_tokens": self.tokens}
        if not asked.get("stream"):
            await asyncio.sleep(self.ttft_s + self.gap_s * (self.chunks - 1))
            answer = {"choices": [{"message": {"content": "w" * (word != "empty")}}]}
            answer |= {} if word == "no_usage" else {"usage": usage}
            self._whole(writer, 200, b"{" if word == "not_json" else json.dumps(answer).encode())
            return True
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-request-id: {name}\r\n"
        writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        times = await self._chunks(word, writer, arrived)
        self.told[name] = {"word": word, "times": times, "tokens": self.tokens}
        if word == "hang":
            await asyncio.sleep(3600)
        if word == "cut":
            return False
        if word == "error_frame":
            self._event(writer, {"error": {"message": "broke", "code": "engine_error"}})
        elif word != "no_usage":
            self._event(writer, {**ENVELOPE, "choices": [], "usage": usage})
        if word != "no_done":
            self._send(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _chunks(self, word, writer, arrived):
        times = []
        for number in range(self.chunks // 2 if word in ("cut", "hang", "error_frame") else self.chunks):
            due = arrived + self.ttft_s + number * self.gap_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self._send(writer, b": ping\n\n")
            times.append(time.perf_counter() - arrived)
            if word == "garbage" and number == 1:
                self._send(writer, b"data: {no json\n\n")
            text = "" if word == "empty" else "w "
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            self._event(writer, {**ENVELOPE, "choices": [choice]})
            await writer.drain()
        return times

    def _event(self, writer, event):
        self._send(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    def _send(self, writer, data):
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--script", default="ok")
    parser.add_argument("--ttft", type=float, default=0.05)
    parser.add_argument("--gap", type=float, default=0.04)
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--per-chunk", type=int, default=4)
    options = parser.parse_args()
    script = options.script.split(",")
    assert set(script) <= set(WORDS)
    truth = Truth(script, options.ttft, options.gap, options.chunks, options.per_chunk)
    server = await asyncio.start_server(truth.serve, "127.0.0.1", options.port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
