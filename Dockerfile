# Three images from one file:
#   docker build --target gateway  -t triton-gateway .            the gateway alone, in front of any Triton
#   docker build --target triton   -t triton-gateway-triton .     NVIDIA's Triton with triton_repo, for GPUs
#   docker build --target embedded -t triton-gateway-embedded .   gateway and Triton in one, on a CPU (make run)
#
# A tag can be moved; what a release is built from is named with its digest:
#   --build-arg PYTHON_IMAGE=docker.io/library/python:3.11.14-slim-bookworm@sha256:…
# Both Pythons are 3.11, for the packages are installed by the one and imported by the other. The embedded
# Triton is for 3.10 to 3.12, and a glibc as new as bookworm's.
ARG PYTHON_IMAGE=docker.io/library/python:3.11.14-slim-bookworm
# Python and what it links to, without a shell; there is no tag of an exact version.
ARG GATEWAY_IMAGE=gcr.io/distroless/python3-debian12:nonroot
ARG TRITON_VERSION=25.12
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:${TRITON_VERSION}-py3
# What the labels say; a release names its commit: --build-arg REVISION="$(git rev-parse HEAD)"
ARG VERSION=0.1.0
ARG REVISION=unknown


# The tools: pip, what builds the wheel, strip. Nothing of these stages is in an image but what is copied by name.
FROM ${PYTHON_IMAGE} AS tools
# The times inside the wheel; with it the same commit makes the same files.
ARG SOURCE_DATE_EPOCH=1767225600
ENV SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH} \
    PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /build
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends binutils \
 && rm -rf /var/lib/apt/lists/*
COPY requirements/build.txt requirements/
RUN python3 -m venv tools \
 && tools/bin/python -m pip install --quiet --no-compile --no-deps --require-hashes -r requirements/build.txt


# What the gateway imports: a layer of its own, which a new version of the gateway leaves as it is.
FROM tools AS packages
COPY requirements/image.txt requirements/
RUN python3 -m venv --without-pip /opt/triton-gateway \
 && tools/bin/python -m pip --python /opt/triton-gateway/bin/python install --quiet --no-compile \
      --no-deps --require-hashes --only-binary=:all: -r requirements/image.txt
# Packages' own tests, headers and symbols for debuggers are for nobody here. What a *.libs folder holds was
# rewritten when its wheel was made, and does not survive strip; whatever is broken does not load, and ends the build.
# Bytecode by the sources' hash, not their times: it is there at the first start, the same in every build,
# and a read-only root has no place to write it later.
RUN cd /opt/triton-gateway/lib/python3.11/site-packages \
 && find . -depth -type d \( -name tests -o -name include \) -exec rm -r {} + \
 && find . -name '*.pyi' -delete \
 && find . -name '*.so*' -not -path '*.libs/*' -exec strip --strip-unneeded {} + \
 && find . -name '*.so*' -exec python3 -c 'import ctypes, sys; [*map(ctypes.CDLL, sys.argv[1:])]' {} + \
 && python3 -m compileall -q --invalidation-mode unchecked-hash . \
 && chmod -R a+rX .


# The gateway, in the environment of its packages; and apart, for a Python that is /usr/bin/python3.
FROM packages AS build
COPY pyproject.toml README.md LICENSE ./
COPY requirements/models.txt requirements/tritonserver.txt requirements/
COPY gateway gateway
RUN tools/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir wheels . \
 && tools/bin/python -m pip --python /opt/triton-gateway/bin/python install --quiet --no-compile \
      --no-deps --no-index wheels/*.whl \
 && cd /opt/triton-gateway/lib/python3.11/site-packages \
 && python3 -m compileall -q --invalidation-mode unchecked-hash gateway \
 && chmod -R a+rX gateway triton_gateway-* \
 && mkdir -p /apart/bin /apart/lib/python3.11/dist-packages /state/triton-gateway \
 && cp -R gateway triton_gateway-* /apart/lib/python3.11/dist-packages \
 && sed '1s|.*|#!/usr/bin/python3|' /opt/triton-gateway/bin/triton-gateway > /apart/bin/triton-gateway \
 && chmod a+x /apart/bin/triton-gateway


# The repository with the files that git does not hold: the sentence model, from its published weights.
FROM tools AS repository
COPY requirements/sentences.txt requirements/sentences-weights.txt requirements/
COPY models/sentences models/sentences
COPY triton_repo triton_repo
RUN TRITON_GATEWAY_CACHE=/tmp/cache tools/bin/python -m models.sentences \
 && rm -r /tmp/cache && chmod -R a+rX triton_repo


# tritonserver from its wheel and the models' environment, where a read-only root can have them.
FROM tools AS server
ENV TRITON_GATEWAY_CACHE=/opt/triton-gateway/cache
COPY requirements/models.txt requirements/tritonserver.txt requirements/
COPY gateway/embedded/installation.py gateway/embedded/
RUN python3 -c 'from gateway.embedded.installation import install_triton; install_triton(print)' \
 && rm -rf /opt/triton-gateway/cache/models-*/lib/python3*/site-packages/pip* \
           /opt/triton-gateway/cache/models-*/lib/python3*/site-packages/setuptools* \
 && chmod -R a+rX /opt/triton-gateway/cache


FROM ${TRITON_IMAGE} AS triton
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
     "--load-model=ensemble", "--load-model=text_ensemble", "--exit-on-error=false", \
     "--strict-readiness=false"]
# Last in every image: they change with every commit, and what stands above them does not.
ARG VERSION REVISION
LABEL org.opencontainers.image.title="triton-gateway-triton" \
      org.opencontainers.image.description="NVIDIA Triton Inference Server with the models of triton-gateway's triton_repo." \
      org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"


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
CMD ["up", "--host", "0.0.0.0"]
ARG VERSION REVISION
LABEL org.opencontainers.image.title="triton-gateway-embedded" \
      org.opencontainers.image.description="triton-gateway and a tritonserver for CPUs in one container." \
      org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"


# The last one is what a build without --target makes. The packages lie where Debian's Python looks for them by
# itself: an environment would hang on the Python that it was made by, which this image has elsewhere.
FROM ${GATEWAY_IMAGE} AS gateway
COPY --from=packages /opt/triton-gateway/lib/python3.11/site-packages /usr/local/lib/python3.11/dist-packages
COPY --from=build /apart /usr/local
COPY --from=build --chown=10001:10001 /state /var/lib
# The base's is the home of a user of its own.
WORKDIR /
ENV HOME=/tmp XDG_STATE_HOME=/var/lib \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 GATEWAY_LOG_FORMAT=json
USER 10001:10001
EXPOSE 8080
STOPSIGNAL SIGTERM
# The process lives; whether it can serve is /readyz, and no reason to start it anew.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
  CMD ["python3", "-I", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/livez', timeout=2)"]
ENTRYPOINT ["triton-gateway"]
CMD ["serve", "--host", "0.0.0.0"]
ARG VERSION REVISION
LABEL org.opencontainers.image.title="triton-gateway" \
      org.opencontainers.image.description="The REST front door of NVIDIA Triton Inference Server." \
      org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
