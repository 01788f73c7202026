"""The event loop of the load path: uvloop where it exists (half the cost per read), else asyncio's own. Floor 3."""

import asyncio


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A fresh loop, not yet set as current."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
