"""The messages of KEDA's external scaler (externalscaler.proto of KEDA 2), without generated code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

PACKAGE: Final = "externalscaler"
SERVICE: Final = f"{PACKAGE}.ExternalScaler"
FIELD: Final = descriptor_pb2.FieldDescriptorProto


class FieldSpec(NamedTuple):
    """A field of a message: its number, and its type or the name of its message."""

    number: int
    kind: int | str
    is_repeated: bool = False


MESSAGES: Final[Mapping[str, Mapping[str, FieldSpec]]] = {
    "MetadataEntry": {
        "key": FieldSpec(1, FIELD.TYPE_STRING),
        "value": FieldSpec(2, FIELD.TYPE_STRING),
    },
    "ScaledObjectRef": {
        "name": FieldSpec(1, FIELD.TYPE_STRING),
        "namespace": FieldSpec(2, FIELD.TYPE_STRING),
        # A map<string, string>, which is encoded as these entries.
        "scalerMetadata": FieldSpec(3, "MetadataEntry", is_repeated=True),
    },
    "IsActiveResponse": {"result": FieldSpec(1, FIELD.TYPE_BOOL)},
    "MetricSpec": {
        "metricName": FieldSpec(1, FIELD.TYPE_STRING),
        "targetSize": FieldSpec(2, FIELD.TYPE_INT64),
        "targetSizeFloat": FieldSpec(3, FIELD.TYPE_DOUBLE),
    },
    "GetMetricSpecResponse": {"metricSpecs": FieldSpec(1, "MetricSpec", is_repeated=True)},
    "GetMetricsRequest": {
        "scaledObjectRef": FieldSpec(1, "ScaledObjectRef"),
        "metricName": FieldSpec(2, FIELD.TYPE_STRING),
    },
    "MetricValue": {
        "metricName": FieldSpec(1, FIELD.TYPE_STRING),
        "metricValue": FieldSpec(2, FIELD.TYPE_INT64),
        "metricValueFloat": FieldSpec(3, FIELD.TYPE_DOUBLE),
    },
    "GetMetricsResponse": {"metricValues": FieldSpec(1, "MetricValue", is_repeated=True)},
}


def build_message_classes() -> dict[str, type[Message]]:
    file = descriptor_pb2.FileDescriptorProto(
        name="externalscaler.proto", package=PACKAGE, syntax="proto3"
    )
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, spec in fields.items():
            label = FIELD.LABEL_REPEATED if spec.is_repeated else FIELD.LABEL_OPTIONAL
            field = message.field.add(name=field_name, number=spec.number, label=label)
            if isinstance(spec.kind, str):
                field.type, field.type_name = FIELD.TYPE_MESSAGE, f".{PACKAGE}.{spec.kind}"
            else:
                field.type = spec.kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in MESSAGES
    }


CLASSES: Final = build_message_classes()


def encode_message(name: str, /, **fields: Any) -> bytes:
    raw: bytes = CLASSES[name](**fields).SerializeToString()
    return raw


def decode_message(name: str, raw: bytes) -> Any:
    """Raises `DecodeError` of protobuf for invalid bytes."""
    return CLASSES[name].FromString(raw)
