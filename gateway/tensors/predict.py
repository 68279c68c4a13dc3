"""The dialect of TensorFlow Serving's REST API, which KServe calls V1. Pure.

Rows: `{"instances": [value or {name: value}, …]}` → `{"predictions": […]}`, one value per instance.
Columns: `{"inputs": value or {name: value}}` → `{"outputs": …}`, with the batch dimension in each.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from gateway.errors import DoesNotFit, Malformed, ModelFault
from gateway.tensors.outputs import Rendered, Result, dump, value_of
from gateway.tensors.payload import JSON, Limits, Part, Payload, decoded, loads
from gateway.words import listed, quoted

KNOWN = {"instances", "inputs", "signature_name", "parameters", "id"}


def rows_or_columns(body: bytes, limits: Limits) -> tuple[list[Any] | None, Any]:
    """The instances, or None and the columns. Raises `Malformed`."""
    document = loads(body)
    if not isinstance(document, dict) or ("instances" in document) == ("inputs" in document):
        raise Malformed('the body must be an object with either "instances" or "inputs"')
    if unknown := document.keys() - KNOWN:
        raise Malformed(
            f"the body has the unknown key '{min(unknown)}'; known are {listed(sorted(KNOWN))}"
        )
    if "inputs" in document:
        return None, decoded(document["inputs"], limits.max_json_depth)
    instances = decoded(document["instances"], limits.max_json_depth)
    if not isinstance(instances, list) or not instances:
        raise Malformed('"instances" must be a list of at least one instance')
    return instances, None


def from_rows(instances: list[Any]) -> Payload:
    """Every input's values over the instances, as a batch. Raises `DoesNotFit`."""
    if dict not in map(type, instances):
        return Payload({"": [Part(instance, JSON) for instance in instances]}, stacked=True)
    rows = [instance if isinstance(instance, dict) else {"": instance} for instance in instances]
    names = rows[0].keys()
    different = next((row for row in rows if row.keys() != names), None)
    if different is not None:
        raise DoesNotFit(
            f"the instances name different inputs: {listed(names)} and {listed(different)}"
        )
    parts = {name: [Part(row[name], JSON) for row in rows] for name in names}
    return Payload(parts, stacked=True)


def from_row(row: Any) -> Payload:
    """One instance, for a model that has no batch dimension."""
    return from_columns(row)


def from_columns(columns: Any) -> Payload:
    values = columns if isinstance(columns, dict) else {"": columns}
    return Payload({name: [Part(value, JSON)] for name, value in values.items()})


def predictions(results: list[Result]) -> Rendered:
    """One value per instance; an object of the outputs where there are several."""
    rows: list[Any] = []
    for result in results:
        names = list(result.arrays)
        if not names:
            raise ModelFault("the model answered no output")
        columns = [column(result, name) for name in names]
        values = columns[0] if len(names) == 1 else map(partial(row_of, names), *columns)
        rows.extend(values)
    return dumped({"predictions": rows})


def column(result: Result, name: str) -> list[Any]:
    """The output's value for each instance of this answer."""
    value = as_list(value_of(result, name))
    if not result.signature.stackable:
        return [value]
    if isinstance(value, list) and len(value) == result.rows:
        return value
    count = f"{len(value)} values" if isinstance(value, list) else "a single value"
    raise ModelFault(
        f"the model answered {count} for {result.rows} instances in its output {quoted(name)}"
    )


def row_of(names: list[str], *values: Any) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


def outputs(result: Result) -> Rendered:
    values = {name: value_of(result, name) for name in result.arrays}
    return dumped({"outputs": next(iter(values.values())) if len(values) == 1 else values})


def as_list(value: Any) -> Any:
    return value if isinstance(value, list) or not hasattr(value, "tolist") else value.tolist()


def dumped(document: dict[str, Any]) -> Rendered:
    return Rendered(dump(document), JSON)
