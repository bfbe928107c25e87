# The worker with torch and Triton for NVIDIA GPUs.
#   docker build -f deploy/docker/worker-gpu.Dockerfile -t pointsman-worker-gpu .
# CUDA's libraries come with torch; of the base image only what the driver expects is used.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS base
# Triton compiles the launchers of its kernels with a C compiler, while the worker runs.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3.12 python3.12-venv python3.12-dev gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*

FROM base AS build
WORKDIR /src
# All packages, by digest; scripts/lock_images.py renews them.
COPY deploy/docker/build.lock deploy/docker/worker-gpu.lock ./
RUN python3.12 -m venv /build \
 && /build/bin/pip install --no-cache-dir --only-binary=:all: --require-hashes --requirement build.lock \
 && python3.12 -m venv /opt/pointsman \
 && /opt/pointsman/bin/pip install --no-cache-dir --only-binary=:all: \
    --no-deps --require-hashes --requirement worker-gpu.lock
COPY pyproject.toml README.md LICENSE ./
COPY scripts/one_package.py scripts/build_kernels.py scripts/
COPY pointsman pointsman
COPY base base
COPY picker picker
COPY worker worker
COPY fleet fleet
RUN /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /opt/pointsman/bin/pip install --no-cache-dir --no-index --no-deps /wheels/*.whl \
 && /opt/pointsman/bin/pip check

FROM base
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="pointsman-worker-gpu" \
      org.opencontainers.image.description="An OpenAI-compatible model server with a paged KV cache, on NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="https://github.com/pointsman/pointsman" \
      org.opencontainers.image.version="${VERSION}"
COPY --from=build /opt/pointsman /opt/pointsman
ENV PATH=/opt/pointsman/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /tmp
EXPOSE 8000
HEALTHCHECK NONE
USER 65532:65532
# Fetches a model that is named and not there, with pip or from the hub.
ENTRYPOINT ["pointsman", "worker"]
CMD ["--host=0.0.0.0"]
