"""The web page at `/`."""

from __future__ import annotations

from pydantic import HttpUrl

from gateway.capability import Attachment, Capability, LaunchPlan
from gateway.settings import CapabilitySettings, Settings


class PageSettings(CapabilitySettings):
    page: bool = True
    """Whether / serves browsers a page with the fleet, a form for every model and live metrics."""
    documentation_url: HttpUrl | None = None
    """Address of these documents, to which the page links. Empty: no link."""


def attach_page(settings: Settings) -> Attachment | None:
    page = settings.read(PageSettings)
    if not page.page:
        return None
    from gateway.access.auth import PathRules
    from gateway.capabilities.page.routes import PageRoutes

    routes = PageRoutes(page.documentation_url)
    return Attachment((routes.router,), paths=PathRules(public_prefixes=("/static/",)))


def announce_page(plan: LaunchPlan) -> None:
    plan.has_page = plan.settings.read(PageSettings).page


CAPABILITY = Capability("page", attach_page, settings=PageSettings, prepare_launch=announce_page)
