"""Refused requests, in the form of OpenAI's API."""

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

TYPES = {401: "authentication_error", 429: "rate_limit_error"}
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}


class Refused(HTTPException):
    """A refused request, because of the field `param`."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(status, message, HEADERS.get(status))
        self.param, self.code = param, code

    def response(self) -> JSONResponse:
        """Return the answer to the request."""
        kind = TYPES.get(self.status_code, "invalid_request_error")
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return JSONResponse({"error": error}, self.status_code, self.headers)
