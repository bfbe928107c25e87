# The worker with torch for CPUs; with --engine sim it needs no model either.
#   docker build -f deploy/docker/worker-cpu.Dockerfile -t pointsman-worker-cpu .
FROM python:3.12-slim AS build
WORKDIR /src
# The kernels are compiled with the wheel; without a compiler the worker would run in torch.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
# All packages, by digest; scripts/lock_images.py renews them. But torch: by its version, and alone, so that only it comes
# from that index.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt deploy/docker/build.lock deploy/docker/worker-cpu.lock ./
RUN python -m pip install --no-cache-dir --only-binary=:all: --require-hashes --requirement build.lock \
 && python -m venv /opt/pointsman \
 && /opt/pointsman/bin/pip install --no-cache-dir --only-binary=:all: \
    --no-deps --index-url "${TORCH_INDEX}" --constraint constraints.txt torch \
 && /opt/pointsman/bin/pip install --no-cache-dir --only-binary=:all: \
    --no-deps --require-hashes --requirement worker-cpu.lock
COPY pyproject.toml README.md LICENSE ./
COPY scripts/one_package.py scripts/build_kernels.py scripts/
COPY pointsman pointsman
COPY base base
COPY picker picker
COPY worker worker
COPY fleet fleet
RUN python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /opt/pointsman/bin/pip install --no-cache-dir --no-index --no-deps /wheels/*.whl \
 && /opt/pointsman/bin/pip check

FROM python:3.12-slim
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="pointsman-worker-cpu" \
      org.opencontainers.image.description="An OpenAI-compatible model server with a paged KV cache, on CPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="https://github.com/pointsman/pointsman" \
      org.opencontainers.image.version="${VERSION}"
COPY --from=build /opt/pointsman /opt/pointsman
ENV PATH=/opt/pointsman/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
WORKDIR /tmp
EXPOSE 8000
HEALTHCHECK NONE
USER 65532:65532
# Fetches a model that is named and not there, with pip or from the hub.
ENTRYPOINT ["pointsman", "worker"]
CMD ["--host=0.0.0.0"]
