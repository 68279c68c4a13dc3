"""The messages of KEDA's external scaler (externalscaler.proto of KEDA 2), without generated code."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

PACKAGE: Final = "externalscaler"
SERVICE: Final = f"{PACKAGE}.ExternalScaler"
# A map<string, string> such as scalerMetadata is encoded as its entries.
DESCRIPTOR: Final = """
name: "externalscaler.proto" package: "externalscaler" syntax: "proto3"
message_type { name: "MetadataEntry"
  field { name: "key" number: 1 type: TYPE_STRING }
  field { name: "value" number: 2 type: TYPE_STRING } }
message_type { name: "ScaledObjectRef"
  field { name: "name" number: 1 type: TYPE_STRING }
  field { name: "namespace" number: 2 type: TYPE_STRING }
  field { name: "scalerMetadata" number: 3 label: LABEL_REPEATED type_name: "MetadataEntry" } }
message_type { name: "IsActiveResponse"
  field { name: "result" number: 1 type: TYPE_BOOL } }
message_type { name: "MetricSpec"
  field { name: "metricName" number: 1 type: TYPE_STRING }
  field { name: "targetSize" number: 2 type: TYPE_INT64 }
  field { name: "targetSizeFloat" number: 3 type: TYPE_DOUBLE } }
message_type { name: "GetMetricSpecResponse"
  field { name: "metricSpecs" number: 1 label: LABEL_REPEATED type_name: "MetricSpec" } }
message_type { name: "GetMetricsRequest"
  field { name: "scaledObjectRef" number: 1 type_name: "ScaledObjectRef" }
  field { name: "metricName" number: 2 type: TYPE_STRING } }
message_type { name: "MetricValue"
  field { name: "metricName" number: 1 type: TYPE_STRING }
  field { name: "metricValue" number: 2 type: TYPE_INT64 }
  field { name: "metricValueFloat" number: 3 type: TYPE_DOUBLE } }
message_type { name: "GetMetricsResponse"
  field { name: "metricValues" number: 1 label: LABEL_REPEATED type_name: "MetricValue" } }
"""
POOL: Final = descriptor_pool.DescriptorPool()
POOL.Add(text_format.Parse(DESCRIPTOR, descriptor_pb2.FileDescriptorProto()))
CLASSES: Final = {
    name: message_factory.GetMessageClass(descriptor)
    for name, descriptor in POOL.FindFileByName(
        "externalscaler.proto"
    ).message_types_by_name.items()
}


def encode_message(name: str, /, **fields: Any) -> bytes:
    raw: bytes = CLASSES[name](**fields).SerializeToString()
    return raw


def decode_message(name: str, raw: bytes) -> Any:
    """Raises `DecodeError` of protobuf for invalid bytes."""
    return CLASSES[name].FromString(raw)
