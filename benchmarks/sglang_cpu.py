"""SGLang's own scheduler, workers and graph runners in this process, on a CPU that they take for a GPU.

Tensors, streams and events are the CPU's; a captured graph is the closure that would have been captured. In Triton's
interpreter (TRITON_INTERPRET=1) kernels and graphs run as they are, so that tokens are right and times mean nothing.
Otherwise neither does anything, and what is left is the host's work: `sglang_host` measures it.

It patches what asks for CUDA, and only that; it belongs to benchmarks and tests. Call `prepare` before SGLang is used.

What this module does not do: run with more than one rank, or speak to a tokenizer.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHARED: dict[str, Any] = {
    "torch_dtype": "float32", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 4096, "attention_bias": False, "hidden_act": "silu", "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
TARGET = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 3, "mlp_bias": False}
DRAFTER = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 1, "num_target_layers": 3,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1]},
}  # fmt: skip
LAUNCHES: Counter[str] = Counter()  # kernels that would have been launched, by name
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


class Device(str):
    """ "cpu" to PyTorch, which reads its characters, and "cuda" to SGLang, which compares it."""

    def __new__(cls, *_: object) -> Device:
        return super().__new__(cls, "cpu")

    def __eq__(self, other: object) -> bool:
        return other == "cuda"

    def __ne__(self, other: object) -> bool:
        return other != "cuda"

    def __hash__(self) -> int:
        return hash("cuda")

    def startswith(self, prefix: Any, *bounds: Any) -> bool:
        return "cuda".startswith(prefix, *bounds)


def prepare() -> None:
    """Import SGLang and make it believe in its GPU."""
    os.environ["SGLANG_ENABLE_WAR_BARRIER"] = "1"
    # One kernel and an importable torchvision, which SGLang misses on a CPU.
    sys.path.insert(0, str(ROOT / "tests" / "engines" / "sglang" / "cpu_kernels"))
    import sglang.srt.managers.scheduler
    import sglang.srt.speculative.dflash_worker_v2  # noqa: F401
    from sglang.kernels.ops.speculative import cache_locs
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner

    _cuda()
    if not INTERPRETED:
        _kernels()
    bootstrap.get_default_distributed_backend = lambda device: "gloo"
    attention_backend_setup.init_cublas = lambda *_: None
    cache_locs._is_cuda = True  # DFLASH's own kernels
    ModelRunner.maybe_enable_batch_invariant_mode = lambda runner: None  # a CPU's kernels are what they are
    decode_cuda_graph_runner.resolve_decode_backend = _backend_class()
    decode_cuda_graph_runner.graph_capture = lambda stream=None: nullcontext(SimpleNamespace(stream=None))


def _cuda() -> None:
    import torch

    properties = {"name": "none", "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 140 << 30}
    answers = {
        "device_count": 1, "current_device": 0, "mem_get_info": (64 << 30, 140 << 30), "memory_reserved": 0,
        "get_device_properties": SimpleNamespace(**properties, is_integrated=False, gcnArchName=""),
        "get_device_capability": (9, 0), "get_device_name": "none", "empty_cache": None, "synchronize": None,
        "set_device": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign]


def _kernels() -> None:
    """Triton's own way to a launch, and no launch."""
    import triton
    from sglang.srt.model_executor import forward_batch_info
    from sglang.srt.model_executor.forward_batch_info import compute_position_torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    limits = {"multiprocessor_count": 132, "max_shared_mem": 232448}
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_device_properties=lambda device: limits,
        utils=SimpleNamespace(get_device_properties=lambda device: limits),
    )
    triton.runtime.driver.set_active(driver)

    def compile_nothing(function: Any, key: Any, signature: Any, device: Any, *_: Any, **__: Any) -> Any:
        name = function.fn.__name__

        def run(*_: Any) -> None:
            LAUNCHES[name] += 1

        kernel = SimpleNamespace(function=None, packed_metadata=None, launch_metadata=lambda *_: None, run=run)
        function.device_caches[device][0][key] = kernel
        return kernel

    JITFunction._do_compile = compile_nothing
    # Prompts take the forward that eager layers compute; its positions must be numbers.
    forward_batch_info.compute_position_triton = lambda prefix, extend, _: compute_position_torch(prefix, extend)


def _backend_class() -> type:
    from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend

    class Closures(FullCudaGraphBackend):
        """Graphs are closures. `replayed(runner, bucket)` stands for what they do where no kernel runs."""

        replayed: Callable[[Any, int], None] = staticmethod(lambda runner, bucket: None)

        def __init__(self, runner: Any) -> None:
            self._runner, self._graphs, self._outputs = runner, {}, {}

        @contextmanager
        def capture_session(self, stream: Any) -> Iterator[None]:
            yield

        def capture_one(self, shape_key: Any, forward_fn: Any, capture_inputs: Any = None, **_: Any) -> None:
            planned = self._runner.attn_backend.forward_metadata
            self._graphs[shape_key], self._outputs[shape_key] = (forward_fn, planned), forward_fn()

        def replay(self, shape_key: Any, static_forward_batch: Any, **_: Any) -> Any:
            if INTERPRETED:
                from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

                # A graph knows the memory that it was captured with; a closure must be told.
                forward_fn, self._runner.attn_backend.forward_metadata = self._graphs[shape_key]
                with forward_context(ForwardContext(attn_backend=self._runner.attn_backend)):
                    return forward_fn()
            type(self).replayed(self._runner, shape_key.size)
            return self._outputs[shape_key]

    return Closures


class Session:
    """A running scheduler. `mode`: "ar", "dflash" or "ddtree-N" with N the budget. One per process."""

    def __init__(self, mode: str, folder: Path, vocabulary: int, block: int, **changes: Any) -> None:
        import zmq
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.plugins.hook_registry import HookRegistry
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        from serve_app.sglang_plugin.plugin import register

        register()
        HookRegistry.apply_hooks()
        fields: dict[str, Any] = {
            "model_path": str(folder / "target"), "load_format": "dummy", "device": "cuda", "grammar_backend": "none",
            "sampling_backend": "pytorch", "attention_backend": "triton", "mem_fraction_static": 0.5,
            "disable_prefill_cuda_graph": True, "cuda_graph_max_bs_decode": 16, "max_running_requests": 16,
            "max_total_tokens": 65536, "skip_tokenizer_init": True, "skip_server_warmup": True, "random_seed": 1,
            "enable_metrics": True, "triton_attention_num_kv_splits": 1,
        }  # fmt: skip
        shapes = {"target": TARGET, "drafter": DRAFTER | {"block_size": block}}
        for name, shape in shapes.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            config = SHARED | shape | {"vocab_size": vocabulary}
            (folder / name / "config.json").write_text(json.dumps(config))
        algorithm, _, budget = mode.partition("-")
        if algorithm != "ar":
            fields |= {
                "speculative_algorithm": algorithm.upper(), "speculative_draft_model_path": str(folder / "drafter"),
                "speculative_draft_load_format": "dummy",
            }  # fmt: skip
        if budget:
            fields["speculative_num_draft_tokens"] = int(budget) + 1
        arguments = ServerArgs(**fields | changes)
        arguments.override("benchmarks.sglang_cpu", device=Device())
        publish(arguments, role="scheduler")
        ports = PortArgs.init_new(arguments)
        self._sink = zmq.Context().socket(zmq.PULL)
        self._sink.setsockopt(zmq.RCVHWM, 0)
        self._sink.bind(ports.tokenizer_ipc_name)
        self.scheduler = Scheduler(arguments, ports, 0, 0, 0, 0, 0, 0, None)
        self._randomise()

    def _randomise(self) -> None:
        """Weights large enough that what comes next depends on what came before."""
        import torch

        generator = torch.Generator().manual_seed(5)
        runners = [self.scheduler.tp_worker.model_runner]
        if self.scheduler.draft_worker is not None:
            runners.append(self.scheduler.draft_worker.draft_model_runner)
        for runner in runners:
            for name, weight in sorted(runner.model.named_parameters()):
                if "norm" not in name:
                    weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.6)

    def run(self, requests: list[tuple[int, Any]], each: Callable[[int], bool]) -> None:
        """SGLang's event loop until `each(iteration)` says stop. `requests`: (iteration from 1 on, request)."""
        receiver, real = type(self.scheduler.request_receiver), type(self.scheduler.request_receiver).recv_requests
        turn = 0

        def receive(receiver: Any) -> list[Any]:
            nonlocal turn
            turn += 1
            if each(turn):
                self.scheduler.gracefully_exit = True
            return [*(real(receiver) or ()), *(request for at, request in requests if at == turn)]

        receiver.recv_requests = receive
        try:
            self.scheduler.run_event_loop()
        finally:
            receiver.recv_requests = real
            self.scheduler.gracefully_exit = False


def request(name: str, tokens: list[int], count: int, **sampling: Any) -> Any:
    """A tokenized request for `count` tokens, greedy unless `sampling` says otherwise."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(**{"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True} | sampling)
    params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=name, input_text="", input_ids=array("q", tokens), input_embeds=None, mm_inputs=None, token_type_ids=None,
        sampling_params=params, return_logprob=False, logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None,
        stream=False,
    )  # fmt: skip
