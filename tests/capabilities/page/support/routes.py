"""For whom the routes of the page are."""

from __future__ import annotations

from tests.support.keys import FREE
from tests.support.routes import Row

ROWS = (
    Row("GET", "/static/{name:path}", FREE),
    Row("GET", "/guide", FREE, status=307),
    Row("GET", "/guide/{name:path}", FREE),
)
