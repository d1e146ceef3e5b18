from __future__ import annotations

import argparse, json, os, sys, time
from pathlib import Path
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/engines/sglang/cpu_kernels")]
os.environ.setdefault("SGLANG_ENABLE_WAR_BARRIER", "1")
import torch

SHARED = {
    "torch_dtype": "float32", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 4096, "attention_bias": False, "hidden_act": "silu", "bos_token_id": 1,
    "eos_token_id": 2,
}
TARGET = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "mlp_bias": False,
          "tie_word_embeddings": False}
DRAFTER = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "tie_word_embeddings": False,
           "block_size": 16, "num_target_layers": 4, "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]}}


class Device(str):
    """The CPU to PyTorch, a CUDA device to SGLang's questions."""
    def __new__(cls, *_): return super().__new__(cls, "cpu")
    def __eq__(self, other): return str.__eq__("cuda", other)
    def __ne__(self, other): return not self == other
    def __hash__(self): return hash("cuda")
    def startswith(self, *a): return "cuda".startswith(*a)


from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
class Emulated(FullCudaGraphBackend):
    def __init__(self, runner): self.runner, self.out = runner, {}
    from contextlib import contextmanager
    @contextmanager
    def capture_session(self, stream): yield
    @contextmanager
    def replay_session(self): yield
    def capture_one(self, key, run_once, capture_inputs=None, post_warmup_hook=None):
        self.out[key] = run_once()
    def can_run(self, fb, key): return key in self.out
    def replay(self, key, fb, **kw):
        t = time.thread_time()
        IN[0] += 1
        for e in EFFECTS: e(self.runner, key)
        IN[0] -= 1
        SPENT[0] += time.thread_time() - t
        return self.out[key]
    def cleanup(self): pass

EFFECTS = []
SPENT = [0.0]
LAUNCHES = {}

def emulate_cuda():
    """sglang on a CPU that believes in CUDA"""
    import triton
    from triton.backends.compiler import GPUTarget
    class Driver:
        def get_current_device(self): return 0
        def get_current_stream(self, d): return 0
        def get_current_target(self): return GPUTarget("cuda", 90, 32)
        def get_device_properties(self, d): return {"multiprocessor_count": 132, "max_shared_mem": 232448}
        class utils:
            @staticmethod
            def get_device_properties(d): return {"multiprocessor_count": 132, "max_shared_mem": 232448}
        def get_active_torch_device(self): return torch.device("cpu")
        def is_active(self): return True
        def get_benchmarker(self): ...
    triton.runtime.driver.set_active(Driver())
    from triton.runtime.jit import JITFunction
    class Kernel:
        function = packed_metadata = None
        def __init__(self, name): self.name = name
        def launch_metadata(self, *a): return None
        def run(self, *a):
            LAUNCHES[self.name] = LAUNCHES.get(self.name, 0) + 1
    def compile(self, key, signature, device, constexprs, options, attrs, warmup):
        k = Kernel(self.fn.__name__)
        self.device_caches[device][0][key] = k
        return k
    JITFunction._do_compile = compile
    c = torch.cuda
    c.device_count, c.current_device, c.mem_get_info = (lambda: 1), (lambda: 0), (lambda d=None: (64 << 30, 140 << 30))
    c.empty_cache = c.synchronize = lambda *a: None
    c.memory_reserved = lambda *a: 0
    c.set_device = lambda d: None
    torch.Tensor.record_stream = lambda t, s: None
    from types import SimpleNamespace
    c.get_device_properties = lambda d=0: SimpleNamespace(name="emulated", major=9, minor=0, multi_processor_count=132, total_memory=140 << 30, is_integrated=False, gcnArchName="")
    c.get_device_capability = lambda d=0: (9, 0)
    c.get_device_name = lambda d=0: "emulated"


ACCEPTED = 4
from torch.utils._python_dispatch import TorchDispatchMode
from collections import Counter
VIEWS = {"view", "slice", "select", "expand", "reshape", "unsqueeze", "t", "transpose", "alias", "detach", "permute", "as_strided", "_unsafe_view", "squeeze", "lift_fresh"}
class Ops(TorchDispatchMode):
    def __init__(self): super().__init__(); self.n = Counter()
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if IN[0]: return func(*args, **(kwargs or {}))
        f = sys._getframe(1)
        while f and not ("sglang" in f.f_code.co_filename and "hook_registry" not in f.f_code.co_filename and "sglang_host" not in f.f_code.co_filename): f = f.f_back
        name = func.name().split("::")[1].split(".")[0]
        self.n["view" if name in VIEWS else "op", name, f and f"{'/'.join(f.f_code.co_filename.split('/')[-2:])}:{f.f_lineno} {f.f_code.co_name}"] += 1
        return func(*args, **(kwargs or {}))
counter = Ops()
IN = [0]

def drive(s, ports, a):
    import zmq
    from array import array
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams
    ctx = zmq.Context()
    sink = ctx.socket(zmq.PULL); sink.setsockopt(zmq.RCVHWM, 0); sink.bind(ports.tokenizer_ipc_name)
    w = s.draft_worker
    if w is not None and hasattr(w, "chosen"):
        def commit(runner, key):
            if runner.model_runner.is_draft_worker: return
            c = w._commit; cap, path = c.rows.shape; b = len(runner.model_runner.req_to_token_pool and s.running_batch.reqs) or key.size
            flat = c.result; flat[: b * path] = 7
            tail = flat[cap * path:].view(3, cap)[:, :b]
            tail[0] = ACCEPTED; tail[1] = 7; tail[2] = runner.buffers.seq_lens[:b] + ACCEPTED
        EFFECTS.append(commit)
    elif w is not None:
        w._use_triton_prepare_block = w._use_triton_accept_bonus = True
        from sglang.srt.speculative import dflash_worker_v2 as dw
        ob = dw._compute_dflash_accept_bonus_triton_unchecked
        def accept(**k):
            ob(**k)
            t = time.thread_time()
            k["accept_lens_out"].fill_(ACCEPTED - 1); k["commit_lens_out"].fill_(ACCEPTED); k["bonus_ids_out"].fill_(7)
            k["out_tokens_out"].fill_(7); k["new_seq_lens_out"].copy_(k["prefix_lens"] + ACCEPTED)
            SPENT[0] += time.thread_time() - t
        dw._compute_dflash_accept_bonus_triton_unchecked = accept
    if w is not None:
        w._ensure_draft_block_buffers(16)
        for n in ("ids", "positions", "tokens"): getattr(w, f"_draft_block_{n}_buf").zero_()
        w._draft_verify_out_cache_loc_buf.zero_()
    turn = [0]
    torch.set_num_threads(1)
    times = []
    import cProfile
    prof = cProfile.Profile()
    real = s.request_receiver.recv_requests
    marks = {}
    warm = 60
    def recv():
        turn[0] += 1
        n = turn[0]
        now = time.thread_time()
        if n > warm: times.append(now - marks["last"] - (SPENT[0] - marks["spent"]))
        marks["last"], marks["spent"] = now, SPENT[0]
        if n == warm: 
            LAUNCHES.clear(); SPENT[0] = 0.0
            marks["t0"] = time.perf_counter(); marks["c0"] = time.process_time()
            if a.profile: prof.enable()
            if a.ops: counter.__enter__()
        if n == warm + a.steps:
            prof.disable()
            if a.ops: counter.__exit__(None, None, None)
            marks["t1"] = time.perf_counter(); marks["c1"] = time.process_time()
            s.gracefully_exit = True
        got = real()
        if n == 1:
            for i in range(a.batch):
                sp = SamplingParams(temperature=0.0, max_new_tokens=3500, ignore_eos=True); sp.normalize(None)
                got = list(got or []) + [TokenizedGenerateReqInput(rid=f"r{i}", input_text="", input_ids=array("q", range(10 + i, 40 + i)), input_embeds=None,
                    mm_inputs=None, token_type_ids=None, sampling_params=sp, return_logprob=False, logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None, stream=False)]
        return got
    type(s.request_receiver).recv_requests = lambda self: recv()
    s.run_event_loop()
    steps = a.steps
    us = 1e6 * sorted(times)[len(times)//2]
    r = s.running_batch.reqs
    print(json.dumps(dict(mode=a.mode, batch=a.batch, us_per_step=round(us, 1), launches={k: round(v / steps, 2) for k, v in LAUNCHES.items()}, out=[len(x.output_ids) for x in r][:2])))
    if a.ops:
        print("ops", sum(v for (k, *_), v in counter.n.items() if k == "op") / steps, "views", sum(v for (k, *_), v in counter.n.items() if k == "view") / steps)
        for (k, n, w), v in sorted(counter.n.items(), key=lambda x: -x[1]): 
            if k == "op" and v > steps / 10: print(f"{v/steps:6.2f} {n} {w}")
    if a.profile:
        prof.dump_stats(a.profile)
    sys.stdout.flush(); os._exit(0)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("mode")
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--profile", default=None)
    p.add_argument("--ops", action="store_true")
    a = p.parse_args()
    import serve_app.sglang_plugin.args as dargs
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    import sglang.srt.managers.scheduler as sch
    from serve_app.sglang_plugin.plugin import register
    import sglang.srt.speculative.dflash_worker_v2, sglang.srt.models.llama
    emulate_cuda()
    register()
    HookRegistry.apply_hooks()
    from sglang.srt.server_args import ServerArgs, PortArgs
    folder = Path("/work/tmp/step/model")
    for n, c in (("target", TARGET), ("drafter", DRAFTER)):
        (folder / n).mkdir(parents=True, exist_ok=True)
        (folder / n / "config.json").write_text(json.dumps(SHARED | c))
    fields = dict(model_path=str(folder / "target"), load_format="dummy", device="cuda", sampling_backend="pytorch", grammar_backend="none",
        mem_fraction_static=0.5, cuda_graph_max_bs_decode=16, disable_prefill_cuda_graph=True, max_total_tokens=65536,
        max_running_requests=16, attention_backend="triton", skip_tokenizer_init=True, enable_metrics=True, skip_server_warmup=True)
    if a.mode != "ar":
        algo, _, budget = a.mode.partition("-")
        fields |= dict(speculative_algorithm=algo.upper(), speculative_draft_model_path=str(folder / "drafter"), speculative_draft_load_format="dummy")
        if budget: fields["speculative_num_draft_tokens"] = int(budget) + 1
    args = ServerArgs(**fields)
    print(args.device, args.attention_backend, args.disable_overlap_schedule, args.cuda_graph_config)
    args.override("benchmark", device=Device())
    from sglang.srt.distributed import parallel_state, bootstrap
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup
    attention_backend_setup.init_cublas = lambda *a: None
    bootstrap.get_default_distributed_backend = lambda d: "gloo"
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as dcgr
    dcgr.resolve_decode_backend = Emulated
    from types import SimpleNamespace
    import contextlib
    dcgr.graph_capture = lambda stream=None: contextlib.nullcontext(SimpleNamespace(stream=None))
    from sglang.srt.model_executor import forward_batch_info as fbi
    fbi.compute_position_triton = lambda a, b, n: fbi.compute_position_torch(a, b)
    from sglang.srt.runtime_context import publish
    publish(args, role="scheduler")
    ports = PortArgs.init_new(args)
    s = sch.Scheduler(args, ports, 0, 0, 0, 0, 0, 0, None)
    drive(s, ports, a)

main()
