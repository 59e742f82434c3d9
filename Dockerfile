# Training with CUDA:
#   docker build --tag lambdanets .
#   docker run --rm --gpus all --ipc host --user "$(id -u):$(id -g)" --volume "$PWD:/work" lambdanets train pets/
# --ipc host: workers pass images through shared memory, of which a container has 64 MB by default.
FROM pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime

# Triton compiles its launcher with a C compiler and the headers of Python when a kernel first runs.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*

COPY . /tmp/lambdanets
# torch is in the system Python of the image. The constraint keeps this torch, which matches the CUDA libraries.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN python -c "import torch; print('torch==' + torch.__version__)" > /tmp/torch.txt \
    && python -m pip install --no-cache-dir --constraint /tmp/torch.txt "/tmp/lambdanets[train]" \
    && rm -rf /tmp/lambdanets /tmp/torch.txt \
    && lambdanets --version

# HOME has the caches of torch, Triton and the hub; --user may name any user, so all may write there.
ENV HOME=/home/lambdanets
RUN useradd --create-home --uid 10001 lambdanets \
    && mkdir /work \
    && chmod 1777 /home/lambdanets /work
USER 10001
WORKDIR /work
ENTRYPOINT ["lambdanets"]
CMD ["--help"]
