"""OpenAI's wire format: request models, jobs for replicas, SSE frames. See the modules for what each leaves out."""

from serve_app.protocol.body import parse_object
from serve_app.protocol.frames import DONE, Renderer, error_frames
from serve_app.protocol.jobs import Item, Job, Origin, chat_job, check_token_ids, completion_job, tokenize_request
from serve_app.protocol.resume import Progress, Work, merge, open_work
from serve_app.protocol.validation import validate
from serve_app.protocol.wire import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

__all__ = [
    "DONE",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Item",
    "Job",
    "Origin",
    "Progress",
    "Renderer",
    "TokenizeRequest",
    "Work",
    "chat_job",
    "check_token_ids",
    "completion_job",
    "error_frames",
    "merge",
    "open_work",
    "parse_object",
    "tokenize_request",
    "validate",
]
