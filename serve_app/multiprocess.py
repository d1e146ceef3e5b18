"""Series that an engine's own processes write into prometheus_client's files, as part of this process's page.

SGLang's scheduler is a process of its own. It writes to the directory that PROMETHEUS_MULTIPROC_DIR names once the
engine has started; this process reads the files at every scrape. A process that has ended leaves its counters behind,
folded into one file so that sums never fall and files never pile up; its gauges go.

What this module does not do: choose the directory. It must belong to one replica alone; the engine makes one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

ENV_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
_ENDED = "ended"


class EngineFiles(Collector):
    """A collector of the files of other processes. Without a directory it has nothing.

    Args:
        environ: where the directory is named, looked up at each scrape.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        directory = Path(self._environ.get(ENV_DIRECTORY, ""))
        if directory == Path() or not directory.is_dir():
            return []
        with self._lock:  # scrapes come from several threads
            fold_ended(directory)
            # This process's own values are on its page already.
            files = [str(file) for file in directory.glob("*.db") if _pid(file) != os.getpid()]
            merged: Iterable[Metric] = MultiProcessCollector.merge(files, accumulate=True)
            return list(merged)


def fold_ended(directory: Path) -> None:
    """Add up the counters of processes that have ended in one file per kind, and drop their gauges."""
    for file in directory.glob("*.db"):
        pid = _pid(file)
        if pid is None or _alive(pid):
            continue
        if not file.name.startswith("gauge_"):
            _fold(file, file.with_name(f"{file.name.split('_')[0]}_{_ENDED}.db"))
        file.unlink(missing_ok=True)


def _fold(source: Path, into: Path) -> None:
    values = list(MmapedDict.read_all_values_from_file(str(source)))
    total = MmapedDict(str(into))
    try:
        for key, value, _, _ in values:
            total.write_value(key, total.read_value(key)[0] + value, 0.0)
    finally:
        total.close()


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
