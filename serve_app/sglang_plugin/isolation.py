"""`Scheduler._forward_isolation` faster: what a forward changes about a batch is undone after it.

SGLang asks the dataclass for its eighty fields twice a step, reads and writes each by name. The names do not change.

What this module does not do: decide which batches are isolated (the hook does).
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any


class Isolation:
    """A context in which SGLang's ScheduleBatch `batch` may be changed: at its end the fields are as they were.

    Within it `sampling_info` is the copy that a forward gets. With `overlap`, `scheduler` keeps batch and fields alive
    for two steps, because the device may still be working with their tensors.
    """

    __slots__ = ("_batch", "_overlap", "_saved", "_scheduler")

    def __init__(self, scheduler: Any, batch: Any, overlap: bool) -> None:
        self._scheduler, self._batch, self._overlap = scheduler, batch, overlap

    def __enter__(self) -> None:
        batch, scheduler = self._batch, self._scheduler
        names, read = _fields(batch.__class__)
        values = read(batch)
        self._saved = dict(zip(names, values, strict=True))
        info = batch.sampling_info
        if info is not None:
            batch.sampling_info = info.copy_for_forward()
        if self._overlap:
            scheduler.batch_record_ct = (scheduler.batch_record_ct + 1) % 2
            scheduler.batch_record_buf[scheduler.batch_record_ct] = [batch, values, batch.sampling_info]

    def __exit__(self, *exception: object) -> None:
        vars(self._batch).update(self._saved)


@cache
def _fields(batch_class: Any) -> tuple[tuple[str, ...], attrgetter[Any]]:
    names = tuple(field.name for field in fields(batch_class))
    return names, attrgetter(*names)
