# A service on NVIDIA GPUs: docker build -f containers/cuda.Dockerfile -t layerzero-cuda .
# devel: FlashInfer compiles with nvcc, Triton and CUTLASS with ptxas.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update && apt-get install -y --no-install-recommends g++ python3 python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

WORKDIR /app
COPY containers/cuda.txt containers/cuda.txt
RUN pip install --no-cache-dir setuptools==84.2.1 && pip install --no-cache-dir -r containers/cuda.txt

COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY src src
COPY examples examples
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

# A builder has no GPU: `layerzero doctor --load --strict` on the machine that runs this tells the rest.
RUN LAYERZERO_CACHE_DIR= layerzero doctor

RUN useradd --create-home service && install -d -o service /var/cache/layerzero
USER service
ENV LAYERZERO_CACHE_DIR=/var/cache/layerzero
EXPOSE 9400
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9400/livez', timeout=5)"]
CMD ["python", "examples/probes.py", "--host", "0.0.0.0", "--port", "9400"]
