"""TensorFlow Serving's REST API, which KServe calls V1: `:predict`, and the signature of a model."""

from __future__ import annotations

from gateway.capabilities.capability import Attachment, Capability
from gateway.config.settings import Settings


def attach_tf_serving(settings: Settings) -> Attachment:
    from gateway.capabilities.tf_serving.routes import StatusDescriber, inference_router, router

    return Attachment((inference_router, router), describer=StatusDescriber())


CAPABILITY = Capability("tf_serving", attach_tf_serving)
