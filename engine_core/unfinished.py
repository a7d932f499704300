"""The unfinished requests of an engine, each found by its own id, and together with its siblings by its caller's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .request import Request


class UnfinishedRequests(Mapping[str, Request]):
    """By `Request.request_id`, in the order in which they came. Every operation is O(siblings)."""

    def __init__(self) -> None:
        self._by_id: dict[str, Request] = {}
        # Of requests with several continuations: caller's id → those unfinished, in order.
        self._families: dict[str, list[Request]] = {}

    def __getitem__(self, request_id: str) -> Request:
        return self._by_id[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def as_they_are_now(self) -> list[Request]:
        """A copy. Any thread may ask: none can interrupt it."""
        return list(self._by_id.values())

    def add(self, request: Request) -> None:
        self._by_id[request.request_id] = request
        if request.sampling_params.n > 1:
            self._families.setdefault(request.output_id, []).append(request)

    def remove(self, request: Request) -> None:
        """It is over."""
        del self._by_id[request.request_id]
        if (family := self._families.get(request.output_id)) is not None:
            family.remove(request)
            if not family:
                del self._families[request.output_id]

    def continuations(self, output_id: str) -> Sequence[Request]:
        """Of a caller's request those that are unfinished, in order, as they are now; none if it is over or unknown."""
        if (family := self._families.get(output_id)) is not None:
            return tuple(family)
        request = self._by_id.get(output_id)
        return () if request is None else (request,)
