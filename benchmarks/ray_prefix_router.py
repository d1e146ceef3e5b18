"""Ray's own PrefixCacheAffinityRouter in front of this product's replicas, for `served_routing`.

The public name, ray.serve.llm.request_router, cannot be imported with `ray[serve]` alone: its package loads the LLM
configuration, which wants pyarrow. The class below it, of which the public one is an empty subclass, can.

What this module does not do: decide anything; it only shows Ray's class the text of a job.
"""

from __future__ import annotations

from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter

from serve_app.protocol import Job


class JobPrefixRouter(PrefixCacheAffinityRouter):
    def _extract_text_from_request(self, pending_request: Any) -> Any:
        """The text of a job's first prompt, as Ray's class would put it together; None for calls that are no jobs,
        which it then sends as power of two choices does."""
        job = next((arg for arg in pending_request.args if isinstance(arg, Job)), None)
        if job is None:
            return None
        request = job.requests[0]
        return self._normalize_prompt_to_string(list(request.messages) if request.messages else request.prompt)
