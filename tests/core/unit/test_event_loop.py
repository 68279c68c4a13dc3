"""The event loop of the server."""

from __future__ import annotations

import asyncio
import gc

import pytest

from gateway.server.http import Loop


def test_lookup_of_a_connection_that_was_given_up_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = Loop()
    try:
        loop.run_until_complete(give_up_a_connection())
        gc.collect()
        assert not caplog.records
        loop.run_until_complete(forget_a_failure())
        gc.collect()
        assert "exception was never retrieved" in caplog.text
    finally:
        loop.close()


async def give_up_a_connection() -> None:
    """Return when the lookup has failed."""
    loop = asyncio.get_running_loop()
    name = "no-such-host.invalid"
    connecting = asyncio.create_task(loop.create_connection(asyncio.Protocol, name, 80))
    await asyncio.sleep(0)
    lookups = [
        each
        for each in gc.get_objects()
        if type(each) is asyncio.Future and each.get_loop() is loop
    ]
    connecting.cancel()
    await asyncio.wait([connecting])
    await asyncio.wait(lookups)


async def forget_a_failure() -> None:
    asyncio.get_running_loop().create_future().set_exception(OSError("a failure"))
