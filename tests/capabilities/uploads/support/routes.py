"""For whom the routes of uploads are."""

from __future__ import annotations

from tests.support.keys import MANAGEMENT
from tests.support.routes import Row

ROWS = (
    Row("PUT", "/v1/models/{model}", MANAGEMENT, 501),
    Row("PUT", "/v1/models/{model}/versions/{version}", MANAGEMENT, 501),
    Row("DELETE", "/v1/models/{model}", MANAGEMENT, 501),
    Row("DELETE", "/v1/models/{model}/versions/{version}", MANAGEMENT, 501),
    Row("GET", "/v1/models/{model}/files", MANAGEMENT, 501),
    Row("GET", "/v1/models/{model}/versions/{version}/files", MANAGEMENT, 501),
    Row("GET", "/v1/models/{model}/files/{path:path}", MANAGEMENT, 501),
)
