"""A model that fails with the requested code; `RAISE` is an exception, and `OK` succeeds."""

import triton_python_backend_utils as pb_utils

CODES = (
    "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG",
    "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED",
)  # fmt: skip


class TritonPythonModel:
    def execute(self, requests):
        # An error in a response fails one request; an exception in `execute` fails the whole batch.
        return [self.respond(request) for request in requests]

    def respond(self, request):
        code = pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy()
        name = code[0].decode()
        if name == "OK":
            return pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", code)])
        if name == "RAISE":
            raise RuntimeError("the model raised an exception")
        if name not in CODES:
            return failure(f"CODE must be OK, RAISE or one of {', '.join(CODES)}", "INVALID_ARG")
        return failure(f"the model returned {name}", name)


def failure(message, name):
    # pb_utils has its classes only at run time, so this cannot be a module-level table.
    code = getattr(pb_utils.TritonError, name)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
