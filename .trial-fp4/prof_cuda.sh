# ncu of the CUDA kernels (base, no dependent launch), for the visit after; about 25 s.
cd "$(dirname "$0")/.."
export PYTHONPATH=src:.trial-fp4 PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton-fp4} XDG_CACHE_HOME=${XDG_CACHE_HOME:-/tmp/xdg-fp4}
mkdir -p -m 700 $XDG_CACHE_HOME; OUT=${OUT:-/tmp/fp4}; mkdir -p $OUT
for f in "nvfp4 q30" "mxfp4 gpt_oss_20b"; do set -- $f
  timeout -s KILL 25 ncu --clock-control none --target-processes all --kernel-name-base function --kernel-name fp4_decode --launch-skip 2 --launch-count 2 \
   --section SpeedOfLight --section ComputeWorkloadAnalysis --section WarpStateStats --section SchedulerStats --section Occupancy --section LaunchStats --section MemoryWorkloadAnalysis --section InstructionStats --csv --page raw \
   python3 .trial-fp4/prof.py $1 $2 64 > $OUT/ncu-cuda-$1.csv 2> $OUT/ncu-cuda-$1.err; wc -c $OUT/ncu-cuda-$1.csv
done
