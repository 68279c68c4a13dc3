"""The capabilities of this gateway, in the order in which they are opened.

A capability is deleted with its folder and its two lines here.
"""

from __future__ import annotations

from typing import Final

from gateway.capabilities.capability import Capability
from gateway.capabilities.grpc_api.capability import CAPABILITY as GRPC_API
from gateway.capabilities.identity.capability import CAPABILITY as IDENTITY
from gateway.capabilities.jobs.capability import CAPABILITY as JOBS
from gateway.capabilities.on_demand.capability import CAPABILITY as ON_DEMAND
from gateway.capabilities.openai.capability import CAPABILITY as OPENAI
from gateway.capabilities.page.capability import CAPABILITY as PAGE
from gateway.capabilities.samples.capability import CAPABILITY as SAMPLES
from gateway.capabilities.tf_serving.capability import CAPABILITY as TF_SERVING
from gateway.capabilities.torchserve.capability import CAPABILITY as TORCHSERVE
from gateway.capabilities.uploads.capability import CAPABILITY as UPLOADS
from gateway.capabilities.versions.capability import CAPABILITY as VERSIONS

INSTALLED: Final[tuple[Capability, ...]] = (
    IDENTITY,
    VERSIONS,
    ON_DEMAND,
    OPENAI,
    TF_SERVING,
    UPLOADS,
    TORCHSERVE,
    JOBS,  # it runs models, which the capabilities above make available
    PAGE,
    SAMPLES,
    GRPC_API,  # the last one to open, because its clients are served at once
)
SETTINGS: Final = tuple(each.settings for each in INSTALLED if each.settings is not None)
MODEL_KEYS: Final = {
    key: parse for capability in INSTALLED for key, parse in capability.model_keys.items()
}
RULE_PARSERS: Final = {
    name: parse for capability in INSTALLED for name, parse in capability.rule_parsers.items()
}
TABLES: Final = [capability.table for capability in INSTALLED if capability.table is not None]
