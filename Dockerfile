# Images of hlat, for CPUs and for NVIDIA GPUs:
#
#     docker build --target cpu  -t hlat:cpu  .
#     docker build --target cuda -t hlat:cuda .
#     docker run --rm -v "$PWD:/data" hlat:cpu quickstart
#
# Packages are those of constraints.txt, so two builds of one commit have the same versions. The base image is pinned by
# its version; pin it to the bit with --build-arg BASE=python@sha256:... The user is 1000:1000, not root.

# Image with Python 3.11 or newer, its headers, and apt.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS system
# While they run, hlat compiles its optimizer for CPUs, and torch.compile and Triton compile kernels.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 --create-home hlat \
 && install --directory --owner=1000 --group=1000 /data
ENV PATH=/opt/hlat/bin:$PATH PYTHONUNBUFFERED=1

FROM system AS packages
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/hlat
COPY constraints.txt /build/

FROM packages AS packages-cpu
# Index with the builds of torch for CPUs; PyPI's builds for Linux are those for CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --constraint /build/constraints.txt --index-url ${TORCH_INDEX} torch
# Extras of pyproject.toml: export to and import from transformers, object stores, tokenizers.
ARG EXTRAS=hf,http,s3,sentencepiece
COPY . /build
RUN pip install --constraint /build/constraints.txt "/build[${EXTRAS}]"

FROM packages AS packages-cuda
RUN pip install --constraint /build/constraints.txt torch
ARG EXTRAS=hf,http,s3,sentencepiece
COPY . /build
RUN pip install --constraint /build/constraints.txt "/build[${EXTRAS}]"

FROM system AS cpu
COPY --from=packages-cpu /opt/hlat /opt/hlat
WORKDIR /data
USER 1000:1000
ENTRYPOINT ["hlat"]
CMD ["--help"]

FROM system AS cuda
COPY --from=packages-cuda /opt/hlat /opt/hlat
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /data
USER 1000:1000
ENTRYPOINT ["hlat"]
CMD ["--help"]
