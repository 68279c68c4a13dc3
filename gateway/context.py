"""What belongs to the request that is being served, for those who are not handed it: the log."""

from __future__ import annotations

from contextvars import ContextVar

current_request_id: ContextVar[str] = ContextVar("request_id", default="")
