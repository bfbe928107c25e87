# The picker: no torch, no shell needed, nothing written but to /tmp.
#   docker build -f deploy/docker/picker.Dockerfile -t pointsman-picker .
FROM python:3.12-slim AS build
WORKDIR /src
# All packages, by digest; scripts/lock_images.py renews them.
COPY deploy/docker/build.lock deploy/docker/picker.lock ./
RUN python -m pip install --no-cache-dir --only-binary=:all: --require-hashes --requirement build.lock \
 && python -m venv --without-pip /opt/pointsman \
 && python -m pip --python /opt/pointsman/bin/python install --no-cache-dir --only-binary=:all: \
    --no-deps --require-hashes --requirement picker.lock
COPY pyproject.toml README.md LICENSE ./
COPY scripts/one_package.py scripts/build_kernels.py scripts/
COPY pointsman pointsman
COPY base base
COPY picker picker
COPY worker worker
COPY fleet fleet
RUN python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
 && python -m pip --python /opt/pointsman/bin/python install --no-cache-dir --no-index --no-deps /wheels/*.whl \
 && python -m pip --python /opt/pointsman/bin/python check

FROM python:3.12-slim
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="pointsman-picker" \
      org.opencontainers.image.description="An Envoy endpoint picker for LLM fleets" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="https://github.com/pointsman/pointsman" \
      org.opencontainers.image.version="${VERSION}"
COPY --from=build /opt/pointsman /opt/pointsman
ENV PATH=/opt/pointsman/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
WORKDIR /tmp
# ext_proc, its health, and metrics.
EXPOSE 9002 9003 9090
# Kubernetes asks by its own probes.
HEALTHCHECK NONE
USER 65532:65532
ENTRYPOINT ["pointsman", "picker"]
