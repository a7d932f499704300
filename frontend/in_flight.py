"""What one engine was asked and has not finished: whose stream its outputs go to, what it must be told of it."""

from __future__ import annotations

from ipc.codec import WireError, encode
from ipc.messages import AbortRequests, AddRequest
from ipc.sequence import UNCOUNTED
from ipc.vocabulary import EngineRequest, RequestError, RequestOutput, WantedFeature

from .engine_errors import RequestRefusedError
from .engine_session import EngineSession
from .feature_supply import FeatureSource, FeatureSupply
from .request_stream import RequestStream


class RequestsInFlight:
    """Requests submitted and neither finished, failed nor aborted. All are of one session, and end with it."""

    def __init__(self, index: int) -> None:
        """`index` is the engine's."""
        self.index = index
        self.supply = FeatureSupply()
        self._session: EngineSession | None = None
        self._streams: dict[str, RequestStream] = {}
        self._unsent_aborts: list[str] = []
        self._unsent_continuation_aborts: list[tuple[str, int]] = []

    def __len__(self) -> int:
        return len(self._streams)

    def submit(self, session: EngineSession, request: EngineRequest, features: FeatureSource | None) -> RequestStream:
        """See `EngineClient.submit`. Raises RequestRefusedError."""
        request_id = request.request_id
        if request_id in self._streams:
            message = "request_id: a request with this id is in flight already"
            raise RequestRefusedError(RequestError("invalid", message, "request_id"))
        try:
            sent = session.send(AddRequest(request))
        except WireError as error:
            raise RequestRefusedError(why_unsendable(request, error)) from error
        if not sent:
            raise RequestRefusedError(RequestError("overloaded", "the engine does not keep up with taking requests"))
        self._session = session
        if features is not None:
            self.supply.promise(request_id, features)
        stream = self._streams[request_id] = RequestStream(self, request_id, request.sampling_params.n)
        return stream

    def deliver(self, output: RequestOutput) -> None:
        """Hand `output` to its stream."""
        # Outputs of a request that was aborted meanwhile are expected and of no use.
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if output.ends_request:
            self._remove(output.request_id)
        stream.deliver(output)

    def answer(self, wanted: WantedFeature) -> None:
        """Send the engine what it wants, when it is there."""
        # As with outputs, the request may be over.
        if wanted.request_id in self._streams and self._session is not None:
            self.supply.answer(self._session, wanted)

    def forget(self, stream: RequestStream) -> None:
        """See `StreamOwner`."""
        if self._streams.get(stream.request_id) is not stream:
            return
        self._remove(stream.request_id)
        self._unsent_aborts.append(stream.request_id)
        self.send_aborts()

    def abort_continuation(self, request_id: str, index: int) -> None:
        """See `StreamOwner`."""
        if request_id in self._streams:
            self._unsent_continuation_aborts.append((request_id, index))
            self.send_aborts()

    def send_aborts(self) -> None:
        """An abort that found the queue full waits for the next call: losing it would cost compute."""
        if self._session is None or not (self._unsent_aborts or self._unsent_continuation_aborts):
            return
        if self._session.send(AbortRequests(self._unsent_aborts, self._unsent_continuation_aborts)):
            self._unsent_aborts, self._unsent_continuation_aborts = [], []

    def fail_all(self, error: Exception) -> None:
        """The session is over."""
        self._session = None
        self._unsent_aborts, self._unsent_continuation_aborts = [], []
        self.supply.forget_all()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)

    def _remove(self, request_id: str) -> None:
        del self._streams[request_id]
        self.supply.forget(request_id)


def why_unsendable(request: EngineRequest, error: WireError) -> RequestError:
    """Names the first field that cannot be sent even by itself; none if only all together are too large."""
    for name in request.__struct_fields__:
        try:
            encode(getattr(request, name), 0, UNCOUNTED)
        except WireError as field_error:
            return RequestError("invalid", f"{name}: cannot be sent: {field_error}", name)
    return RequestError("invalid", f"the request cannot be sent: {error}")
