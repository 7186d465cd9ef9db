# The environment of a run, for a machine with NVIDIA GPUs or without. docs/scaling.md says how it is used.
#
#   docker build --tag grpo .                                        what a run needs, and the tests
#   docker build --target development --tag grpo:development .       and the linters, the peers, a compiler
#
# torch's wheels bring the CUDA libraries and the host brings the driver, so the base needs neither: it is plain
# Debian with Python 3.11, by its digest, since a tag moves and can vanish. Raise it deliberately:
#   docker build --build-arg BASE_IMAGE=debian@sha256:... .
# (The labels of the image record what was used; .github/workflows/image.yml resolves a tag that it is given.)
# Any Debian or Ubuntu that packages a Python of 3.11 or newer serves, NVIDIA's CUDA images among them: name its Python.
#   docker build --build-arg BASE_IMAGE=nvidia/cuda:...-ubuntu24.04 --build-arg PYTHON=python3.12 .
ARG BASE_IMAGE=debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171
ARG PYTHON=python3.11

FROM ${BASE_IMAGE} AS build
ARG PYTHON
ARG DEBIAN_FRONTEND=noninteractive
# gcc and the headers serve the one dependency that comes as C source (pycosat); they stay in this stage.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev make ${PYTHON}-dev ${PYTHON}-venv \
 && rm -rf /var/lib/apt/lists/*
# All are optional: where torch alone is taken from (a CPU build), a folder of wheels mounted into the build, pins
# without hashes for wheels of one's own (CONSTRAINTS=constraints.txt), and further extras of pyproject.toml
# (EXTRAS=datasets,judge).
ARG TORCH_INDEX
ARG PIP_FIND_LINKS
ARG CONSTRAINTS
ARG EXTRAS
WORKDIR /workspace
COPY Makefile pyproject.toml constraints.txt constraints-hashes.txt ./
COPY src/grpo/__init__.py src/grpo/__init__.py
# The recipe of every other machine, so the image holds the same versions of the same packages. What it installs to
# check the code itself is for the development stage. SOURCE_DATE_EPOCH lets compiled files go by the content of their
# source: going by its time, which layers round, a third of them would be compiled anew at every import.
RUN export SOURCE_DATE_EPOCH=315532800 \
 && make setup VENV=/opt/venv PYTHON=${PYTHON} PIP_NO_CACHE_DIR=1 \
 && if [ -n "${EXTRAS}" ]; then make extras VENV=/opt/venv PYTHON=${PYTHON} PIP_NO_CACHE_DIR=1; fi \
 && /opt/venv/bin/python -m pip uninstall --quiet --yes mypy pre-commit ruff virtualenv \
 && /opt/venv/bin/python -m pip check \
 # Some builds of torch ship the programs of their own tests, 120 MB.
 && rm -rf /opt/venv/lib/python3*/site-packages/torch/test /opt/venv/lib/python3*/site-packages/torch/bin/test_*

FROM ${BASE_IMAGE} AS runtime
ARG BASE_IMAGE
ARG PYTHON
ARG DEBIAN_FRONTEND=noninteractive
# The commit that is built, if the builder says which.
ARG REVISION
LABEL org.opencontainers.image.title="grpo" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
# bubblewrap holds generated code that is run for its reward. There is no compiler: the optimizer is torch's AdamW,
# and DeepSpeed is asked for no operator that it would have to build.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends bubblewrap ca-certificates git make ${PYTHON} \
 && apt-get clean \
 && rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log \
 # The user id may be taken: Ubuntu's images bring a user of their own.
 && useradd --create-home --non-unique --uid 1000 grpo \
 # Any user of the host may be the one who runs (docker run --user), with a clone that is not root's.
 && install --directory --owner grpo --mode 1777 /home/grpo \
 && install --directory --owner grpo --mode 0777 /workspace \
 && git config --system --add safe.directory '*'
COPY --from=build /opt/venv /opt/venv
COPY docker/entry.sh /usr/local/bin/grpo-entry
WORKDIR /workspace
COPY --chown=grpo . .

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
# DVC works in a repository, and .dockerignore keeps the builder's out: it may hold passwords and unpublished work.
RUN umask 0 \
 && git init --quiet --initial-branch=image \
 && git add --all \
 && git -c user.name=grpo -c user.email=grpo@localhost commit --quiet --message "The files of the image ${REVISION}" \
 && chmod -R a+rwX .
ENTRYPOINT ["grpo-entry"]
CMD ["make", "help"]

# For who changes the code: `make check`, `make test-peers` and operators that are compiled (torch.compile, DeepSpeed's
# own on the CPU; those for a GPU need nvcc besides, which NVIDIA's `devel` images have).
FROM runtime AS development
ARG PYTHON
ARG DEBIAN_FRONTEND=noninteractive
ARG PIP_FIND_LINKS
ARG CONSTRAINTS
USER root
# The targets that install find the environment open to any user.
RUN export SOURCE_DATE_EPOCH=315532800 \
 && apt-get update \
 && apt-get install --yes --no-install-recommends g++ less ${PYTHON}-dev ${PYTHON}-venv \
 && apt-get clean \
 && rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log \
 && make extras EXTRAS=test,dev,peers PIP_NO_CACHE_DIR=1 \
 && python -m pip check \
 && site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
 && chmod a+rwx /opt/venv/bin "$site" \
 && chmod -R a+rwX /opt/venv/bin/grpo "$site"/*grpo* src
USER grpo

# What is built where no stage is named.
FROM runtime
