"""The one tree of errors that users and processes can meet.

    ServeError
    |-- RequestError             the caller's fault                              (HTTP 400)
    |   |-- InvalidRequest       a field has a value that cannot be served       (HTTP 400)
    |   |-- ContextTooLong       prompt and answer do not fit the model          (HTTP 400)
    |   `-- ModelNotFound        no worker serves the named model                (HTTP 404)
    |-- OverloadedError          nothing is wrong but room                       (HTTP 503)
    |   |-- NoCapacity           no worker can take the request now              (HTTP 429)
    |   `-- DeadlineExceeded     the request's time ran out                      (HTTP 504)
    |-- TransferError            KV did not arrive: recompute, never guess
    |   |-- LayoutMismatch       no plan leads from one layout to the other
    |   |-- PeerLost             the other end of a data connection is gone
    |   |-- ChecksumMismatch     bytes arrived, but not those that were sent
    |   `-- TransferTimeout      the lease of a session ran out
    |-- WorkerLostError          the worker that held the request is gone: route again (HTTP 503)
    |-- EngineDeadError          the engine process is gone: restart the worker  (HTTP 503)
    |-- ProtocolMismatch         a peer speaks a version too far from ours       (HTTP 503)
    |-- ConfigError              a flag, variable or file has a bad value: refuse to start
    `-- ModelLoadError           a model cannot be loaded: refuse to start, say why in one sentence

Mapped once to HTTP (services/gateway/http_errors.py) and once to gRPC (services/rpc/status.py).
Asserts are for our own mistakes and are not part of this tree.
"""


class ServeError(Exception):
    """Root of every error that leaves a package."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(ServeError):
    """The request can never succeed as it stands.

    param: the request field at fault, as the client spells it, or None when no one field is.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A field has a value that cannot be served; the message names field, value and limit."""


class ContextTooLong(RequestError):
    """Prompt plus requested output exceed the model's maximum length."""


class ModelNotFound(RequestError):
    """No live worker serves the model that the request names."""


class OverloadedError(ServeError):
    """The request is fine, the cluster has no room or no time for it."""


class NoCapacity(OverloadedError):
    """No worker can take the request now."""


class DeadlineExceeded(OverloadedError):
    """The request's remaining time reached zero."""


class TransferError(ServeError):
    """KV did not arrive whole. The receiver recomputes; it never decodes from what it has."""


class LayoutMismatch(TransferError):
    """No transfer plan exists between two layouts or identities; the message names both values."""


class PeerLost(TransferError):
    """The other end of a data connection is gone."""


class ChecksumMismatch(TransferError):
    """The bytes of a run do not have the checksum that their sender announced."""


class TransferTimeout(TransferError):
    """A session's lease ran out before it was complete."""


class WorkerLostError(ServeError):
    """The worker that owned a request is gone; the request can be routed again."""


class EngineDeadError(ServeError):
    """The engine process of a worker is gone; the worker must be restarted."""


class ProtocolMismatch(ServeError):
    """Another process speaks a version too far from ours; the message names both versions."""


class ConfigError(ServeError):
    """A flag, environment variable or file holds a value that cannot be used."""


class ModelLoadError(ServeError):
    """A model file or folder cannot be loaded; the message is one sentence that says why."""
