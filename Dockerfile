# Images of hlat, for CPUs and for NVIDIA GPUs:
#
#     docker build --target cpu  -t hlat:cpu  .
#     docker build --target cuda -t hlat:cuda .
#     docker run --rm -v "$PWD:/data" hlat:cpu quickstart
#
# Packages are those of requirements.lock, each with its sha256, and the base image is named by its digest: two builds of
# one commit have the same bits, apart from Debian's compiler. The user is 1000:1000, not root.

# Image with Python 3.11 or newer, its headers, and apt. This is Python 3.12.14, for every architecture.
ARG BASE=python:3.12-slim-bookworm@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254

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
COPY requirements.lock /build/
# The rest of the file is for work on hlat itself.
RUN sed -i '/^# For work/,$d' /build/requirements.lock

FROM packages AS packages-cpu
# Index with the builds of torch for CPUs, and their hashes for Python 3.12 (x86-64, ARM): PyPI's builds are for CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_HASHES="4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2 \
6f307c2c32d764ffc6ff6893b801fad6d4752f3e67966cb8abf1843427c02604"
RUN torch=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' /build/requirements.lock) \
 && echo "$torch $(printf ' --hash=sha256:%s' ${TORCH_HASHES})" >/build/torch.lock \
 && pip install --require-hashes --no-deps --index-url ${TORCH_INDEX} --requirement /build/torch.lock \
 && sed -i '/^\(torch\|triton\|nvidia-[^=]*\|cuda-[^=]*\)==/,/[^\\]$/d' /build/requirements.lock \
 && pip install --require-hashes --requirement /build/requirements.lock
COPY . /build
RUN pip install --no-deps --no-build-isolation /build

FROM packages AS packages-cuda
RUN pip install --require-hashes --requirement /build/requirements.lock
COPY . /build
RUN pip install --no-deps --no-build-isolation /build

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
