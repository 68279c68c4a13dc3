"""For whom the routes of version labels are."""

from __future__ import annotations

from tests.support.keys import INFERENCE, MANAGEMENT
from tests.support.routes import Row

ROWS = (
    Row("GET", "/v1/models/{model}/labels", INFERENCE),
    Row("GET", "/v1/models/{model}/labels/{label}", INFERENCE, 404),
    Row("PUT", "/v1/models/{model}/labels/{label}", MANAGEMENT, 409, b'{"version": "9"}'),
    Row("DELETE", "/v1/models/{model}/labels/{label}", MANAGEMENT, 404),
)
