"""The web page at `/`."""

from __future__ import annotations

from gateway.capability import Attachment, Capability
from gateway.settings import Settings


def attach_page(settings: Settings) -> Attachment | None:
    if not settings.page:
        return None
    from gateway.capabilities.page.routes import router

    return Attachment((router,))


CAPABILITY = Capability("page", attach_page)
