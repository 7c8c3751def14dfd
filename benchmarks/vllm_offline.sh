#!/usr/bin/env bash
# Packs vLLM 0.20.0 for a GPU host without a network: its Python code and the libraries that `vllm.LLM` imports.
#   bash benchmarks/vllm_offline.sh FOLDER [WHEELS]      writes FOLDER/0, FOLDER/1, ... of at most PART_MIB (44) each
# WHEELS (default: a new folder) keeps what is downloaded; vLLM's own wheel has 244 MB.
# On the host, x86-64 with Python 3.12 and torch 2.11.0 for CUDA 13: `. FOLDER/N/unpack.sh` for each part in order. The
# last one makes /tmp/vllm and puts it on PYTHONPATH. vLLM's large operator files are linked from a folder that has them:
# VLLM_OPERATORS, an unpacked wheel's vllm/. With `OPERATORS=1` they are packed, too: six parts more.
# The host brings torch, Triton, Transformers 5.17, tokenizers, safetensors, huggingface_hub, NumPy, Pillow, setuptools;
# apache-tvm-ffi, msgspec, einops, PyYAML and opentelemetry-api come beside the operators. FlashInfer is vLLM's own choice.
set -euo pipefail
target=$(realpath -m "$1"); wheels=${2:-$(mktemp -d)}; work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
mkdir -p "$wheels" "$target"
get() { python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
  $(printf -- '--platform manylinux_2_%s_x86_64 ' 35 34 31 28 27 26 24 17 12 5) --platform manylinux2014_x86_64 -d "$wheels" "$@"; }
# What `vllm.LLM` imports beside those, found by leaving each out on a CPU, 2026-11-26. Grammars (xgrammar, llguidance) and
# the OpenAI types are imported by every engine, used or not; ray, OpenCV, numba, mistral_common and outlines are not.
needed=(cbor2==6.3.0 openai-harmony==0.0.8 openai==2.54.0 pybase64==1.5.1 uvloop==0.23.0 llguidance==1.3.0 xgrammar==0.2.8
  partial-json-parser==0.2.1.1.post7 pydantic==2.14.4 pydantic-core==2.50.5 typing-inspection==0.4.5 annotated-types==0.8.0
  annotated-doc==0.0.7 fastapi==0.136.3 starlette==1.10.0 anyio==4.16.0 sniffio==1.3.1 aiohttp==3.14.5 aiosignal==1.4.0
  aiohappyeyeballs==2.7.1 frozenlist==1.8.0 multidict==7.2.1 propcache==0.5.4 yarl==1.25.1 attrs==26.1.0 pyzmq==27.3.0 jiter==0.19.0
  distro==1.9.0 cachetools==8.0.2 psutil==7.2.2 py-cpuinfo==9.0.0 cloudpickle==3.1.3 prometheus_client==0.26.0 protobuf==7.36.2
  regex==2026.11.19 requests==2.34.2 urllib3==2.8.0 idna==3.20 certifi==2026.10.19.post1 charset-normalizer==3.5.3 httpx==0.28.1 httpcore==1.0.9
  h11==0.16.0 tqdm==4.70.1 gguf==0.19.0 typing-extensions==4.16.0
  flashinfer-python==0.6.8.post1 nvidia-ml-py==13.590.48 tabulate==0.9.0)
get vllm==0.20.0 "${needed[@]}"
large='vllm/_C.abi3.so vllm/_C_stable_libtorch.abi3.so vllm/_moe_C.abi3.so vllm/_flashmla_C.abi3.so
  vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so'
[ -n "${OPERATORS:-}" ] && left_out='' || left_out=$large
mkdir "$work/site"
for each in "${needed[@]}"; do name=${each%%=*}; unzip -q -o "$wheels/${name//-/_}-${each##*=}"-*.whl -d "$work/site"; done
# left out: headers of float8 kernels that are compiled where they run
unzip -q -o "$wheels"/vllm-0.20.0-*.whl -x 'vllm/third_party/deep_gemm/include/*' $left_out -d "$work/site"
# flash-attn-4 has the name flash_attn without the ops that vLLM imports wherever it finds that name
mkdir -p "$work/site/flash_attn/ops/triton"
echo 'from vllm.vllm_flash_attn.ops.triton.rotary import apply_rotary' > "$work/site/flash_attn/ops/triton/rotary.py"
find "$work/site" -name tests -path '*/site/*/tests' -prune -exec rm -rf {} +
tar c -C "$work/site" . | xz -T0 -6 > "$work/all.tar.xz"
rm -rf "$target"/[0-9]*; (cd "$work" && split -b ${PART_MIB:-44}M -d -a 1 all.tar.xz part.)
last=0
for part in "$work"/part.*; do last=${part##*.}; mkdir -p "$target/$last"; mv "$part" "$target/$last/part"
  echo "cp \"\$(dirname \"\${BASH_SOURCE[0]}\")/part\" /tmp/vllm.part.$last" > "$target/$last/unpack.sh"
done
cat >> "$target/$last/unpack.sh" <<U
for n in \$(seq 0 $last); do [ -f /tmp/vllm.part.\$n ] || echo "part \$n has not arrived" >&2; done
mkdir -p /tmp/vllm && (for n in \$(seq 0 $last); do cat /tmp/vllm.part.\$n; done) | tar xJ -C /tmp/vllm
operators=\${VLLM_OPERATORS:-}
for each in $(echo $left_out); do
  [ -f "\$operators/\${each#vllm/}" ] && ln -sf "\$operators/\${each#vllm/}" "/tmp/vllm/\$each" || echo "no \$each in \$operators" >&2
done
export PYTHONPATH=/tmp/vllm:\${PYTHONPATH:-} VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
U
du -sb "$target"/*
