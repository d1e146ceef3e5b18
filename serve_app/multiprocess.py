"""Series that an engine's own processes write into prometheus_client's files, as part of this process's page.

SGLang's scheduler is a process of its own. It writes to the directory that PROMETHEUS_MULTIPROC_DIR names once the
engine has started; this process reads the files at every scrape. A process that has ended leaves its counters behind,
folded into one file so that sums never fall and files never pile up; its gauges go. A file that cannot be read (its
writer was cut off, the disk was full) costs its own series, never the page.

What this module does not do: choose the directory. It must belong to one replica alone; the engine makes one.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

logger = logging.getLogger("ray.serve.ddtree.metrics")
ENV_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
_ENDED = "ended"
# What reading a file raises that is gone, empty, cut short or no such file at all.
_UNREADABLE = (OSError, RuntimeError, ValueError, TypeError, struct.error)


class EngineFiles(Collector):
    """A collector of the files of other processes. Without a directory it has nothing.

    Args:
        environ: where the directory is named, looked up at each scrape.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._lock = threading.Lock()
        self._complained: set[str] = set()

    def collect(self) -> Iterable[Metric]:
        directory = Path(self._environ.get(ENV_DIRECTORY, ""))
        if directory == Path() or not directory.is_dir():
            return []
        with self._lock:  # scrapes come from several threads
            try:
                fold_ended(directory)
            except _UNREADABLE as error:
                self._complain(str(directory), error)
            # This process's own values are on its page already.
            files = [str(file) for file in directory.glob("*.db") if _pid(file) != os.getpid()]
            try:
                return _merge(files)
            except _UNREADABLE:
                return _merge([file for file in files if self._readable(file)])

    def _readable(self, file: str) -> bool:
        try:
            _merge([file])
        except _UNREADABLE as error:
            self._complain(file, error)
            return False
        return True

    def _complain(self, path: str, error: Exception) -> None:
        if path not in self._complained:  # once, not at every scrape
            self._complained.add(path)
            logger.warning("the series in %s are missing or incomplete: %s: %s", path, type(error).__name__, error)


def fold_ended(directory: Path) -> None:
    """Add up the counters of processes that have ended in one file per kind, and drop their gauges.

    Raises:
        OSError: no room, or no right to write. Then nothing is lost: the files stay, and are read one by one.
        RuntimeError, ValueError, struct.error: a file is damaged; it stays, and the others have been folded.
    """
    failure: Exception | None = None
    for file in directory.glob("*.db"):
        pid = _pid(file)
        if pid is None or _alive(pid):
            continue
        try:
            if not file.name.startswith("gauge_"):
                _fold(file, file.with_name(f"{file.name.split('_')[0]}_{_ENDED}.db"))
            file.unlink(missing_ok=True)
        except _UNREADABLE as error:
            failure = error
    if failure is not None:
        raise failure


def _fold(source: Path, into: Path) -> None:
    total: dict[str, float] = {}
    for file in (into, source):
        if file.exists():
            for key, value, _, _ in MmapedDict.read_all_values_from_file(str(file)):
                json.loads(key)  # a damaged name must not get into the file of all
                total[key] = total.get(key, 0.0) + value
    # Not through a memory map: writing to one on a full disk kills the process.
    fresh = into.with_suffix(".new")
    fresh.write_bytes(_packed(total))
    fresh.replace(into)


def _packed(values: Mapping[str, float]) -> bytes:
    """In prometheus_client's format; see its MmapedDict."""
    entries = []
    for key, value in values.items():
        name = key.encode()
        padded = name + b" " * (8 - (len(name) + 4) % 8)
        entries.append(struct.pack(f"i{len(padded)}sdd", len(name), padded, value, 0.0))
    packed = b"".join(entries)
    return struct.pack("ii", 8 + len(packed), 0) + packed


def _merge(files: Sequence[str]) -> list[Metric]:
    merged: Iterable[Metric] = MultiProcessCollector.merge(files, accumulate=True)
    return list(merged)


def _pid(file: Path) -> int | None:
    """`counter_12.db`, `gauge_livesum_12.db` → 12."""
    text = file.stem.rpartition("_")[2]
    return int(text) if text.isdigit() else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
