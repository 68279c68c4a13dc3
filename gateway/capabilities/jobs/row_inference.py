"""Inferences of the rows of a batch: no more at the same time than keep the model busy.

More would wait in Triton, where no other request could overtake them.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final

from gateway.fleet.inference import InferenceService
from gateway.fleet.model_limits import count_replicas, find_stages
from gateway.services import Services
from gateway.tensors.outputs import InferResult
from gateway.tensors.signature import Signature
from gateway.triton.inference import InferRequest

# One that is computed, and one that waits in Triton, so that there is always a next one.
BATCHES_PER_INSTANCE: Final = 2


class RowInference(InferenceService):
    """The inferences of one batch."""

    def __init__(self, services: Services, model: str) -> None:
        cancellable = services.settings.cancellable_models
        super().__init__(services.dispatcher, services.signatures, cancellable)
        self._services = services
        self._model = model
        self._running = 0
        self._ends = asyncio.Condition()

    async def infer(self, request: InferRequest) -> InferResult:
        async with self._ends:
            await self._ends.wait_for(self._has_place)
            self._running += 1
        try:
            return await super().infer(request)
        finally:
            self._running -= 1
            async with self._ends:
                self._ends.notify()

    def _has_place(self) -> bool:
        stages = find_stages(self._services.signatures, self._model).values()
        limit = max(
            map(find_stage_limit, stages), default=sys.maxsize
        )  # the config was not read yet
        return self._running < limit * count_replicas(self._services.pool)


def find_stage_limit(signature: Signature) -> int:
    batch_size = max(signature.max_batch_size, 1) if signature.has_dynamic_batching else 1
    return BATCHES_PER_INSTANCE * batch_size * signature.instances
