# An image for `meshpar launch kubernetes|trainjob -o image=...`, and for SLURM with pyxis or apptainer:
#   docker build -t registry/me/meshpar:1 .
# PyPI's torch brings CUDA and NCCL. For CPUs alone: --build-arg INDEX=https://download.pytorch.org/whl/cpu
FROM python:3.12-slim-bookworm
ARG INDEX=https://pypi.org/simple
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1

# torch.compile needs a compiler, NCCL the verbs of InfiniBand, NUMA binding numactl. Versions are those of Debian 12.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ ibverbs-providers libibverbs1 numactl \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /src
# torch first, in a separate layer that code changes do not invalidate.
COPY constraints.txt ./
RUN pip install --constraint constraints.txt --index-url "$INDEX" --extra-index-url https://pypi.org/simple torch
COPY pyproject.toml README.md LICENSE ./
COPY meshpar meshpar
COPY models models
COPY checkpoints checkpoints
COPY launchers launchers
RUN pip install --constraint constraints.txt '.[train,transformers]' && meshpar --version

# Jobs need no root. A number, because Kubernetes cannot tell whether a name is root.
RUN useradd --uid 1000 --create-home meshpar && install --directory --owner=1000 /workspace
USER 1000
WORKDIR /workspace
CMD ["meshpar", "--help"]
