"""Entry point of group `sglang.srt.plugins`: registers the algorithm and the hooks, and can tell whether they took.

SGLang logs a plugin's failure and goes on without it, in which case DDTREE would be unknown or, worse, half there.
`assert_installed` turns that into an error; the worker calls it in the scheduler, and an engine should call it too.

What this module does not do: import torch, prometheus_client or SGLang's runtime before SGLang calls `register`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

ALGORITHM = "DDTREE"
# The hooks reach into internals, so the release is pinned exactly; newer ones need a reading first.
SUPPORTED = ("0.5.17",)


class PluginError(RuntimeError):
    """DDTREE is not, or not wholly, in place in this process."""


def check_version() -> None:
    """Raises PluginError unless the installed SGLang is one this plugin was written against."""
    try:
        installed = version("sglang")
    except PackageNotFoundError as error:
        raise PluginError("sglang is not installed") from error
    if installed not in SUPPORTED:
        raise PluginError(f"this package supports sglang {', '.join(SUPPORTED)}, not {installed}")


def register() -> None:
    """Called by SGLang's plugin loader, once per process and before any server argument is resolved."""
    check_version()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from serve_app.sglang_plugin.algo import DDTreeAlgo, worker_class
    from serve_app.sglang_plugin.args import validate_server_args
    from serve_app.sglang_plugin.hooks import HOOKS

    SpeculativeAlgorithm.register(
        ALGORITHM, supports_overlap=True, validate_server_args=validate_server_args, spec_class=DDTreeAlgo
    )(worker_class)
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])


def assert_installed() -> None:
    """Raises PluginError, naming what is missing, unless the algorithm and every hook are in effect in this process."""
    check_version()
    import pkgutil

    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.speculative.spec_registry import get_spec

    from serve_app.sglang_plugin.algo import DDTreeAlgo
    from serve_app.sglang_plugin.hooks import HOOKS

    missing = []
    if not isinstance(get_spec(ALGORITHM), DDTreeAlgo):
        missing.append(f"algorithm {ALGORITHM}")
    for hook in HOOKS:
        owner, name = hook.target.rsplit(".", 1)
        registered = any(function is hook.function for _, function, _ in HookRegistry._hooks.get(hook.target, ()))
        wrapped = hasattr(getattr(pkgutil.resolve_name(owner), name, None), "__wrapped__")
        if not (registered and wrapped and hook.target in HookRegistry._patched):
            missing.append(f"hook on {hook.target}")
    if missing:
        raise PluginError("the DDTREE plugin did not take effect: " + "; ".join(missing))
