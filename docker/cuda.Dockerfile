# The server on NVIDIA GPUs: docker build -f docker/cuda.Dockerfile -t compile-and-serve:cuda .
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# g++ and the image's nvcc compile kernels; Python's headers are for the generated code.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && userdel --remove ubuntu \
    && useradd --create-home --uid 1000 serve \
    && install --directory --owner=serve /home/serve/.cache \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir "$(grep '^torch==' constraints.txt)"
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt ".[cuda,hub]"

USER 1000
WORKDIR /home/serve
# Compiled models, kernels and downloaded weights. Kept in a volume, they make the next start a warm one.
VOLUME /home/serve/.cache
EXPOSE 8000
# The first start downloads and compiles the model and builds kernels.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://localhost:8000/health', timeout=4)"]
ENTRYPOINT ["compile-and-serve"]
CMD ["serve", "Qwen/Qwen3-0.6B", "--host", "0.0.0.0"]
