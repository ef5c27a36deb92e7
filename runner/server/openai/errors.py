"""Errors as OpenAI's clients expect them: an HTTP status and an error object."""

from pydantic import with_config
from typing_extensions import TypedDict

from exeplan.errors import InputError


@with_config(extra="forbid")
class Error(TypedDict):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """The body of every answer with a status of 400 or above, apart from the probes'."""

    error: Error


class RequestError(InputError):
    """A request that is answered with an error: HTTP status, and the fields of OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def body(self) -> ErrorBody:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def unknown_model(name: str | None, served: str) -> RequestError:
    """404, for every name but that of the served model."""
    message = f"no model '{name:.80}'; this server has '{served}'"
    return RequestError(message, status=404, param="model", code="model_not_found")
