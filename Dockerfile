# rlpost for NVIDIA GPUs.
#
# NOT BUILT YET: written and linted (hadolint) where there is no container engine and no GPU. Expect to mend a detail on the first build,
# and please report it. Build and run:
#     docker build -t rlpost .
#     docker run --rm --gpus all --shm-size=16g -v "$PWD":/workspace -v "$HOME/.cache/huggingface":/home/rlpost/.cache/huggingface \
#         rlpost config=grpo_qwen --dry-run
# Other commands: --entrypoint python3 rlpost -m rlpost.launch ... (rlpost.plan, rlpost.doctor, rlpost.report likewise).
#
# The base image is vLLM's own release: CUDA, the torch that this vLLM was compiled against, and the kernels that it looks for.
# Its version is the one that pyproject.toml pins as vllm; tests/unit/test_dockerfiles.py compares the two.
ARG VLLM_VERSION=0.32.0
FROM vllm/vllm-openai:v${VLLM_VERSION}

# The health checks of KubeRay up to 1.5 call wget. The distribution decides its version.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/*

# The constraints are what the image brings: a dependency of ours may add packages, never move torch, vLLM or a CUDA library under them.
# Only NAME==VERSION lines: a package that the image installed from a file of its build is no usable constraint.
WORKDIR /opt/rlpost
COPY pyproject.toml setup.py MANIFEST.in README.md ./
COPY configs configs
COPY launch launch
COPY rlpost rlpost
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN uv pip freeze --system | grep -E '^[A-Za-z0-9._-]+==' > /tmp/constraints.txt \
    && uv pip install --system --no-cache --constraint /tmp/constraints.txt '.[gpu,rewards,trackers,datasets]' \
    && rm /tmp/constraints.txt \
    && python3 -c 'from importlib.metadata import version; print({name: version(name) for name in ("rlpost", "vllm", "torch", "ray")})'
COPY examples examples

# Not root: what a run writes to a mounted directory then belongs to no root, and clusters that forbid root take the image.
# Group 0 and a group-writable home let platforms choose the user id (docker run --user "$(id -u):0" makes written files yours).
RUN useradd --uid 10001 --gid 0 --create-home --home-dir /home/rlpost rlpost \
    && mkdir -p /home/rlpost/.cache/huggingface /workspace \
    && chown -R rlpost:0 /home/rlpost /workspace \
    && chmod -R g=u /home/rlpost /workspace
# USER too: an id without a line in /etc/passwd has no name, and torch asks for one.
ENV HOME=/home/rlpost \
    USER=rlpost \
    PYTHONUNBUFFERED=1 \
    VLLM_NO_USAGE_STATS=1 \
    RAY_USAGE_STATS_ENABLED=0
USER 10001
# Run directories go to /workspace/runs: mount a disk here.
WORKDIR /workspace

# The image's own entry point is vLLM's server. KubeRay and `docker run --entrypoint ray` put `ray start` in this one's place.
ENTRYPOINT ["python3", "-m", "rlpost.train"]
CMD ["--help"]
