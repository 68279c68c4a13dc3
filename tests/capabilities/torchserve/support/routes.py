"""For whom the routes of TorchServe's API are."""

from __future__ import annotations

from tests.support.keys import FREE
from tests.support.routes import Row

ROWS = (
    Row("GET", "/ping", FREE, 404),  # unless the settings ask for the API
)
