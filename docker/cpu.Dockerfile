# The server on a CPU: docker build -f docker/cpu.Dockerfile -t compile-and-serve:cpu .
FROM python:3.12-slim-bookworm

# g++ compiles the kernels and the generated code for the CPU that the container runs on.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 serve \
    && install --directory --owner=serve /home/serve/.cache

WORKDIR /src
# An index with builds of torch for CPUs. Without one, pip may take a build with some gigabytes for CUDA.
ARG TORCH_INDEX=""
COPY constraints.txt ./
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt ".[hub]"

USER 1000
WORKDIR /home/serve
# Compiled models, kernels and downloaded weights. Kept in a volume, they make the next start a warm one.
VOLUME /home/serve/.cache
EXPOSE 8000
# The first start downloads and compiles the model.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://localhost:8000/health', timeout=4)"]
ENTRYPOINT ["compile-and-serve"]
CMD ["serve", "smollm2-135m", "--host", "0.0.0.0"]
