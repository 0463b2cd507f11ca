"""Every error that the proxy itself makes, as one tree.

FleetgateError
├── ClientFault            the request was wrong; sending it again as it is cannot help
│   ├── BadRequest             400  framing, header or target that the proxy refuses
│   ├── PathRefused            400  a control path in disguise
│   ├── Unauthorized           401  control credential missing or wrong
│   ├── Forbidden              403  switched off by configuration
│   ├── NotFound               404  no such engine or fleet resource
│   ├── MethodNotAllowed       405
│   ├── RequestAborted         409  /abort_requests named it while it was held
│   ├── SlowClient             408  the request did not arrive in time
│   ├── BodyTooLarge           413
│   ├── TargetTooLong          414
│   ├── ExpectationFailed      417
│   ├── HeadersTooLarge        431
│   ├── NotImplementedCoding   501  a transfer coding other than chunked
│   ├── VersionNotSupported    505
│   └── LoopDetected           508
├── Busy                   the fleet cannot take it now; the same request may be sent again later
│   ├── HoldTimeout            503  held longer than the limit
│   ├── HoldQueueFull          503  no place left to hold it
│   ├── Overloaded             503  every engine refused for load, the retry budget is spent
│   ├── NoEngine               503  no engine lives that could take a request that is not held
│   ├── EngineRemoved          503  its engine left the fleet before the answer was whole
│   ├── TooManyConnections     503
│   └── ShuttingDown           503
├── EngineFault            an engine failed and the request could not be saved by another try
│   ├── EngineUnreachable      502  no engine accepted a connection
│   ├── EngineBroken           502  an engine broke off or answered what cannot be passed on
│   └── EngineTimeout          504
└── ControlFault           a control call; never 500, 502, 503 or 504, because trainers re-send those
    ├── Conflict               409  not now: another life-cycle call, a lost group member, a sleeping engine
    └── PartialFailure         424  some engines did it and some did not

Each leaf carries the HTTP status, a stable code (``X-Fleetgate-Error``), whose fault it is and whether the same
request may be sent again. Foreign exceptions become one of these at one seam (`proxy.data.upstream`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar

import orjson


class Source(StrEnum):
    """Whose fault an error is."""

    CLIENT = "client"
    ENGINE = "engine"
    PROXY = "proxy"


class FleetgateError(Exception):
    """Base of all errors that become an answer.

    Attributes:
        status: HTTP status of the answer.
        code: stable machine-readable name; clients and alerts rely on it.
        source: whose fault it is.
        kind: the ``type`` of the OpenAI error object.
        may_retry: whether the same request may succeed later.
        retry_after: seconds for the ``Retry-After`` field, or None for no field.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    source: ClassVar[Source] = Source.PROXY
    kind: ClassVar[str] = "InternalServerError"
    may_retry: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after: int | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after
        self.param = param

    def body(self) -> bytes:
        """The OpenAI error object, as compact JSON."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return orjson.dumps({"error": error})

    def headers(self) -> list[tuple[str, str]]:
        """Header fields that the answer carries besides the framing."""
        fields = [("Content-Type", "application/json"), ("X-Fleetgate-Error", self.code)]
        if self.retry_after is not None:
            fields.append(("Retry-After", str(self.retry_after)))
        if not self.may_retry:
            fields.append(("x-should-retry", "false"))
        return fields


class ClientFault(FleetgateError):
    """The request was wrong."""

    status = 400
    code = "bad_request"
    source = Source.CLIENT
    kind = "BadRequestError"


class BadRequest(ClientFault):
    """Framing, header or target that the proxy refuses (RFC 9112)."""


class PathRefused(ClientFault):
    """A path that an engine would read as a control path although it is not spelled like one."""

    code = "path_refused"


class Unauthorized(ClientFault):
    """The control credential is missing or wrong."""

    status = 401
    code = "unauthorized"
    kind = "AuthenticationError"

    def headers(self) -> list[tuple[str, str]]:
        """RFC 9110 section 11.6.1 requires the challenge."""
        return [*super().headers(), ("WWW-Authenticate", 'Bearer realm="fleetgate control"')]


class Forbidden(ClientFault):
    """Switched off by configuration."""

    status = 403
    code = "forbidden"
    kind = "PermissionDeniedError"


class NotFound(ClientFault):
    """No such engine or fleet resource."""

    status = 404
    code = "not_found"
    kind = "NotFoundError"


class MethodNotAllowed(ClientFault):
    """The path exists, the method does not."""

    status = 405
    code = "method_not_allowed"


class RequestAborted(ClientFault):
    """``/abort_requests`` named the request while it was held."""

    status = 409
    code = "request_aborted"


class SlowClient(ClientFault):
    """The request did not arrive in time (RFC 9110 section 15.5.9)."""

    status = 408
    code = "request_timeout"
    may_retry = True


class BodyTooLarge(ClientFault):
    """The body is larger than the limit."""

    status = 413
    code = "body_too_large"


class TargetTooLong(ClientFault):
    """The request line is longer than the limit."""

    status = 414
    code = "target_too_long"


class ExpectationFailed(ClientFault):
    """An ``Expect`` other than ``100-continue`` (RFC 9110 section 10.1.1)."""

    status = 417
    code = "expectation_failed"


class HeadersTooLarge(ClientFault):
    """A header line or the number of fields is over the limit (RFC 6585 section 5)."""

    status = 431
    code = "headers_too_large"


class NotImplementedCoding(ClientFault):
    """A transfer coding other than chunked (RFC 9112 section 6.1)."""

    status = 501
    code = "transfer_coding"


class VersionNotSupported(ClientFault):
    """Not HTTP/1.0 or HTTP/1.1."""

    status = 505
    code = "http_version"


class LoopDetected(ClientFault):
    """The request came from this very proxy (RFC 9110 section 7.6.3, RFC 5842 section 7.2)."""

    status = 508
    code = "loop_detected"


class Busy(FleetgateError):
    """The fleet cannot take the request now."""

    status = 503
    code = "busy"
    kind = "ServiceUnavailableError"
    may_retry = True


class HoldTimeout(Busy):
    """Held longer than the limit."""

    code = "hold_timeout"


class HoldQueueFull(Busy):
    """No place left to hold the request, by count or by bytes."""

    code = "hold_queue_full"


class Overloaded(Busy):
    """Every engine refused for load, or the retry budget is spent."""

    code = "overloaded"


class NoEngine(Busy):
    """No engine lives that could take a request that is not held."""

    code = "no_engine"


class EngineRemoved(Busy):
    """The engine was removed from the fleet before its answer was whole."""

    code = "engine_removed"


class TooManyConnections(Busy):
    """More client connections than the limit."""

    code = "too_many_connections"


class ShuttingDown(Busy):
    """The proxy stops: it takes no new requests, and the time that running ones get is over."""

    code = "shutting_down"


class EngineFault(FleetgateError):
    """An engine failed and no other try could save the request."""

    status = 502
    code = "engine_error"
    source = Source.ENGINE
    kind = "BadGatewayError"
    may_retry = True


class EngineUnreachable(EngineFault):
    """No engine accepted a connection."""

    code = "engine_unreachable"


class EngineBroken(EngineFault):
    """An engine broke off its answer, or answered what cannot be passed on."""

    code = "engine_broken"


class EngineTimeout(EngineFault):
    """An engine did not answer within the limit."""

    status = 504
    code = "engine_timeout"
    kind = "GatewayTimeoutError"


class ControlFault(FleetgateError):
    """A control call that did not happen as a whole."""

    status = 409
    code = "control_error"
    kind = "ConflictError"


class Conflict(ControlFault):
    """Not now; nothing was sent to any engine."""

    code = "conflict"


class PartialFailure(ControlFault):
    """Some engines did it and some did not; ``engines`` is the report of each leg."""

    status = 424
    code = "partial_failure"
    source = Source.ENGINE
    kind = "PartialFailureError"

    def __init__(self, message: str, *, engines: dict[str, Any]) -> None:
        super().__init__(message)
        self.engines = engines

    def body(self) -> bytes:
        """The OpenAI error object with the report beside it."""
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.code}
        return orjson.dumps({"error": error, "message": self.message, "engines": self.engines})
