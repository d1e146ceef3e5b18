"""SGLang's tokenizer manager, without what costs per token and serves nobody here.

SGLang gives each request a generator, an event and a timer, and each of its outputs two dictionaries of facts and times
that nothing here reads. Here a request is begun with a function that takes its outputs, which are called in the turn of
the event loop in which a step's batch arrives. Whatever SGLang's own code begins (`generate_request`) works as before:
a batch with such a request goes through SGLang's own handler, and so does every batch where SGLang is to trace or dump.

What this module does not do: detokenize, or know what an output means (`choice`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.metrics import observe_gaps

Taker = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class _Sockets:
    """Plain views of the manager's asynchronous sockets: those cost a future and two turns of the loop a message."""

    taken: Any
    given: Any


def manager_class() -> Any:
    """The class, over SGLang 0.5.17's, which only a process that runs it imports."""
    import zmq
    from sglang.srt.managers.io_struct import BatchTokenIDOutput, sock_recv, sock_send
    from sglang.srt.managers.tokenizer_manager import TokenizerManager, _slice_streaming_output_meta_info

    class StepManager(TokenizerManager):
        """All methods are called on the thread's event loop.

        Attributes:
            after: called after each message, when every taker has had its outputs.
        """

        def __init__(self, server_args: Any, port_args: Any) -> None:
            super().__init__(server_args, port_args)
            self.after: Callable[[], None] = lambda: None
            self._takers: dict[str, Taker] = {}
            taken, given = self.recv_from_detokenizer, self.send_to_scheduler
            self._sockets = _Sockets(zmq.Socket.shadow(taken), zmq.Socket.shadow(given))
            self._gaps: Any = None
            self._observed = bool(server_args.enable_trace or self.crash_dump_folder)

        def begin(self, asked: Any, take: Taker) -> None:
            """Send a GenerateReqInput of one prompt, as token ids, to the scheduler. `take` gets what
            `generate_request` would have yielded, without what SGLang says of its own times.

            Raises:
                ValueError: SGLang refuses it.
            """
            asked.normalize_batch_and_arguments()
            self._set_default_priority(asked)
            lives = self._init_req_state(asked, None)
            self._takers[asked.rid] = take
            try:
                self._validate_one_request(asked, asked.input_ids)
                self._send_one_request(self._create_tokenized_object(asked, None, asked.input_ids))
            except BaseException:
                self._discard_pending_req_states(asked, lives)
                raise

        def _dispatch_to_scheduler(self, obj: Any) -> None:
            try:
                sock_send(self._sockets.given, obj, zmq.NOBLOCK)
            except zmq.Again:  # nobody takes it, and this loop must not wait
                super()._dispatch_to_scheduler(obj)

        def _remove_req_state(self, rid: str, *which: Any) -> Any:
            self._takers.pop(rid, None)
            return super()._remove_req_state(rid, *which)

        # -- outputs -------------------------------------------------------------------------------------------------

        async def handle_loop(self) -> None:
            """SGLang's receiving loop. Returns never; raises what a message raised."""
            loop, readable = asyncio.get_running_loop(), asyncio.Event()
            descriptor = self._sockets.taken.FD
            loop.add_reader(descriptor, readable.set)
            try:
                while True:
                    try:
                        message = sock_recv(self._sockets.taken, zmq.NOBLOCK)
                    except zmq.Again:
                        readable.clear()
                        with self.soft_watchdog.disable():
                            await readable.wait()
                    else:
                        await self._message(message)
                        self.soft_watchdog.feed()
                        # New requests and aborts get their turn also where the scheduler is faster than this.
                        await asyncio.sleep(0)
            finally:
                loop.remove_reader(descriptor)

        async def _message(self, message: Any) -> None:
            if not isinstance(message, BatchTokenIDOutput):
                self._result_dispatcher(message)
            elif self._observed or not self._takers.keys() >= set(message.rids):
                await self._as_sglang(message)
            else:
                self._step(message)
            self.after()

        async def _as_sglang(self, message: Any) -> None:
            """The reference that `_step` must agree with."""
            takers = {rid: taker for rid in message.rids if (taker := self._takers.get(rid)) is not None}
            states = {rid: self.rid_to_state[rid] for rid in takers}
            await self._handle_batch_output(message)
            for rid, take in takers.items():
                outputs, states[rid].out_list = states[rid].out_list, []
                for output in outputs:
                    take(output)

        def _step(self, message: Any) -> None:
            gaps: list[tuple[float, int]] = []
            for row, rid in enumerate(message.rids):
                take, state, finish = self._takers[rid], self.rid_to_state[rid], message.finished_reasons[row]
                tokens = list(message.output_ids[row])
                meta = {"finish_reason": finish, "cached_tokens": message.cached_tokens[row]}
                if state.obj.return_logprob:
                    self._add_logprobs(meta, state, message, row)
                state.output_ids.extend(tokens)
                state.last_output_offset = len(state.output_ids)
                if state.time_stats.first_token_time == 0.0:
                    state.time_stats.set_first_token_time()
                if finish is not None:
                    state.finished = True
                    state.time_stats.set_finished_time()
                    self._remove_req_state(rid)
                self._measure(state, message, row, gaps)
                take({"output_ids": tokens, "meta_info": meta})
            if gaps:
                self._observe(gaps)

        def _add_logprobs(self, meta: dict[str, Any], state: Any, message: Any, row: int) -> None:
            asked = state.obj
            self.convert_logprob_style(
                meta, state, asked.top_logprobs_num, asked.token_ids_logprob, False, message, row
            )
            _slice_streaming_output_meta_info(meta, state.last_output_offset)

        def _handle_abort_req(self, recv_obj: Any) -> None:
            """The scheduler's answer to an abort of what still waited."""
            take, state = self._takers.get(recv_obj.rid), self.rid_to_state.get(recv_obj.rid)
            super()._handle_abort_req(recv_obj)
            if take is not None and state is not None and state.out_list:
                take(state.out_list.pop())

        # -- SGLang's own series -------------------------------------------------------------------------------------

        def _measure(self, state: Any, message: Any, row: int, gaps: list[tuple[float, int]]) -> None:
            if not (self.enable_metrics and state.obj.log_metrics):
                return
            if state.finished or not state.ttft_observed or self.enable_priority_scheduling:
                self.collect_metrics(state, message, row)
                return
            count = message.completion_tokens[row] - state.last_completion_tokens
            if count:
                gaps.append((state.time_stats.get_interval(), count))
                state.time_stats.set_last_time()
                state.last_completion_tokens = message.completion_tokens[row]

        def _observe(self, gaps: Sequence[tuple[float, int]]) -> None:
            if self._gaps is None:
                collector = self.metrics_collector
                self._gaps = collector.histogram_inter_token_latency.labels(**collector.labels)
            # As SGLang's `observe_inter_token_latency` would for each of them.
            observe_gaps(self._gaps, gaps)

    return StepManager
