"""The settings of models that are loaded on demand, and requests that wait for a replica."""

from __future__ import annotations

from pydantic import Field

from gateway.settings import CapabilitySettings
from gateway.settings.values import CommaSeparated, NonNegativeSeconds


class OnDemandSettings(CapabilitySettings):
    on_demand_models: CommaSeparated = ()
    """Comma-separated glob patterns, such as ocr-*, of models that are loaded when they are first requested;
    * stands for every model of the repository that is not in the models file. A model of the models file is
    loaded on demand with on_demand: true."""
    max_loaded_models: int = Field(0, ge=0)
    """Maximum number of models that each replica holds. For another one, the least recently used on-demand
    model is unloaded; 0 means no limit."""
    model_memory_mb: int = Field(0, ge=0)
    """Memory in MiB that the models of each replica may use, by their config parameter gateway.memory_mb; 0
    means no limit."""
    default_model_memory_mb: int = Field(0, ge=0)
    """Memory in MiB of a model without gateway.memory_mb in its config."""
    eviction_protection_s: NonNegativeSeconds = 10.0
    """Time after a use during which an on-demand model is not unloaded to make room for a model of another
    caller: another key, or without keys another client address. 0: not protected."""
    idle_unload_s: NonNegativeSeconds = 0.0
    """Time after which an on-demand model without requests is unloaded; 0 means never."""
    hold_s: NonNegativeSeconds = 0.0
    """Time that inference requests wait while no replica is up, and then until its declared models are
    loaded, at most until their own deadline. /readyz is 200 meanwhile. 0: they are rejected at once."""
    scaler_port: int = Field(0, ge=0, le=65535)
    """Port of an external scaler for KEDA (gRPC, externalscaler.ExternalScaler), on all addresses: it reports
    whether requests run or wait, and how many. 0: none. It requires a single worker."""

    @property
    def is_used(self) -> bool:
        """Return whether requests may wait, or are counted for the scaler, without a models file."""
        return bool(self.on_demand_models or self.hold_s or self.scaler_port)
