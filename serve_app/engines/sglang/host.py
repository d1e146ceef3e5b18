"""The thread and the processes that SGLang is: started, watched and ended without SGLang ever ending this process.

SGLang is written to be a program of its own. Three of its habits are undone here. Its children, and its own watchdog,
ask for this process's death with SIGQUIT when something fails: the signal is ignored, and a dead child is noticed
instead. Its tokenizer manager kills the whole process tree when its receiving loop fails: that loop runs here under our
own eyes. And its children die with the thread that started them: that thread lives exactly as long as they shall.

What this module does not do: requests. Everything of SGLang's is called on the thread's event loop, through `call`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any

from serve_app.engines.sglang.exposition import forget_series
from serve_app.engines.sglang.manager import manager_class
from serve_app.engines.sglang.process import clean_start, ignore_sigquit, kill_all, metrics_directory
from serve_app.errors import ConfigError, EngineFailed, EngineGone

logger = logging.getLogger(__name__)
WATCH_PERIOD_S = 0.25
_JOIN_S = 60.0


class Host:
    """One SGLang. Made and ended once.

    Args:
        arguments: keyword arguments of ServerArgs. variables: environment variables for SGLang's processes.
        on_death: called once, on the thread, with the reason why it can generate no more.
        on_watch: called on the thread several times a second while it lives.

    Attributes:
        dead: why it can generate no more, None while it can. manager: SGLang's TokenizerManager, once started.
            templates: its TemplateManager, likewise. info: what its scheduler said of itself.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        variables: dict[str, str],
        on_death: Callable[[str], None],
        on_watch: Callable[[], None],
    ) -> None:
        self._arguments, self._variables = arguments, variables
        self._on_death, self._on_watch = on_death, on_watch
        self._before: set[BaseProcess] = set()
        self._ready: Future[None] = Future()
        self._stopping = threading.Event()
        self._blind = False
        self._thread = threading.Thread(target=self._run, name="sglang", daemon=True)
        self._engine: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.dead: str | None = None
        self.manager: Any = None
        self.templates: Any = None
        self.info: dict[str, Any] = {}

    async def start(self) -> None:
        """Returns when the model is loaded. Raises ConfigError or EngineFailed."""
        self._before = set(multiprocessing.active_children())
        self._thread.start()
        await asyncio.shield(asyncio.wrap_future(self._ready))

    async def stop(self) -> None:
        """End the children and the thread. While it still loads, that makes the loading fail."""
        self._stopping.set()
        if self._thread.ident is None:
            return
        deadline = time.monotonic() + _JOIN_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            if not self._ready.done():
                await asyncio.to_thread(kill_all, self._children())
            await asyncio.to_thread(self._thread.join, WATCH_PERIOD_S)
        if self._thread.is_alive():
            logger.error("SGLang's thread did not end within %g s", _JOIN_S)

    def run(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function on SGLang's event loop, soon. Raises EngineGone where there is none any more."""
        self._living_loop().call_soon_threadsafe(function, *arguments)

    def call(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine on SGLang's event loop. Raises EngineGone where there is none any more."""
        try:
            loop = self._living_loop()
        except EngineGone:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, loop)

    def _living_loop(self) -> asyncio.AbstractEventLoop:
        loop = self._loop  # the thread may take it away meanwhile
        if loop is None or self.dead is not None or self._stopping.is_set():
            raise EngineGone("The engine of this replica is gone.", retry_after=1)
        return loop

    def post(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function on SGLang's event loop, soon; nothing where there is none any more."""
        loop = self._loop
        with contextlib.suppress(RuntimeError):
            if loop is not None:
                loop.call_soon_threadsafe(function, *arguments)

    def _children(self) -> list[BaseProcess]:
        return [child for child in multiprocessing.active_children() if child not in self._before]

    # -- on the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with ignore_sigquit(), metrics_directory(self._variables), asyncio.Runner(loop_factory=_new_loop) as runner:
                runner.run(self._live())
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(_as_error(error))
            else:
                logger.exception("SGLang's thread failed")
                self._die("SGLang's thread failed")

    async def _live(self) -> None:
        try:
            # Within the running loop, because SGLang takes the one that runs; nothing else waits for this loop yet.
            with clean_start():
                self._engine = build_engine(self._arguments)
            children = self._children()
            self.manager, self.templates = self._engine.tokenizer_manager, self._engine.template_manager
            self.info = dict(self._engine._scheduler_init_result.scheduler_infos[0])
            self._loop = asyncio.get_running_loop()
            receiving = self._receive()
            self._ready.set_result(None)
            while not self._stopping.is_set():
                # Not for `receiving` itself: once it has ended, that would no longer wait.
                await asyncio.sleep(WATCH_PERIOD_S)
                self._look(receiving, children)
        finally:
            self._loop = None
            await _cancel_everything()
            self._end()

    def _receive(self) -> asyncio.Task[None]:
        """SGLang's receiving loop as a task of ours: with its own it would kill this process, and want signals."""
        self.manager.event_loop = asyncio.get_running_loop()
        return asyncio.get_running_loop().create_task(self.manager.handle_loop())

    def _look(self, receiving: asyncio.Task[None], children: list[BaseProcess]) -> None:
        if self.dead is not None:
            return
        if receiving.done():
            logger.error("SGLang's receiving loop ended", exc_info=receiving.exception())
            return self._die("SGLang's receiving loop ended")
        for child in children:
            if child.exitcode is not None:
                return self._die(f"SGLang's process {child.name} ended with exit code {child.exitcode}")
        try:
            self._on_watch()
        except Exception:  # it generates all the same
            if not self._blind:
                logger.exception("SGLang's load cannot be read")
            self._blind = True
        return None

    def _die(self, reason: str) -> None:
        if self.dead is None:
            self.dead = reason
            if not self._stopping.is_set():
                logger.error("SGLang is dead: %s", reason)
            self._on_death(reason)

    def _end(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            atexit.unregister(engine.shutdown)
            watchdog = getattr(engine.tokenizer_manager, "_subprocess_watchdog", None)
            if watchdog is not None:
                watchdog.stop()
        kill_all(self._children())
        if engine is not None:
            _close_sockets(engine, engine.tokenizer_manager)
        forget_series()


def _new_loop() -> asyncio.AbstractEventLoop:
    """The kind that SGLang runs in by itself, and brings."""
    import uvloop

    return uvloop.new_event_loop()


async def _cancel_everything() -> None:
    """Requests still in the tokenizer manager tell the scheduler so, which needs its sockets."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def build_engine(arguments: dict[str, Any]) -> Any:
    """SGLang's Engine, its scheduler ready. Raises ConfigError for arguments that SGLang refuses."""
    from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    if arguments.get("speculative_algorithm"):  # chains, too, are right by a hook of the plugin's
        from serve_app.sglang_plugin.plugin import PluginError, assert_installed

        try:
            assert_installed()
        except PluginError as error:
            hint = "; install this package itself, with its extra: pip install '.[sglang]'"
            raise ConfigError(f"{error}{hint}", param="speculation.method") from error
    try:
        server_args = ServerArgs(**arguments)
    except (ValueError, TypeError, AssertionError, OSError) as error:
        raise ConfigError(f"SGLang refuses its arguments: {error}", param="sglang") from error
    managers = []

    def make_manager(*given: Any) -> Any:
        made = init_tokenizer_manager(*given, TokenizerManagerClass=manager_class())
        managers.append(made[0])
        return made

    class Ours(Engine):
        """Text is made of token ids here (`choice`): the scheduler sends them past the detokenizer, which is not
        started. (`skip_tokenizer_init` would do that as well, but takes stop strings and grammars from the scheduler.)
        """

        init_tokenizer_manager_func = staticmethod(make_manager)

        @classmethod
        def _launch_scheduler_processes(cls, server_args: Any, port_args: Any, *more: Any) -> Any:
            direct = replace(port_args, detokenizer_ipc_name=port_args.tokenizer_ipc_name)
            return super()._launch_scheduler_processes(server_args, direct, *more)

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_: Any) -> Any:
            return [], []

        def shutdown(self) -> None:
            """Called when the process ends: SGLang's own would kill every child that the process has then."""

    try:
        return Ours(server_args=server_args)
    except BaseException:
        for manager in managers:
            _close_sockets(manager)
        raise


def _close_sockets(*owners: Any) -> None:
    """What SGLang leaves to the end of its process."""
    import zmq

    sockets = [value for owner in owners for value in vars(owner).values() if isinstance(value, zmq.Socket)]
    for context in {socket.context for socket in sockets}:
        context.destroy(linger=0)


def _as_error(error: BaseException) -> BaseException:
    if isinstance(error, ConfigError):
        return error
    failure = EngineFailed(f"SGLang did not start: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
