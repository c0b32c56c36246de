# docker build -t shardmath . && docker run --rm shardmath
#
# The demo: real weights move from FSDP over TP to TP=4 between eight processes, and are compared. Needs 3 GB of memory.
FROM python:3.12-slim

RUN apt-get update && apt-get install -y --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /shardmath
COPY . .
# Installs as `make demo` would, so that the container only runs it.
RUN make TORCH_INDEX=https://download.pytorch.org/whl/cpu .venv/.installed-demo
CMD ["make", "demo"]
