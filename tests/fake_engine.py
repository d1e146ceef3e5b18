"""An engine without a model, for routing, overload and failure tests; the prompt's last text is its script."""

import asyncio
import codecs
import os
import time

from prometheus_client import Counter, Gauge

from serve_app.engines.base import Chunk, EngineStats, ModelInfo, Usage
from serve_app.errors import ContextLengthExceeded, EngineFailed, EngineGone, ReplicaLost
from tests.fake_script import Script

CONTEXT, VOCAB = 4096, 1000


class FakeEngine:
    def __init__(self, config, registry):
        self._id, self._last, self._broken, self._live = config.model.id, None, None, 0
        self._submits = Counter("fake_submits_total", "Requests.", registry=registry)
        self._aborts = Counter("fake_aborts_total", "Requests closed before their end.", registry=registry)
        Gauge("fake_running_requests", "Requests now.", registry=registry).set_function(lambda: self._live)
        Gauge("fake_pid", "Process id.", registry=registry).set(os.getpid())

    async def start(self):
        if self._id == "broken":
            raise EngineFailed("the fake engine cannot start")

    async def submit(self, request):
        params, done = request.sampling, False
        if (params.max_tokens or 0) > CONTEXT:
            raise ContextLengthExceeded(f"The context is {CONTEXT} tokens.", param="max_tokens")
        script = Script(self._text(request), params.max_tokens or CONTEXT, request.emitted)
        script.check()
        if self._broken == "gone":
            raise EngineGone("The fake engine is gone.", retry_after=1)
        self._broken = next((how for how in ("dead", "stuck") if how in script.settings), self._broken)
        decoders = [codecs.getincrementaldecoder("utf-8")() for _ in range(params.n)]
        for token in script.tokens[: len(request.emitted)]:
            decoders[0].decode(token)
        self._submits.inc()
        self._live += 1
        try:
            for index, token in list(enumerate(script.tokens))[len(request.emitted) :]:
                await self._before(script, index)
                self._last, reason = time.monotonic(), script.reason(index)
                usage = Usage(script.prompt_tokens, index + 1) if reason else None
                for choice, decoder in enumerate(decoders):
                    text, logprobs = decoder.decode(token, bool(reason)), script.logprobs(index, params.logprobs)
                    yield Chunk(choice, (token[0],), text, logprobs, reason, usage=usage)
            done = True
        finally:
            self._live -= 1
            self._aborts.inc(0 if done else 1)

    async def _before(self, script, index):
        try:
            await script.before(index)
        except ReplicaLost:
            self._broken = "gone"
            raise

    async def health(self):
        if self._broken in ("dead", "gone"):
            raise EngineFailed("the fake engine is dead")
        await asyncio.sleep(3600 if self._broken else 0)

    def stats(self):
        age = None if self._last is None or self._broken else time.monotonic() - self._last
        return EngineStats(running=self._live, queued=0, slots=64, last_token_age_s=age)

    def info(self):
        continues = {"fake-none": "none", "fake-greedy": "greedy"}.get(self._id, "seeded")
        return ModelInfo(id=self._id, max_model_len=CONTEXT, vocab_size=VOCAB, created=1, continues=continues)

    async def abort(self, request_id):
        return False

    async def tokenize(self, request):
        return list(self._text(request).encode())

    async def detokenize(self, token_ids):
        return bytes(token % 256 for token in token_ids).decode("utf-8", "replace")

    async def stop(self):
        self._broken = "dead"

    @staticmethod
    def _text(request):
        return request.messages[-1]["content"] if request.messages else (request.prompt or "")
