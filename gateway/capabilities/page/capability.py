"""The web page at `/`."""

from __future__ import annotations

from gateway.capabilities.capability import Attachment, Capability, LaunchPlan
from gateway.config.settings import CapabilitySettings, Settings


class PageSettings(CapabilitySettings):
    page: bool = True
    """Whether / serves browsers a page with the fleet, a form for every model and live metrics."""


def attach_page(settings: Settings) -> Attachment | None:
    if not settings.read(PageSettings).page:
        return None
    from gateway.access.auth import PathRules
    from gateway.capabilities.page.routes import PageRoutes

    paths = PathRules(public=frozenset(("/guide",)), public_prefixes=("/static/", "/guide/"))
    return Attachment(PageRoutes().routers, paths=paths)


def announce_page(plan: LaunchPlan) -> None:
    plan.has_page = plan.settings.read(PageSettings).page


CAPABILITY = Capability("page", attach_page, settings=PageSettings, prepare_launch=announce_page)
