"""An event loop in a thread, for the iterators of the synchronous client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import Any, Protocol, TypeVar

from anyio.from_thread import start_blocking_portal

from gateway.client.async_client import AsyncClient

T_co = TypeVar("T_co", covariant=True)


class ClosableIterator(Protocol[T_co]):
    def __anext__(self) -> Awaitable[T_co]: ...

    def aclose(self) -> Awaitable[None]: ...


def iterate_async(
    client_options: Mapping[str, Any], start: Callable[[AsyncClient], ClosableIterator[T_co]]
) -> Generator[T_co, None, None]:
    """Yield what an iterator of a client yields. Ending the iteration closes it and ends the thread."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(AsyncClient(**client_options)) as client,
    ):
        items = start(client)
        try:
            while True:
                try:
                    item = portal.call(items.__anext__)
                except StopAsyncIteration:
                    return
                yield item
        finally:
            portal.call(items.aclose)
