#!/usr/bin/env bash
# Everything that needs a GPU, in one command: conformance of every library, the GPU tests, tuning and judging choices.
#
#     bash benchmarks/gpu.sh results            with the libraries that are installed
#     LIBRARIES=.gpu bash benchmarks/gpu.sh     with folders that bring an unpack.sh each, for a host without an index
#
# Writes doctor.txt, conformance-<library>.{txt,json}, tests.txt, judge.{json,md} and conformance.md.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-results}
mkdir -p "$out"
if [ -n "${LIBRARIES:-}" ]; then
  for unpack in "$LIBRARIES"/*/unpack.sh; do . "$unpack"; done
fi
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
limit_s=${LIMIT_S:-500}
steps=${STEPS:-doctor conformance tests build times}
libraries=${BACKENDS:-torch flash_attn flashinfer vllm cudnn liger quack xformers reference}

case " $steps " in *" doctor "*) python3 -m layerzero doctor --load > "$out/doctor.txt" 2>&1 ;; esac
case " $steps " in *" conformance "*)
  for library in $libraries; do
    timeout "$limit_s" python3 -m layerzero conformance --device cuda --backend "$library" --calls "${CALLS:-20}" --json \
      > "$out/conformance-$library.json" 2> "$out/conformance-$library.txt" &
  done
  wait ;;
esac
case " $steps " in *" tests "*) timeout "$limit_s" python3 -m pytest -q -m gpu -p no:cacheprovider > "$out/tests.txt" 2>&1; tail -3 "$out/tests.txt" ;; esac
case " $steps " in *" build "*)
  for shard in 0 1 2 3 4 5 6 7; do timeout "$limit_s" python3 benchmarks/gpu.py --build "$shard/8" > "$out/build-$shard.txt" 2>&1 & done
  wait ;;
esac
case " $steps " in *" times "*) timeout "$limit_s" python3 benchmarks/gpu.py --out "$out" > "$out/times.txt" 2>&1; tail -40 "$out/times.txt" ;; esac
python3 benchmarks/gpu_report.py "$out"
