"""An engine without a model, for routing, overload and failure tests; the prompt's last text is its script.

Words `key=value` steer, the others are the answer, one token each. `repeat=N` says it N times; `delay=S` waits before
each token, `stall=S` before the first; `fail_at=N` raises at token N, `crash_at=N` ends the process, `abort_at=N` ends
as aborted; `bytes=HEX` answers one byte a token; `refuse=CLASS` raises that error; `dead=1`/`stuck=1` break health.
"""

import asyncio
import codecs
import os
import time

from prometheus_client import Counter, Gauge

from serve_app import errors
from serve_app.engines.base import Chunk, EngineStats, ModelInfo, TokenLogprob, Usage
from serve_app.errors import ContextLengthExceeded, EngineFailed

CONTEXT, VOCAB = 4096, 1000


class FakeEngine:
    def __init__(self, config, registry):
        self._id, self._last, self._state, self._live = config.model.id, None, {}, 0
        self._submits = Counter("fake_submits_total", "Requests.", registry=registry)
        self._aborts = Counter("fake_aborts_total", "Requests closed before their end.", registry=registry)
        Gauge("fake_running_requests", "Requests now.", registry=registry).set_function(lambda: self._live)

    async def start(self):
        if self._id == "broken":
            raise EngineFailed("the fake engine cannot start")

    async def submit(self, request):
        self._submits.inc()
        words = self._text(request).split()
        script = dict(w.split("=", 1) for w in words if "=" in w)
        params, done = request.sampling, False
        if (params.max_tokens or 0) > CONTEXT:
            raise ContextLengthExceeded(f"The context is {CONTEXT} tokens.", param="max_tokens")
        if "refuse" in script:
            raise getattr(errors, script["refuse"])("Refused by the script.")
        self._state.update({k: v for k, v in script.items() if k in ("dead", "stuck")})
        said = [w for w in words if "=" not in w] * int(script.get("repeat", 1)) or ["ok"]
        tokens = [w.encode() if i == 0 else b" " + w.encode() for i, w in enumerate(said)]
        tokens = [bytes([b]) for b in bytes.fromhex(script["bytes"])] if "bytes" in script else tokens
        decoders = [codecs.getincrementaldecoder("utf-8")() for _ in range(params.n)]
        limit = min(len(tokens), params.max_tokens or CONTEXT)
        self._live += 1
        try:
            await asyncio.sleep(float(script.get("stall", 0)))
            for i in range(limit):
                await asyncio.sleep(float(script.get("delay", 0)))
                if i == int(script.get("fail_at", -1)):
                    raise RuntimeError("secret details of the engine")
                if i == int(script.get("crash_at", -1)):
                    os._exit(1)
                self._last, end, reason = time.monotonic(), i == limit - 1, "stop" if limit == len(tokens) else "length"
                reason = "abort" if i == int(script.get("abort_at", -1)) else reason if end else None
                for j in range(params.n):
                    plain = (tokens[i][0], tokens[i].decode("utf-8", "replace"), tuple(tokens[i]), -0.5)
                    top = tuple(TokenLogprob(*plain) for _ in range(params.logprobs or 0))
                    logprobs = None if params.logprobs is None else (TokenLogprob(*plain, top),)
                    usage = Usage(len(words), i + 1) if reason else None
                    yield Chunk(j, (tokens[i][0],), decoders[j].decode(tokens[i], end), logprobs, reason, usage=usage)
            done = True
        finally:
            self._live -= 1
            self._aborts.inc(0 if done else 1)

    @staticmethod
    def _text(request):
        return request.messages[-1]["content"] if request.messages else (request.prompt or "")

    async def abort(self, request_id):
        return False

    async def health(self):
        if "dead" in self._state:
            raise EngineFailed("the fake engine is dead")
        await asyncio.sleep(3600 if "stuck" in self._state else 0)

    def stats(self):
        age = None if self._last is None or self._state else time.monotonic() - self._last
        return EngineStats(running=self._live, queued=0, slots=64, last_token_age_s=age)

    def info(self):
        return ModelInfo(id=self._id, max_model_len=CONTEXT, vocab_size=VOCAB, created=1)

    async def tokenize(self, request):
        return list(self._text(request).encode())

    async def detokenize(self, token_ids):
        return bytes(t % 256 for t in token_ids).decode("utf-8", "replace")

    async def stop(self):
        self._state["dead"] = "1"
