"""What a training call leaves for the next: fp32 weights, optimiser, clock and place in the prompt stream.

Two files, `STATE.safetensors` and `STATE.json` beside it. The checkpoint that engines read is `drafter.py`'s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks.drafter.decode import Writer
from benchmarks.drafter.step import Trainer


def save_state(path: Path, trainer: Trainer, writer: Writer, facts: dict[str, Any]) -> None:
    """`facts` are the run's own numbers, JSON-ready; the writer's place is added."""
    state = {f"weight.{k}": v.cpu().contiguous() for k, v in trainer.masters.items()}
    state |= {f"optimiser.{k}": v.contiguous() for k, v in trainer.opt.state().items()} | {"scale": trainer.scale.cpu()}
    save_file(state, path)
    place = {"next_chat": int(writer.next_chat), "draw_seed": int(writer.seed)}
    path.with_suffix(".json").write_text(json.dumps({**facts, **place}))


def load_state(path: Path, trainer: Trainer, writer: Writer) -> dict[str, Any]:
    """Put weights, optimiser and place back; returns the run's own numbers."""
    state, facts = load_file(path), json.loads(path.with_suffix(".json").read_text())
    writer.next_chat.fill_(facts["next_chat"])
    writer.seed.fill_(facts["draw_seed"])
    trainer.scale.copy_(state["scale"])
    for k, v in trainer.masters.items():
        v.copy_(state[f"weight.{k}"])
        trainer.work[k].data.copy_(v)
    trainer.opt.load({k.removeprefix("optimiser."): v for k, v in state.items() if k.startswith("optimiser.")})
    return dict(facts)
