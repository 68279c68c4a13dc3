"""Lists of models and replicas on standard output."""

from __future__ import annotations

from gateway.client import tables
from gateway.client.api import ApiClient
from gateway.client.target import Target


def print_resource_list(resource: str, target: Target, *, json: bool) -> None:
    with ApiClient(target) as api:
        entries = api.get(f"/v1/{resource}")[resource]
    if json:
        tables.print_json(entries)
    else:
        columns, format_row = tables.RESOURCE_TABLES[resource]
        tables.print_table(columns, map(format_row, entries))
