"""`python -m serve_app.models eval`: how many drafted tokens a target would accept, on fixed chat prompts.

The target answers each prompt once; at every position of its answer the drafter's marginals say how far a chain and
best-first trees of several sizes would have come (`acceptance.py`). The mean is over the verify steps that serving
would make. Exact for greedy answers; for sampled ones the law of sample-and-match over one drawn answer per prompt.

What this module does not do: measure time, or check that an engine commits what it should.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from serve_app.errors import ModelFetchError
from serve_app.models.acceptance import Tally, chain_lengths, tree_lengths
from serve_app.models.draft_reference import DraftReference
from serve_app.models.drafter import resolve_drafter
from serve_app.models.sources import resolve

PROMPTS = Path(__file__).parent / "eval_prompts.json"
BUDGETS = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Answer:
    """A prompt and the target's continuation as token ids; `kind` groups prompts in the report."""

    kind: str
    prompt: list[int]
    reply: list[int]


@dataclass
class Result:
    """Tallies of one drafter at one temperature: `tallies["chain"]`, `tallies["tree 32"]`, …; chain tallies by kind."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    kinds: dict[str, Tally] = field(default_factory=dict)

    def add(self, kind: str, lengths: dict[str, list[int]], depth: int) -> None:
        """Count one answer; lengths[name][i] is what a step at its i-th token commits."""
        for name, values in lengths.items():
            self.tallies.setdefault(name, Tally(depth)).add(values)
        self.kinds.setdefault(kind, Tally(depth)).add(lengths["chain"])

    def facts(self) -> dict[str, Any]:
        """JSON-ready means and per-depth rates."""
        return {
            "acceptance_length": {name: round(t.mean, 3) for name, t in self.tallies.items()},
            "accepted_given_reached_by_depth": {
                name: [round(x, 3) for x in t.per_depth()] for name, t in self.tallies.items() if name != "tree 8"
            },
            "chain_by_kind": {kind: round(t.mean, 3) for kind, t in sorted(self.kinds.items())},
            "tokens": self.tallies["chain"].tokens if self.tallies else 0,
        }


@torch.no_grad()
def answer(model: Any, prompt: list[int], ends: set[int], temperature: float, limit: int) -> list[int]:
    """Up to `limit` tokens from the target, the end token included. temperature 0 is argmax."""
    ids = torch.tensor([prompt], device=model.device)
    draw: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        draw = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    options = {"eos_token_id": sorted(ends) or None, "pad_token_id": 0, "max_new_tokens": limit}
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options, **draw)
    return [int(token) for token in out[0, len(prompt) :]]


@torch.no_grad()
def measure(model: Any, drafter: DraftReference, item: Answer, budgets: Sequence[int]) -> dict[str, list[int]]:
    """Acceptance length at every position of an answer that has a successor: {"chain": […], "tree 8": […], …}."""
    tokens = torch.tensor(item.prompt + item.reply, device=model.device)
    states = model(input_ids=tokens[None], output_hidden_states=True, use_cache=False).hidden_states
    features = torch.cat([states[layer + 1][0] for layer in drafter.feature_layers], -1)
    anchors = torch.arange(len(item.prompt), len(tokens) - 1, device=model.device)
    if not len(anchors):
        return {"chain": [], **{f"tree {b}": [] for b in budgets}}
    depth = drafter.block_size - 1
    k = min(max(budgets), drafter.head.shape[0])
    ids, logps = [], []
    for logits in drafter.logits(features, tokens, anchors):
        top = logits.topk(k, -1)
        ids.append(top.indices)
        logps.append(top.values - logits.logsumexp(-1, keepdim=True))
    top_ids, top_logps, truth = torch.cat(ids), torch.cat(logps), _truth(tokens, anchors, depth)
    grown = tree_lengths(top_ids, top_logps, truth, budgets)
    trees = {f"tree {b}": row.tolist() for b, row in zip(budgets, grown, strict=True)}
    return {"chain": chain_lengths(top_ids[:, :, 0], truth).tolist(), **trees}


def _truth(tokens: Tensor, anchors: Tensor, depth: int) -> Tensor:
    """[P, depth] the tokens that follow each anchor, -1 past the end."""
    at = anchors[:, None] + torch.arange(1, depth + 1, device=tokens.device)
    return torch.where(at < len(tokens), tokens[at.clamp(max=len(tokens) - 1)], -1)


def answers(model: Any, tokenizer: Any, args: argparse.Namespace, temperature: float) -> Iterator[Answer]:
    """The prompts' answers: drawn now, or read from `--continuations` ({"0.0": [[ids], …]}, one list a prompt)."""
    items = json.loads(args.prompts.read_text())[:: args.every]
    given = json.loads(args.continuations.read_text())[str(temperature)][:: args.every] if args.continuations else None
    eos = model.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos]) | {tokenizer.eos_token_id}
    torch.manual_seed(args.seed)
    for i, item in enumerate(items):
        text = tokenizer.apply_chat_template(item["messages"], add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        reply = given[i] if given else answer(model, prompt, ends, temperature, args.new_tokens)
        yield Answer(item["kind"], prompt, reply)


def evaluate(
    model: Any, tokenizer: Any, drafters: dict[str, DraftReference], args: argparse.Namespace
) -> dict[str, Any]:
    """The report: per temperature and drafter, means for the chain and every tree size."""
    report: dict[str, Any] = {"prompts": len(json.loads(args.prompts.read_text())[:: args.every]), "results": []}
    for temperature in args.temperatures:
        results = {name: Result() for name in drafters}
        drawn = answers(model, tokenizer, args, temperature)
        for item in tqdm(drawn, f"T={temperature}", report["prompts"], unit="prompt", disable=None):
            for name, drafter in drafters.items():
                results[name].add(item.kind, measure(model, drafter, item, args.budgets), drafter.block_size - 1)
        for name, result in results.items():
            row = {"drafter": name, "temperature": temperature, **result.facts()}
            report["results"].append(row)
            print(f"T={temperature} {name}: {json.dumps(row['acceptance_length'])}", file=sys.stderr)
    return report


def plot(report: dict[str, Any], path: Path) -> None:
    """Acceptance length by tree size, one line per drafter and temperature. Needs matplotlib (extra `bench`)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for row in report["results"]:
        means = row["acceptance_length"]
        sizes = sorted(int(name.split()[1]) for name in means if name.startswith("tree "))
        line = axes.plot(
            sizes, [means[f"tree {s}"] for s in sizes], "o-", label=f"{row['drafter']}, T = {row['temperature']}"
        )
        axes.axhline(means["chain"], ls=":", color=line[0].get_color(), lw=1)
    axes.set(xscale="log", xlabel="tree nodes (dotted: chain)", ylabel="acceptance length", ylim=(1, None))
    axes.set_xticks(sizes, [str(s) for s in sizes])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def load(args: argparse.Namespace) -> tuple[Any, Any, dict[str, DraftReference]]:
    """Target and tokenizer through transformers, and the drafters on the target's embedding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    files = resolve(args.model)
    paths = {}
    for source in args.drafter:
        name, _, where = source.rpartition("=")
        path = resolve_drafter(where, files)
        if path is None:
            raise ModelFetchError(f"no drafter is shipped for {files.name}; give a directory with --drafter")
        paths[name or where] = path
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(files.path, dtype=dtype).to(args.device).eval()
    embedding, head = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    drafters = {name: DraftReference.load(path, embedding, head) for name, path in paths.items()}
    return model, AutoTokenizer.from_pretrained(files.path), drafters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line, for this module's `main` and for a subcommand."""
    parser.add_argument("--model", default="smollm2-135m", help="known name, local directory or Hugging Face id")
    parser.add_argument(
        "--drafter", nargs="+", default=["auto"], metavar="[LABEL=]DRAFTER", help="several are compared"
    )
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help='JSON list of {"kind", "messages"}')
    parser.add_argument("--continuations", type=Path, help="answers as token ids instead of asking the target")
    parser.add_argument(
        "--every", type=_positive, default=1, help="use every n-th prompt: 20 is a sample (all of them)"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8], help="0 is greedy (0 0.8)")
    parser.add_argument("--budgets", type=_positive, nargs="+", default=list(BUDGETS), help="tree nodes (8 … 128)")
    parser.add_argument("--new-tokens", type=_positive, default=260, help="of an answer, at most (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="%(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of sampled answers (%(default)s)")
    parser.add_argument("--out", type=Path, help="write the report here (JSON)")
    parser.add_argument("--plot", type=Path, help="write a PNG here")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Evaluate and write what was asked for; prints the report when there is no --out."""
    report = {"model": args.model, "new_tokens": args.new_tokens, "dtype": args.dtype, **evaluate(*load(args), args)}
    text = json.dumps(report, indent=1) + "\n"
    if args.out:
        args.out.write_text(text)
    else:
        print(text, end="")
    if args.plot:
        plot(report, args.plot)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run from a command line; returns the exit code, 1 with a line that says why."""
    parser = argparse.ArgumentParser(prog="python -m serve_app.models eval", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch sees no CUDA device")
    try:
        return run(args)
    except ModelFetchError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
