# Run in the repository root on the GPU machine: bash .trial-fp4/run.sh   (about 60 s)
# Correctness of the CUDA kernels over 4-bit weights against the reference and Triton's, then times of
# today's kernels, the CUDA ones with variants, and bf16. Each part is killed at its limit.
cd "$(dirname "$0")/.."
export PYTHONPATH=src:.trial-fp4 PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton-fp4} XDG_CACHE_HOME=${XDG_CACHE_HOME:-/tmp/xdg-fp4}
mkdir -p -m 700 $XDG_CACHE_HOME; OUT=${OUT:-/tmp/fp4}; mkdir -p $OUT; S=$(date +%s)
# First one tiny case on its own: if this hangs, nothing else is worth running.
timeout -s KILL 25 python3 -m pytest -q -x -p no:cacheprovider -m gpu tests/gpu/test_fp4_decode_gpu.py -k "one_hot" > $OUT/onehot.log 2>&1; tail -5 $OUT/onehot.log; echo "one-hot at $(($(date +%s)-S))"
for t in 1 16 64 256; do for f in "nvfp4 q30" "mxfp4 gpt_oss_20b"; do set -- $f
  timeout -s KILL 40 python3 .trial-fp4/times.py $1 $2 $t --warm > $OUT/warm-$1-$t.log 2>&1 &
done; done
wait; tail -qn 2 $OUT/warm-*.log | cut -c1-200; echo "warm at $(($(date +%s)-S))"
for f in "nvfp4 q30 64,16,1,256" "mxfp4 gpt_oss_20b 64,16,1,256"; do set -- $f
  timeout -s KILL 22 python3 .trial-fp4/times.py $1 $2 $3 > $OUT/times-$1.log 2>&1; cut -c1-330 $OUT/times-$1.log; echo "times $1 at $(($(date +%s)-S))"
done
timeout -s KILL 60 python3 -m pytest -q -x -p no:cacheprovider -n 8 -m gpu tests/gpu/test_fp4_decode_gpu.py > $OUT/tests.log 2>&1; tail -8 $OUT/tests.log; echo "tests at $(($(date +%s)-S))"
