"""The web page at `/`."""

from __future__ import annotations

from gateway.capability import Attachment, Capability, LaunchPlan
from gateway.settings import CapabilitySettings, Settings


class PageSettings(CapabilitySettings):
    page: bool = True
    """Whether / serves browsers a page with the fleet, a form for every model and live metrics."""


def attach_page(settings: Settings) -> Attachment | None:
    if not settings.read(PageSettings).page:
        return None
    from gateway.access.auth import PathRules
    from gateway.capabilities.page.routes import router

    return Attachment((router,), paths=PathRules(public_prefixes=("/static/",)))


def announce_page(plan: LaunchPlan) -> None:
    plan.has_page = plan.settings.read(PageSettings).page


CAPABILITY = Capability("page", attach_page, settings=PageSettings, prepare_launch=announce_page)
