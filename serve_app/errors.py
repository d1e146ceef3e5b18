"""Every failure a client can see, as one tree.

Each class fixes the HTTP status, the OpenAI `type` and `code`, and whether the official client may retry
(sent as `x-should-retry`; without that header it retries 408, 409, 429 and every 5xx twice, which for a
generation that already ran means paying for it three times).

This module does not know HTTP frameworks, Ray or engines.
"""

from __future__ import annotations

from typing import Any


class ServeError(Exception):
    """Base of everything raised on purpose in this package.

    Args:
        message: one sentence for the person who sent the request; of their input, at most a model's name or a path.
        param: the request field at fault, in OpenAI's dotted form (`messages[0].role`), or None.
        code: overrides the class's `code`.
        retry_after: seconds after which a retry makes sense (sent as `Retry-After`).
    """

    status: int = 500
    type: str = "server_error"
    code: str | None = "internal_error"
    retryable: bool = False

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else type(self).code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The OpenAI envelope: `{"error": {message, type, param, code}}`."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Headers that tell the official client whether to try again, and when."""
        headers = {"x-should-retry": "true" if self.retryable else "false"}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after)))
        return headers

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross process borders; the default would call __init__ without the keywords.
        return _rebuild, (type(self), self.message, self.param, self.code, self.retry_after)


def _rebuild(
    cls: type[ServeError], message: str, param: str | None, code: str | None, retry_after: float | None
) -> ServeError:
    return cls(message, param=param, code=code, retry_after=retry_after)


class InvalidRequest(ServeError):
    """The request can never succeed as it is."""

    status, type = 400, "invalid_request_error"
    code: str | None = None


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus requested tokens do not fit the model's context."""

    code = "context_length_exceeded"


class Unsupported(InvalidRequest):
    """A field of the OpenAI API that this deployment does not offer; refused rather than ignored."""

    code = "unsupported_parameter"


class AuthenticationFailed(ServeError):
    status, type, code = 401, "authentication_error", "invalid_api_key"


class ModelNotFound(ServeError):
    status, type, code = 404, "invalid_request_error", "model_not_found"


class RouteNotFound(ServeError):
    status, type, code = 404, "invalid_request_error", "not_found"


class MethodNotAllowed(ServeError):
    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class BodyTooLarge(ServeError):
    status, type, code = 413, "invalid_request_error", "request_too_large"


class UnsupportedMediaType(ServeError):
    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class RateLimited(ServeError):
    status, type, code, retryable = 429, "rate_limit_error", "rate_limit_exceeded", True


class Overloaded(ServeError):
    """Queues are full; the request was never started, so a retry costs nothing twice."""

    status, type, code, retryable = 503, "server_error", "overloaded", True


class NotReady(ServeError):
    """No replica can generate now."""

    status, type, code, retryable = 503, "server_error", "not_ready", True


class NoReplicas(NotReady):
    """There is no replica and Serve starts none: its constructor failed too often, or the application goes."""


class ReplicaLost(NotReady):
    """The replica that worked on the request, or its engine, is gone; nothing more of the answer comes from there."""

    code = "replica_lost"


class EngineGone(NotReady):
    """This replica's engine has died or was stopped, and took nothing of the request: another replica may take it."""


class EngineFailed(ServeError):
    """The engine raised or died while it worked on this request."""

    status, type, code = 500, "server_error", "engine_error"


class DeadlineExceeded(ServeError):
    """The request ran out of its own time; the work was started, so the client must not repeat it blindly."""

    status, type, code = 504, "server_error", "deadline_exceeded"


class Aborted(ServeError):
    """The request was aborted on purpose (client gone, drain)."""

    status, type, code = 499, "server_error", "aborted"


class ConfigError(ServeError):
    """Configuration that cannot be used; `param` is the dotted path of the key."""

    code = "invalid_config"


class ModelFetchError(ServeError):
    """A model could not be fetched, converted or loaded; nothing half-written is left behind."""

    code = "model_fetch_failed"
