"""The version that a label chose for one request."""

from __future__ import annotations

from typing import Any, Final, cast

from gateway.capabilities.versions.label_router import ActiveLabel
from gateway.telemetry.request_info import RequestScope
from gateway.triton.sequence import SequenceStep

# The key of the label in the scope of a request that may be copied.
CHOSEN_LABEL: Final = "chosen_label"


class LabelChoice:
    """A `VersionChoice` by a label."""

    def __init__(self, label: ActiveLabel, scope: RequestScope) -> None:
        self.version = label.choose_version(scope)
        self._label = label
        self._scope = scope
        cast("dict[str, Any]", scope)[CHOSEN_LABEL] = label

    def choose_sequence_version(self, step: SequenceStep) -> str:
        # A step means nothing without the others, some of which would not be copied.
        cast("dict[str, Any]", self._scope).pop(CHOSEN_LABEL, None)
        self.version = self._label.choose_sequence_version(self._scope, self.version, step)
        return self.version

    def choose_other_version(self, refused: str, step: SequenceStep | None) -> str:
        if step is not None or not self._label.value.is_split:
            return ""
        version = self._label.redirect(refused)
        self.version = version or self.version
        return version
