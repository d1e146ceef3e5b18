"""First light of DDTREE on a GPU, in a fixed time: engines side by side, then the questions in order of importance.

Prints one JSON object and writes it to OUT/bring_up.json after every stage, so that a run cut short still tells how far
it came. The engines' logs lie beside it.

Usage: sglang_bring_up.py MODEL DRAFTER OUT [--seconds 240] [--prompts 40] [--tokens 128] [--modes ar,dflash,…]

What this program does not do: assert; `test_sglang_ddtree.py` does.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.sglang_fleet import Child, chat_prompts, engine_arguments

GREEDY = {"temperature": 0.0, "ignore_eos": False}
CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "ar": ("ar", {}, {}),
    "dflash": ("dflash", {}, {}),
    "ddtree": ("ddtree-32", {}, {}),
    "ddtree-64": ("ddtree-64", {}, {}),
    "ddtree-chain": ("ddtree-15", {"speculative_eagle_topk": 1}, {}),
    "ddtree-plain": ("ddtree-32", {}, {"SGLANG_DDTREE_COMMIT_IN_GRAPH": "0"}),
    "ddtree-eager": ("ddtree-32", {"disable_cuda_graph": True}, {}),
}


class Run:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.deadline = time.monotonic() + arguments.seconds
        self.out: Path = arguments.out
        self.report: dict[str, Any] = {"stages": {}}
        self.children: dict[str, Child] = {}
        self.arguments = arguments

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.arguments.model)

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def stage(self, name: str, work: Any) -> None:
        """Run `work`, keep its result or its failure, and save."""
        began = time.monotonic()
        try:
            if self.left() < 2:
                raise TimeoutError("no time left")
            result = work()
        except Exception as error:
            result = {"failed": f"{type(error).__name__}: {error}"[-2500:]}
            traceback.print_exc()
        self.report["stages"][name] = result
        self.report["seconds"] = {**self.report.get("seconds", {}), name: round(time.monotonic() - began, 1)}
        (self.out / "bring_up.json").write_text(json.dumps(self.report, indent=1))

    def start(self) -> dict[str, Any]:
        for name in self.arguments.modes.split(","):
            mode, changes, env = CONFIGS[name]
            fields = engine_arguments(str(self.arguments.model), str(self.arguments.drafter), mode, **changes)
            self.children[name] = Child(name, fields, self.out / f"{name}.log", env)
            if len(self.children) == 1 and self.arguments.stagger:
                time.sleep(self.arguments.stagger)  # the first compiles what the others then find in the cache
        started: dict[str, Any] = {}
        for name in list(self.children):
            try:
                self.children[name].wait_ready(self.left() - 15)
                started[name] = self.children[name].start_s
            except RuntimeError as error:
                started[name] = str(error)[-1500:]
                self.children.pop(name).close()
        return started

    def greedy(self, name: str, prompts: list[Any], tokens: int, one_by_one: bool) -> list[dict[str, Any]]:
        params = {**GREEDY, "max_new_tokens": tokens}
        child = self.children[name]
        if not one_by_one:
            return child.ask("generate", self.left(), prompts=prompts, params=params)["results"]
        return [child.ask("generate", self.left(), prompts=[p], params=params)["results"][0] for p in prompts]

    def identity(
        self, name: str, expected: list[dict[str, Any]], prompts: list[str], one_by_one: bool
    ) -> dict[str, Any]:
        """How many outputs equal `expected`, and of the others the gap between AR's two best tokens where they part."""
        found = self.greedy(name, prompts, self.arguments.tokens, one_by_one)
        differing = []
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            if ours["ids"] != theirs["ids"]:
                same = next(
                    (i for i, (a, b) in enumerate(zip(ours["ids"], theirs["ids"], strict=False)) if a != b), None
                )
                differing.append({"prompt": index, "at": same, "lengths": [len(ours["ids"]), len(theirs["ids"])]})
                differing[-1]["tokens"] = [o["ids"][same] if same is not None else None for o in (ours, theirs)]
        for entry in differing[:10]:
            number = entry["prompt"]
            entry["ar"] = self.gap(prompts[number], expected[number]["ids"], entry["at"], entry["tokens"])
        steps, made = sum(r["verify_steps"] for r in found), sum(len(r["ids"]) for r in found)
        length = round((made - len(prompts)) / steps, 3) if steps else None
        counts = {"equal": len(prompts) - len(differing), "of": len(prompts), "acceptance_length": length}
        return {**counts, "differing": differing[:10], "sample": found[0]["text"][:80]}

    def gap(self, prompt: str, ids: list[int], at: int | None, tokens: list[int | None]) -> Any:
        """AR's log-prob of its own token less that of ours after the common start (of the order of one bf16 step for a
        near-tie), and its best three there. The start is given as a prompt, so that one forward decides both."""
        if at is None or "ar" not in self.children:
            return None
        start = [*self.tokenizer.encode(prompt), *ids[:at]]
        params = {**GREEDY, "max_new_tokens": 1}
        asked = self.children["ar"].ask("generate", self.left(), prompts=[start], params=params, logprobs=20)
        top = {token: value for value, token in asked["results"][0]["top"][0]}
        ours, theirs = (top.get(token) for token in tokens)
        best = asked["results"][0]["top"][0][:3]
        return {"gap": None if ours is None or theirs is None else round(theirs - ours, 4), "best": best}

    def speed(self, name: str, batch: int) -> dict[str, Any]:
        prompts, params = chat_prompts(200)[100 : 100 + batch], {**GREEDY, "max_new_tokens": 256, "ignore_eos": True}
        self.children[name].ask("time", self.left(), prompts=prompts, params=params)
        timed = self.children[name].ask("time", self.left(), prompts=prompts, params=params)
        steps = timed["longest_steps"]
        return {
            "tok_s": round(timed["tokens"] / timed["seconds"], 1),
            "step_ms": round(1000 * timed["seconds"] / steps, 3) if steps else None,
            "acceptance_length": round(timed["tokens"] / timed["verify_steps"], 3) if timed["verify_steps"] else None,
        }

    def all(self) -> None:
        self.stage("start", self.start)
        prompts = chat_prompts(self.arguments.prompts)
        expected: list[dict[str, Any]] = []
        if "ar" in self.children:
            self.stage(
                "ar", lambda: expected.extend(self.greedy("ar", prompts, self.arguments.tokens, True)) or len(expected)
            )
        others = [name for name in self.children if name != "ar"]
        few = prompts[:8]
        for name in others:
            if expected:
                self.stage(f"{name} identity, first", lambda n=name: self.identity(n, expected[:8], few, True))
        quick = [name for name in self.children if name != "ddtree-eager"]
        for name in quick:
            for batch in (1, 8):
                self.stage(f"{name} speed {batch}", lambda n=name, b=batch: self.speed(n, b))
        for name in quick:
            if expected and name != "ar":
                self.stage(f"{name} identity", lambda n=name: self.identity(n, expected, prompts, True))
                self.stage(f"{name} identity, batched", lambda n=name: self.identity(n, expected, prompts, False))
        for name in others:
            self.stage(f"{name} metrics", lambda n=name: self.children[n].ask("metrics", self.left())["metrics"])
        if "ddtree" in self.children:
            self.stage("ddtree sampled", self.sampled)
            self.stage("ddtree logprobs", lambda: self.logprobs(prompts[:4]))
            self.stage("ddtree limits", self.limits)
            self.stage("ddtree pool", lambda: self.children["ddtree"].ask("pool", self.left())["state"])

    def sampled(self) -> dict[str, Any]:
        params = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.02, "max_new_tokens": 64}
        prompts = [chat_prompts(1)[0]] * 8
        mixed = [params, {**GREEDY, "max_new_tokens": 64}] * 4
        outputs = self.children["ddtree"].ask("generate", self.left(), prompts=prompts, params=mixed)["results"]
        kinds = {"sampled": outputs[::2], "greedy": outputs[1::2]}
        return {f"distinct {kind}": len({tuple(o["ids"]) for o in some}) for kind, some in kinds.items()}

    def logprobs(self, prompts: list[str]) -> dict[str, Any]:
        params = {**GREEDY, "max_new_tokens": 48}
        asked = {}
        for name in ("ar", "ddtree"):
            asked[name] = self.children[name].ask("generate", self.left(), prompts=prompts, params=params, logprobs=5)
        worst, counted = 0.0, 0
        for ours, theirs in zip(asked["ddtree"]["results"], asked["ar"]["results"], strict=False):
            for a, b, x, y in zip(ours["ids"], theirs["ids"], ours["logprobs"], theirs["logprobs"], strict=False):
                if a != b:
                    break
                worst, counted = max(worst, abs(x - y)), counted + 1
        lengths = [(len(o["ids"]), len(o["logprobs"]), len(o["top"])) for o in asked["ddtree"]["results"]]
        return {"largest difference": worst, "tokens compared": counted, "counts": lengths}

    def limits(self) -> dict[str, Any]:
        child, prompt = self.children["ddtree"], chat_prompts(3)[2]
        found = {}
        for tokens in (1, 2, 7, 33):
            params = {**GREEDY, "max_new_tokens": tokens, "ignore_eos": True}
            found[tokens] = len(
                child.ask("generate", self.left(), prompts=[prompt], params=params)["results"][0]["ids"]
            )
        stopped = child.ask(
            "generate", self.left(), prompts=[prompt], params={**GREEDY, "max_new_tokens": 64, "stop": [" the"]}
        )
        return {
            "max_new_tokens": found,
            "stop": stopped["results"][0]["text"][-40:],
            "why": stopped["results"][0]["finish"],
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "drafter", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--stagger", type=float, default=0, help="seconds that the first engine starts ahead")
    parser.add_argument("--modes", default="ar,ddtree,dflash,ddtree-64,ddtree-chain,ddtree-plain,ddtree-eager")
    run = Run(parser.parse_args())
    try:
        run.all()
    finally:
        for child in run.children.values():
            child.close()
    print(json.dumps(run.report))


if __name__ == "__main__":
    main()
