"""What SGLang does to the process it is loaded into, and how that is kept within bounds.

What this module does not do: know SGLang's classes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess

from serve_app.multiprocess import ENV_DIRECTORY

_SIG_IGN = 1
_KILLED_WITHIN_S = 10.0


@contextlib.contextmanager
def ignore_sigquit() -> Iterator[None]:
    """SIGQUIT does nothing to this process meanwhile. Python lets the main thread alone set handlers, and this is none:
    the C library's disposition holds for every thread."""
    library = ctypes.CDLL(None)
    library.signal.restype = ctypes.c_void_p
    library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    before = library.signal(signal.SIGQUIT, _SIG_IGN)
    try:
        yield
    finally:
        library.signal(signal.SIGQUIT, before)


@contextlib.contextmanager
def metrics_directory(variables: Mapping[str, str]) -> Iterator[None]:
    """The environment that SGLang's processes inherit: `variables`, and a directory of this process's own where they
    leave their series for `serve_app.multiprocess`. One that was named before could be another replica's too."""
    directory = tempfile.mkdtemp(prefix="ddtree-metrics-")
    wanted = {**variables, ENV_DIRECTORY: directory}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def clean_start() -> Iterator[None]:
    """Put back what loading SGLang replaces for the whole process: the root logger's handlers, the loops' policy."""
    root, policy = logging.getLogger(), asyncio.get_event_loop_policy()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        asyncio.set_event_loop_policy(policy)


def kill_all(children: Sequence[BaseProcess]) -> None:
    """Kill processes and everything below them, and wait until they are gone."""
    import psutil

    below: list[psutil.Process] = []
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            below += psutil.Process(child.pid).children(recursive=True)
    for process in [*children, *below]:
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):
            process.kill()
    for child in children:
        child.join(_KILLED_WITHIN_S)
