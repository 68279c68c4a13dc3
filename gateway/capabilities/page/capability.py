"""The web page at `/`."""

from __future__ import annotations

from pydantic import HttpUrl

from gateway.capabilities.capability import Attachment, Capability, LaunchPlan
from gateway.config.settings import CapabilitySettings, Settings


class PageSettings(CapabilitySettings):
    page: bool = True
    """Whether / serves browsers a page with the fleet, a form for every model and live metrics."""
    documentation_url: HttpUrl | None = None
    """Address of the documents to which the page links, in place of its own at /guide/."""


def attach_page(settings: Settings) -> Attachment | None:
    page = settings.read(PageSettings)
    if not page.page:
        return None
    from gateway.access.auth import PathRules
    from gateway.capabilities.page.routes import PageRoutes

    paths = PathRules(public=frozenset(("/guide",)), public_prefixes=("/static/", "/guide/"))
    return Attachment(PageRoutes(page.documentation_url).routers, paths=paths)


def announce_page(plan: LaunchPlan) -> None:
    plan.has_page = plan.settings.read(PageSettings).page


CAPABILITY = Capability("page", attach_page, settings=PageSettings, prepare_launch=announce_page)
