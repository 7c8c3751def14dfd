#!/usr/bin/env bash
# Everything that needs a GPU, in one command: conformance of every library, the GPU tests, tuning and judging choices.
#
#     bash benchmarks/gpu.sh results            with the libraries that are installed
#     LIBRARIES=.gpu bash benchmarks/gpu.sh     with folders that bring an unpack.sh each, for a host without an index
#
#     STEPS="layers hour" bash benchmarks/gpu.sh results    some of the steps: doctor, conformance, fuzz, tests, build, times
#                               by default; when named, minutes each: layers, weights, hour, tune, ship, serving, diffusion,
#                               engine, cache, tokens, models and training
#
# Writes doctor.txt, conformance-<library>.{txt,json}, fuzz-<seed>.txt, tests.txt, judge.{json,md} and conformance.md, and
# of the other steps a text and what the script keeps. Steps go on where one fails; LIMIT_S is the longest that a command may take.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-results}
mkdir -p "$out"
if [ -n "${LIBRARIES:-}" ]; then
  for unpack in "$LIBRARIES"/*/unpack.sh; do . "$unpack"; done
fi
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
limit_s=${LIMIT_S:-500}
steps=${STEPS:-doctor conformance fuzz tests build times}
libraries=${BACKENDS:-torch flash_attn flashinfer vllm cudnn liger quack xformers humming reference}

case " $steps " in *" doctor "*) python3 -m layerzero doctor --load > "$out/doctor.txt" 2>&1 ;; esac
case " $steps " in *" conformance "*)
  for library in $libraries; do
    timeout "$limit_s" python3 -m layerzero conformance --device cuda --backend "$library" --calls "${CALLS:-20}" --json \
      > "$out/conformance-$library.json" 2> "$out/conformance-$library.txt" &
  done
  wait ;;
esac
case " $steps " in *" fuzz "*)  # calls of all functions: limits of one kernel are seldom drawn by its own conformance
  for seed in ${FUZZ_SEEDS:-1 2 3 4 5 6 7 8}; do
    timeout "$limit_s" python3 -m layerzero fuzz --device cuda --calls "${FUZZ_CALLS:-8000}" --seed "$seed" \
      > "$out/fuzz-$seed.txt" 2>&1 &
  done
  wait
  grep -h "comparisons with float64" "$out"/fuzz-*.txt ;;
esac
case " $steps " in *" tests "*) timeout "$limit_s" python3 -m pytest -q -m gpu -p no:cacheprovider > "$out/tests.txt" 2>&1; tail -3 "$out/tests.txt" ;; esac
case " $steps " in *" build "*)
  for shard in 0 1 2 3 4 5 6 7; do timeout "$limit_s" python3 benchmarks/gpu.py --build "$shard/8" > "$out/build-$shard.txt" 2>&1 & done
  wait ;;
esac
case " $steps " in *" times "*) timeout "$limit_s" python3 benchmarks/gpu.py --out "$out" > "$out/times.txt" 2>&1; tail -40 "$out/times.txt" ;; esac
in_shards() {  # a command in eight processes, each with its share of what it compiles
  for shard in 0 1 2 3 4 5 6 7; do timeout "$limit_s" "$@" --build "$shard/8" > "$out/build-$step-$shard.txt" 2>&1 & done
  wait
}
measured() {  # a command whose text is kept under the step's name, and whose last lines are shown
  timeout "$limit_s" "$@" > "$out/$step.txt" 2>&1
  echo "== $step: rc $?"
  tail "-${TAIL:-40}" "$out/$step.txt"
}
for step in $steps; do
  case $step in
    layers) in_shards python3 benchmarks/layers_gpu.py
      measured python3 benchmarks/layers_gpu.py --budget-s "${BUDGET_S:-130}" --out "$out/layers.json" ;;
    weights) LAYERZERO_REQUIRE_VETTING=0 measured python3 benchmarks/layers_gpu.py --weights --only "${ONLY:-}" \
        --budget-s "${BUDGET_S:-400}" --out "$out/weights.json" ;;
    hour) for seed in ${SEEDS:-0}; do
        step=hour-$seed
        LAYERZERO_CACHE_DIR=$(mktemp -d) measured python3 benchmarks/first_hour_gpu.py --seed "$seed" --out "$out/hour-$seed.json"
      done ;;
    tune) LAYERZERO_CACHE_DIR=$(mktemp -d) measured python3 -m layerzero tune attention --budget-s "${BUDGET_S:-300}" ;;
    ship) in_shards python3 benchmarks/ship_times.py dense paged layer
      measured python3 benchmarks/ship_times.py dense paged layer --replays --budget-s "${BUDGET_S:-250}" --out "$out/tables" ;;
    serving) LAYERZERO_CACHE_DIR=$(mktemp -d) measured python3 benchmarks/serving.py --tune-s "${BUDGET_S:-90}" \
        --only "${ONLY:-step,cascade,mla,ragged,sparse,decode,mixed}" ;;
    diffusion) LAYERZERO_CACHE_DIR=$(mktemp -d) measured python3 benchmarks/diffusion_gpu.py --out "$out/diffusion.json" ;;
    engine) measured python3 examples/engine.py --shape 8b --requests 64 --prompt 1024 --tokens 128 --compare 2 ;;
    cache) measured python3 benchmarks/kv_cache.py ;;
    tokens) measured python3 benchmarks/same_tokens.py --device cuda ;;
    training) measured python3 -m layerzero conformance --device cuda --calls 20 --kernel "*.grad" --kernel "liger.*cross_entropy*" \
        --kernel "quack.*cross_entropy*" --kernel "flash_attn.v[23]*"
      step=training_arguments
      measured python3 -m pytest -q -p no:cacheprovider -m "" tests/kernels/test_library_gradients.py
      step=training_times
      measured python3 benchmarks/training_gpu.py ;;
    models) for step in ${MODELS:-llama8b}; do measured python3 benchmarks/optimize_gpu.py "$step"; done ;;
  esac
done
case " $steps " in *" conformance "* | *" times "*) python3 benchmarks/gpu_report.py "$out" ;; esac
