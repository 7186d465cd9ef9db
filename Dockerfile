# The environment of a run, for a machine with NVIDIA GPUs or without. docs/scaling.md says how it is used.
#
# torch's wheels bring the CUDA libraries and the host brings the driver, so the base needs neither: it is plain
# Debian with Python 3.11. A tag moves and can vanish, so build what you publish from a digest:
#   docker build --build-arg BASE_IMAGE=debian@sha256:... .
# (.github/workflows/image.yml resolves it, and the labels of the image record it.)
ARG BASE_IMAGE=debian:bookworm-slim

FROM ${BASE_IMAGE} AS build
# gcc and the headers serve the one dependency that comes as C source (pycosat); they stay in this stage.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev make python3.11-dev python3.11-venv \
 && rm -rf /var/lib/apt/lists/*
# Both are optional: where torch alone is taken from (a CPU build), and a folder of wheels mounted into the build.
ARG TORCH_INDEX
ARG PIP_FIND_LINKS
WORKDIR /workspace
COPY Makefile pyproject.toml constraints.txt ./
COPY src/grpo/__init__.py src/grpo/__init__.py
# The recipe of every other machine, so the image holds the same versions of the same packages.
RUN make setup VENV=/opt/venv PYTHON=python3.11 PIP_NO_CACHE_DIR=1

FROM ${BASE_IMAGE} AS runtime
ARG BASE_IMAGE
LABEL org.opencontainers.image.title="grpo" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
# bubblewrap holds generated code that is run for its reward. There is no compiler: the optimizer is torch's AdamW,
# and DeepSpeed is asked for no operator that it would have to build.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends bubblewrap ca-certificates git make python3.11 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 grpo \
 # Any user of the host may be the one who runs (docker run --user), with a clone that is not root's.
 && chmod 1777 /home/grpo \
 && git config --system --add safe.directory '*'
COPY --from=build /opt/venv /opt/venv
WORKDIR /workspace
COPY --chown=grpo:grpo . .

# SETUP=no: the environment in VENV is complete. make only checks that a mounted clone asks for the same pins.
# USER answers for a user id that has no account here. The rest is what the Makefile exports, for commands run bare.
ENV VENV=/opt/venv \
    SETUP=no \
    PATH=/opt/venv/bin:$PATH \
    HOME=/home/grpo \
    USER=grpo \
    DVC_SITE_CACHE_DIR=/home/grpo/.cache/dvc-site \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    DO_NOT_TRACK=1 \
    DVC_NO_ANALYTICS=1 \
    DVC_STUDIO_OFFLINE=1 \
    HF_HUB_DISABLE_TELEMETRY=1 \
    HF_HUB_DISABLE_UPDATE_CHECK=1 \
    HF_HUB_OFFLINE=1 \
    ITERATIVE_DO_NOT_TRACK=1 \
    MPLBACKEND=Agg \
    GOMP_SPINCOUNT=10000 \
    OTEL_SDK_DISABLED=true \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONHASHSEED=0 \
    PYTHONUNBUFFERED=1 \
    TOKENIZERS_PARALLELISM=false \
    WANDB_ERROR_REPORTING=false \
    WANDB_MODE=offline \
    WANDB_SILENT=true
USER grpo
CMD ["make", "help"]
